"""A step that is run many times over static buffers: replayed as one CUDA graph, or called as it is."""

from collections.abc import Callable

import torch

WARMUP_CALLS = 3  # before a capture, so that libraries allocate their workspaces outside of it


def rehearse(function: Callable[[], None], undo: Callable[[], None]) -> None:
    """The calls before a capture: whatever they append or count is undone, or it would run out of the buffers."""
    for _ in range(WARMUP_CALLS):
        function()
        undo()


class Step:
    """Calls `function` (no arguments, no result, everything in place); on a GPU with `graphs` replays its capture.

    The function must tolerate a few extra calls before the first real one, each followed by `undo`: capture it while
    the state is disposable.
    """

    def __init__(
        self,
        function: Callable[[], None],
        device: torch.device,
        graphs: bool,
        undo: Callable[[], None] = lambda: None,
    ):
        self._call = function
        if graphs and device.type == "cuda":
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                rehearse(function, undo)
            torch.cuda.current_stream(device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                function()
            self._call = graph.replay

    def __call__(self) -> None:
        """Run the step once."""
        self._call()


class Cycle:
    """Steps that take turns: a round of each kind, over and over."""

    def __init__(self, steps: list[Step]):
        self._steps, self._next = steps, 0

    def restart(self) -> None:
        """Begin with the first kind again."""
        self._next = 0

    def __call__(self) -> None:
        """Run the next step."""
        self._steps[self._next]()
        self._next = (self._next + 1) % len(self._steps)
