"""Report how a pass is doing: a point every few rounds, read without waiting for the device.

B rows, R rounds.
"""

from time import perf_counter

import torch

from magicdec.decoding.state import State
from magicdec.tracking.progress import Progress, Stage

EVERY, INTERVAL_S = 8, 1.0  # rounds between two looks at the clock, and seconds between two points


class Points:
    """Counter of a pass's rounds, called by the decoder every round. It reports a point now and
    then.
    """

    def __init__(self, state: State, way: str, stage: Stage, progress: Progress):
        self._state, self._way = state, way
        self._stage, self._progress = stage, progress
        self._count = self._from = 0
        self._last = perf_counter()
        self._read: tuple[torch.Tensor, torch.cuda.Event | None, int, float] | None = None

    def __call__(self, rounds: int) -> None:
        """Count rounds."""
        self._stage.advance(rounds)
        self._count += rounds
        if self._count % EVERY == 0:
            self._look()

    def _look(self) -> None:
        """Report the last reading if it has arrived, and start another if it is time."""
        if self._read is not None and (self._read[1] is None or self._read[1].query()):
            self._report()
        now = perf_counter()
        if self._read is None and now - self._last >= INTERVAL_S:
            self._begin_to_read(now)

    def _begin_to_read(self, now: float) -> None:
        """Sum the counters since the last point on the device, and copy the sums while it goes
        on.
        """
        accepted_RB = self._state.accepted_RB[self._from : self._count]
        committed_RB = self._state.committed_RB[self._from : self._count]
        sums = torch.stack(
            [(accepted_RB >= 0).sum(), accepted_RB.clamp(min=0).sum(), committed_RB.sum()]
        )
        event = None
        if sums.is_cuda:
            sums = torch.empty(3, dtype=sums.dtype, pin_memory=True).copy_(sums, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._read = (sums, event, self._count, now - self._last)
        self._from, self._last = self._count, now
        if event is None:
            self._report()

    def _report(self) -> None:
        assert self._read is not None
        sums, _, count, seconds = self._read
        self._read = None
        rounds, accepted, committed = sums.tolist()
        point = {
            f"live/{self._way}/round": count,
            f"live/{self._way}/tokens_per_second": committed / seconds,
        }
        if self._way == "speculative" and rounds:
            point["live/accepted"] = accepted / rounds
        self._progress.report(point)
