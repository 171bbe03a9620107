"""Measure how much memory is available, and how much a run has taken."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from magicdec import threads
from magicdec.architectures.model_config import ModelConfig

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


V1_MEMORY = ("memory.limit_in_bytes", "memory.usage_in_bytes")  # of cgroup v1


def kv_bytes(config: ModelConfig, num_tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes of keys and values of `num_tokens` tokens of one sequence."""
    return config.kv_elements_per_token * num_tokens * dtype.itemsize


def available_bytes(device: torch.device) -> int:
    """Return the free memory of the device, with what PyTorch holds but does not use."""
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + idle
    available = proc_bytes("meminfo", "MemAvailable") or total_bytes(device)
    return min([available, *(max(0, limit - used) for limit, used in _cgroup_memory())])


def total_bytes(device: torch.device) -> int:
    """Return the memory of the device, free or not."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if total := proc_bytes("meminfo", "MemTotal"):
        return min([total, *(limit for limit, _ in _cgroup_memory())])
    if not hasattr(os, "sysconf"):  # Windows: refuse no run
        return sys.maxsize
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_memory() -> Iterator[tuple[int, int]]:
    """Yield the limit of this process's cgroup, and of each around it, and what it has taken, in
    bytes. Pages of files that were not used lately do not count: the system takes them back.
    """
    for folder in threads.cgroups("memory"):
        for names in (("memory.max", "memory.current"), V1_MEMORY):
            with suppress(OSError, ValueError):  # another version; "max" is no limit
                limit, used = [int((folder / name).read_text()) for name in names]
                statistics = (folder / "memory.stat").read_text().split()
                of_name = dict(zip(statistics[::2], statistics[1::2], strict=False))
                idle = of_name.get("total_inactive_file") or of_name.get("inactive_file") or 0
                yield limit, used - int(idle)


def reserved_bytes(device: torch.device) -> int:
    """Return what to leave free on a GPU for memory that PyTorch does not count: kernels, graphs,
    NCCL's buffers.
    """
    if device.type != "cuda":
        return 0
    return (1 << 29) + torch.cuda.mem_get_info(device)[1] // 50


def workspace_bytes(device: torch.device) -> int:
    """Return what PyTorch allocates for cuBLAS: a workspace for the stream that runs and one for
    graph capture.
    """
    if device.type != "cuda":
        return 0
    return 2 * (32 << 20 if torch.cuda.get_device_capability(device)[0] == 9 else 8320 << 10)


class Peak:
    """The most memory taken since this object was created: on a GPU by tensors, on a CPU by the
    process.

    Pages of files do not count: they are the code of libraries, loaded at its first use.
    """

    def __init__(self, device: torch.device, held: int = 0):
        """Begin to measure. `held` bytes were allocated before, and count."""
        self._device = device
        self._before = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            # In a multirun, this process may have done a larger run before, whose memory glibc may
            # keep.
            with suppress(AttributeError, OSError, TypeError):  # another C library
                ctypes.CDLL(None).malloc_trim(0)
            with suppress(OSError):  # no Linux, or a container that forbids it
                Path("/proc/self/clear_refs").write_text("5")
            resident = proc_bytes("self/status", "VmRSS") or _peak_resident_bytes()
            self._before = resident - proc_bytes("self/status", "RssFile") - held

    @property
    def num_bytes(self) -> int:
        """Return the bytes so far."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(0, _peak_resident_bytes() - proc_bytes("self/status", "RssFile") - self._before)


def _peak_resident_bytes() -> int:
    """Return the peak of this process since it started, or since the last reset; 0 on Windows."""
    if resource is None:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def proc_bytes(file: str, field: str) -> int:
    """Return a field in bytes of a file in Linux's /proc; 0 on other systems."""
    try:
        with open(f"/proc/{file}") as lines:
            return next(
                int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")
            )
    except (OSError, StopIteration):
        return 0
