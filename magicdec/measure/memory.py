"""How much memory a run needs before it allocates, and how much it took."""

import os
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from magicdec.errors import UserError
from magicdec.models.config import ModelConfig

GIB = 1 << 30


@dataclass(frozen=True)
class Estimate:
    """Bytes by their use; what grows with the batch is per row."""

    weights: int
    kv_per_row: int
    activations: int

    def total(self, num_rows: int) -> int:
        """Bytes for a batch of `num_rows`."""
        return self.weights + self.activations + num_rows * self.kv_per_row

    def largest_batch(self, available: int) -> int:
        """Rows that fit into `available` bytes; 0 where the weights alone do not."""
        return max(0, available - self.weights - self.activations) // self.kv_per_row


def kv_bytes(config: ModelConfig, num_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values of `num_tokens` tokens of one sequence."""
    return config.kv_elements_per_token * num_tokens * dtype.itemsize


def activation_bytes(config: ModelConfig, num_rows: int, num_tokens: int, dtype: torch.dtype) -> int:
    """Peak of one forward pass over (num_rows, num_tokens): the residual stream twice and a layer's widest tensors."""
    width = 3 * config.hidden_size + max(3 * config.intermediate_size, 3 * config.num_heads * config.head_dim)
    return num_rows * num_tokens * width * dtype.itemsize


def available_bytes(device: torch.device) -> int:
    """Free memory of the device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # no Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_fits(estimate: Estimate, num_rows: int, context_len: int, available: int) -> None:
    """Raise UserError, naming the largest batch that fits, where `num_rows` do not."""
    needed = estimate.total(num_rows)
    if needed <= available:
        return
    fits = estimate.largest_batch(available)
    advice = (
        f"batch.size={fits} would fit" if fits else "the weights alone do not fit: choose a smaller target or dtype"
    )
    raise UserError(
        f"batch.size={num_rows} at batch.context_len={context_len} needs about {needed / GIB:.2f} GiB (weights "
        f"{estimate.weights / GIB:.2f}, KV cache {num_rows * estimate.kv_per_row / GIB:.2f}), but "
        f"{available / GIB:.2f} GiB are available; {advice}"
    )


class Peak:
    """The most memory taken since this object was made: on a GPU by tensors, on a CPU by the whole process."""

    def __init__(self, device: torch.device):
        self._device = device
        self._before = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            _forget_peak()
            self._before = _status_bytes("VmRSS")

    @property
    def num_bytes(self) -> int:
        """Bytes so far."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(0, _peak_resident_bytes() - self._before)


def _forget_peak() -> None:
    """Start the account of the peak anew: in a multirun, a larger run may have gone before in this process."""
    with suppress(OSError):  # no Linux, or a container that forbids it
        Path("/proc/self/clear_refs").write_text("5")


def _peak_resident_bytes() -> int:
    """Of this process since it started, or since the peak was last forgotten."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _status_bytes(field: str) -> int:
    """A field of Linux's account of this process; elsewhere the peak so far stands for what is resident now."""
    try:
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
    except (OSError, StopIteration):
        return _peak_resident_bytes()


def read_bandwidth(device: torch.device, num_bytes: int = 1 << 28, repeats: int = 5) -> float:
    """Bytes per second at which the device reads memory, measured: the fastest of a few sums over a large tensor."""
    from magicdec.measure.timers import Stopwatch

    data = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(repeats):
        with Stopwatch(device) as watch:
            data.sum()
        best = min(best, watch.seconds)
    return num_bytes / best
