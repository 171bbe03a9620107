"""A step that is run many times over static buffers: replayed as one CUDA graph, or called as it is."""

from collections.abc import Callable

import torch

WARMUP_CALLS = 3  # before a capture, so that libraries allocate their workspaces outside of it


class Step:
    """Calls `function` (no arguments, no result, everything in place); on a GPU with `graphs` replays its capture.

    The function must tolerate a few extra calls before the first real one: capture it while the state is disposable.
    """

    def __init__(self, function: Callable[[], None], device: torch.device, graphs: bool):
        self._call = function
        if graphs and device.type == "cuda":
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for _ in range(WARMUP_CALLS):
                    function()
            torch.cuda.current_stream(device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                function()
            self._call = graph.replay

    def __call__(self) -> None:
        """Run the step once."""
        self._call()
