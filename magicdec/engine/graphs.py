"""A step that is run many times over static buffers: replayed as one CUDA graph, or called as it
is.
"""

import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate
from statistics import fmean

import torch

from magicdec.decoding.state import State
from magicdec.decoding.timers import seconds_of_all_rows

WARMUP_CALLS = 3  # before a capture, so that libraries allocate their workspaces outside of it


def rehearse(function: Callable[[], object], undo: Callable[[], None] | None) -> None:
    """Make the calls before a capture, and undo what they append and count, which would overflow
    the buffers.
    """
    for _ in range(WARMUP_CALLS):
        function()
        if undo is not None:
            undo()


class Captures:
    """The stream and the memory pool of one batch's graphs.

    On one stream, because libraries keep a workspace for each, and in one pool of memory: a step
    leaves its results in static buffers, so that the next may write over everything else.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = _stream(device)

    def capture(
        self, function: Callable[[], object], undo: Callable[[], None] | None
    ) -> Callable[[], object]:
        """Rehearse and capture `function`. Return a function that replays it."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            rehearse(function, undo)
        current.wait_stream(self.stream)
        graph, cause = torch.cuda.CUDAGraph(), None
        try:
            # thread_local: what other threads do, such as NCCL's watchdog, cannot spoil the
            # capture.
            with (
                warnings.catch_warnings(),
                torch.cuda.graph(graph, self.pool, self.stream, "thread_local"),
            ):
                # Of a draft that proposes on the host.
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                try:
                    function()
                except Exception as error:
                    # Ending a capture that has failed raises another, which says less.
                    cause = error
                    raise
        except Exception as error:
            # Leaving the context raised before it restored the stream.
            torch.cuda.set_stream(current)
            raise cause or error from None
        return graph.replay


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Step:
    """A call of `function` (no arguments, everything in place, its result dropped), or a replay of
    its capture.

    The function must tolerate a few extra calls before the first real one, each followed by `undo`:
    capture it while the state is disposable. `before` is called each time, and is not captured.
    """

    def __init__(
        self,
        function: Callable[[], object],
        captures: Captures | None = None,
        undo: Callable[[], None] | None = None,
        before: Callable[[], None] | None = None,
    ):
        self._call = captures.capture(function, undo) if captures else function
        self._before = before

    def __call__(self) -> None:
        """Run the step once."""
        if self._before is not None:
            self._before()
        self._call()


def phase_at(number: int, phases: Sequence[int]) -> int:
    """Return the kind of a round, by its number from 0 on, where `phases` rounds of each kind
    follow each other, over and over.
    """
    return bisect_right(list(accumulate(phases)), number % sum(phases))


class Cycle:
    """Steps that take turns: rounds of each kind that propose `gamma` tokens, over and over.

    `phases` says how many of each kind follow each other.
    """

    timing_seconds: float = 0.0  # to choose among gammas, before the first round

    def __init__(self, steps: list[Step], gamma: int, phases: tuple[int, ...] = (1,)):
        self._steps, self._gamma, self.phases = steps, gamma, phases
        self.restart()

    def restart(self) -> None:
        """Begin with the first kind again; `gammas` are those of the rounds since."""
        self.gammas: list[int] = []

    def __call__(self) -> None:
        """Run the next round."""
        self._steps[phase_at(len(self.gammas), self.phases)]()
        self.gammas.append(self._gamma)

    def timed(self, state: State) -> list[float]:
        """Run a round of each kind over all rows and return the seconds of each, in the same order
        every time.
        """
        return [seconds_of_all_rows(step, state) for step in self._steps]

    def mean(self, values: Iterable[float]) -> float:
        """Return the mean over the rounds of a cycle of a value for each kind."""
        return fmean(values, self.phases)
