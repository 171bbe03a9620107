"""Clocks that do not slow down what they time: CUDA events on a GPU, the performance counter on a
CPU.
"""

import time
from collections.abc import Callable

import torch

from magicdec.decoding.state import State


class Clock:
    """Marks on a device's own timeline; reading them waits once, at the end."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._marks: list = []

    def mark(self) -> None:
        """Note the time at which all work queued so far is done; does not wait for it."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the seconds from the first mark to each later one."""
        if not self._cuda:
            return [mark - self._marks[0] for mark in self._marks[1:]]
        self._marks[-1].synchronize()
        return [self._marks[0].elapsed_time(mark) / 1e3 for mark in self._marks[1:]]


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work queued so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """`with Stopwatch(device) as watch: ...` then `watch.seconds`, the device's work included."""

    def __init__(self, device: torch.device):
        self._device = device
        self.seconds = 0.0

    def __enter__(self) -> "Stopwatch":
        synchronize(self._device)
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        synchronize(self._device)
        self.seconds = time.perf_counter() - self._start


def seconds_of_all_rows(step: Callable[[], object], state: State) -> float:
    """Return the seconds of a round, or of a part of one, that every row takes part in. The round
    is not counted.

    Finished rows rest and cost next to nothing: a time says nothing without the rows that it is of.
    """
    state.wake()
    with Stopwatch(state.tokens_BS.device) as watch:
        step()
    state.forget_rounds()
    return watch.seconds
