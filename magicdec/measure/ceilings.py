"""Measure what a device can do at most, for devices without a datasheet."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from magicdec.decoding.timers import Stopwatch
from magicdec.engine.graphs import Captures, Step
from magicdec.measure.memory_use import available_bytes
from magicdec.models.operators import matmul_of_many, multiplies_bfloat16
from magicdec.models.parallel import share

REPEATS = 5  # the fastest counts: a disturbance only makes one slower
# Large enough that launching does not count, where there is room: the side of a matrix, bytes read.
MATMUL_ON = {"cpu": 1024, "cuda": 8192}
READ_ON = {"cpu": 1 << 28, "cuda": 1 << 31}
SMALL_MATMUL = 1024


def matmul_rate(
    device: torch.device, dtype: torch.dtype, size: int | None = None, repeats: int = REPEATS
) -> float:
    """Return the FLOPs per second of a square matmul of random numbers: equal ones would save a GPU
    power. A CPU without bfloat16 multiplies in float32.
    """
    is_emulated = device.type == "cpu" and dtype == torch.bfloat16 and not multiplies_bfloat16()
    dtype = torch.float32 if is_emulated else dtype
    if size is None:
        size = MATMUL_ON[device.type]
        size = size if 3 * size**2 * dtype.itemsize <= _room(device) else SMALL_MATMUL
    a = torch.randn(size, size, dtype=dtype, device=device)
    b = torch.randn(size, size, dtype=dtype, device=device)
    multiply = matmul_of_many if device.type == "cpu" else torch.matmul
    return 2 * size**3 / fastest_s(lambda: multiply(a, b), device, repeats)


def read_bandwidth(device: torch.device) -> float:
    """Return the bytes per second at which the device reads memory, as a sum over a large tensor
    does.
    """
    data = torch.ones(min(READ_ON[device.type], _room(device)) // 4, device=device)
    return data.nbytes / fastest_s(data.sum, device)


def all_reduce_rate(rank: int, num_bytes: int) -> float:
    """Return the bytes per second that an all-reduce sends from each rank. Raise RuntimeError if
    the sum is wrong.
    """
    ranks, device = dist.get_world_size(), _device(rank)
    best = float("inf")
    for _ in range(REPEATS):
        x = torch.full((num_bytes // 4,), float(rank + 1), device=device)
        dist.barrier()
        with Stopwatch(device) as watch:
            dist.all_reduce(x)
        best = min(best, watch.seconds)
        _check_sum(x, 1.0)
    return 2 * (ranks - 1) / ranks * num_bytes / best


def captured_sum_s(rank: int, all_reduce: str, num_values: int) -> float:
    """Return the seconds of a sum over the ranks as a decode step makes it, replayed as a CUDA
    graph on GPUs.

    `all_reduce` is hardware.all_reduce. Raise RuntimeError if a sum is wrong, UserError if there is
    none of this kind.
    """
    device = _device(rank)
    part = share(dist.get_world_size(), all_reduce, device)
    x = torch.zeros(num_values, dtype=torch.bfloat16, device=device)
    out = torch.zeros_like(x)

    def work() -> None:
        out.copy_(part.sum(x.clone()))

    step = Step(work, Captures(device) if device.type == "cuda" else None)
    for factor in (1.0, 2.0):
        x.fill_(factor * (rank + 1))
        step()
        _check_sum(out, factor)
    return fastest_s(step, device)


def _device(rank: int) -> torch.device:
    return torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")


def _check_sum(x: torch.Tensor, factor: float) -> None:
    """Raise RuntimeError unless `x` is the sum of factor x (rank + 1)."""
    ranks = dist.get_world_size()
    if not bool((x == factor * ranks * (ranks + 1) / 2).all()):
        raise RuntimeError(f"the sum over {ranks} ranks is wrong")


def _room(device: torch.device) -> int:
    """Return the bytes that a measurement may take for a moment, while a run holds memory."""
    return available_bytes(device) // 4


def fastest_s(work: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Return the seconds of the fastest of several repeats."""
    return min(seconds_of(work, device, repeats))


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Return the seconds of each of several repeats."""
    samples = []
    for _ in range(repeats):
        with Stopwatch(device) as watch:
            work()
        samples.append(watch.seconds)
    return samples
