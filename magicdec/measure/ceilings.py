"""What a device can do at most, measured where no datasheet says."""

import torch

from magicdec.measure.timers import Stopwatch


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int = 1024, repeats: int = 5) -> float:
    """FLOPs per second of a square matmul: the fastest of a few."""
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(repeats):
        with Stopwatch(device) as watch:
            a @ b
        best = min(best, watch.seconds)
    return 2 * size**3 / best


def copy_bandwidth(device: torch.device, num_bytes: int, repeats: int = 5) -> float:
    """Bytes per second, read and written, of a copy within the device's memory: the fastest of a few."""
    source = torch.ones(num_bytes // 4, device=device)
    copy, best = torch.empty_like(source), float("inf")
    for _ in range(repeats):
        with Stopwatch(device) as watch:
            copy.copy_(source)
        best = min(best, watch.seconds)
    return 2 * source.nbytes / best
