"""Clocks take the time of the device that works."""

import time
from itertools import count

import pytest
import torch

from magicdec.decoding.state import State
from magicdec.decoding.timers import Clock, Stopwatch, seconds_of_all_rows
from magicdec.verification.accept import Verdict


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


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cuda", ["wait", "read", "work", "wait", "read"]), ("cpu", ["read", "work", "read"])],
)
def test_a_stopwatch_waits_for_a_gpu_before_each_reading(device, expected, monkeypatch):
    events, ticks = [], count(10.0, 0.5)

    def read() -> float:
        events.append("read")
        return next(ticks)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: events.append("wait"))
    monkeypatch.setattr(time, "perf_counter", read)
    with Stopwatch(torch.device(device)) as watch:
        before = watch.seconds
        events.append("work")
    monkeypatch.undo()
    assert events == expected
    assert (before, watch.seconds) == (0.0, 0.5)


def test_a_timed_round_is_one_of_all_rows_and_is_not_counted(monkeypatch):
    state = State([[1, 2], [3]], 4, 1, (), "cpu")
    state.start(torch.tensor([7, 7]))
    state.finished_B[0] = True

    def step() -> None:
        verdict = Verdict(torch.zeros(2, dtype=torch.int32), torch.tensor([[8], [9]]))
        assert state.commit(verdict).tolist() == [1, 1]

    monkeypatch.setattr(time, "perf_counter", count(10.0, 0.5).__next__)
    seconds = seconds_of_all_rows(step, state)
    monkeypatch.undo()
    assert seconds == 0.5
    assert state.num_tokens_B.tolist() == [4, 3]
    assert state.round_1.tolist() == [0]
    assert (state.accepted_RB == -1).all()
    assert (state.committed_RB == 0).all()
