"""Clocks take the time of the device that works."""

import time
from itertools import count

import pytest
import torch

from magicdec.decoding.timers import Clock


class Event:
    """An event of a GPU on which each one comes 4 ms after the last."""

    numbers = count()

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        self.number = next(self.numbers)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: "Event") -> float:
        return 4.0 * (later.number - self.number)


def test_a_gpus_time_is_that_of_its_own_events(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = Clock(torch.device("cuda"))
    for _ in range(3):
        clock.mark()
    assert clock.seconds() == [0.004, 0.008]


def test_a_cpus_time_needs_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", None)
    monkeypatch.setattr(time, "perf_counter", count(10.0, 0.5).__next__)
    clock = Clock(torch.device("cpu"))
    for _ in range(3):
        clock.mark()
    assert clock.seconds() == pytest.approx([0.5, 1.0])
