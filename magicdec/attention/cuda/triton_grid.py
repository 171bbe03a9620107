"""Divide the Triton kernels' work among the programs of a GPU, and merge the parts of a pass."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634
MIN_SPLIT = 128  # slots
MAX_SPLITS = 64
MAX_WAVES = 5  # of programs that are made by splitting: partial results take memory
# Slots that a program reads in the time that merging splits takes, another launch included.
MERGE = 512
START = 128  # slots' worth of time that a program takes to fill its pipeline and to write its part
MERGED_NUMBERS = 8192  # in the registers of a merging program
REGISTERS = 1 << 16  # of a multiprocessor
USUAL_PROGRAMS = 2  # at once on a multiprocessor, where Triton does not report it
SYSTEM_SHARED = 1024  # bytes of shared memory that a program takes beyond its own


def kernels() -> Any:
    """Return the module of the kernels. Importing Triton takes long, and it may not be
    installed.
    """
    from magicdec.kernels import split_kv

    return split_kv


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n."""
    return 1 << (n - 1).bit_length()


def strides(name: str, x: Tensor) -> dict[str, int]:
    """Return the strides that a kernel is given of queries (B, T, H, D), named q, or of entries
    (B, K, S, D).
    """
    second, third = ("token", "head") if name == "q" else ("head", "slot")
    names = (f"{name}_row", f"{name}_{second}", f"{name}_{third}")
    return dict(zip(names, x.stride(), strict=False))


@dataclass(frozen=True)
class Gpu:
    """The facts of a GPU that decide how many programs run at once."""

    capability: int
    sms: int
    shared: int  # bytes of a multiprocessor
    warps: int  # of a multiprocessor

    def programs(self, registers: int, shared: int, warps: int) -> int:
        """Return the programs at once, from the registers of a thread, the bytes and the warps of a
        program.
        """
        of_warp = -(-registers * 32 // 256) * 256
        by_shared = self.shared // (shared + SYSTEM_SHARED)
        return self.sms * max(1, min(REGISTERS // of_warp // warps, by_shared, self.warps // warps))


NO_GPU = Gpu(80, 2, 164 << 10, 64)


@cache
def gpu() -> Gpu:
    """Return the current GPU; without one, for kernels that are interpreted, a small one that
    compiles nothing.
    """
    if not torch.cuda.is_available():
        return NO_GPU
    properties = torch.cuda.get_device_properties(None)
    return Gpu(
        10 * properties.major + properties.minor,
        properties.multi_processor_count,
        properties.shared_memory_per_multiprocessor,
        properties.max_threads_per_multi_processor // 32,
    )


def reads_shared() -> bool:
    """Return whether matmuls read shared memory, so that operands take no registers: on Hopper and
    B200.
    """
    return gpu().capability in (90, 100)


_programs: dict[Hashable, int] = {}


def programs_at_once(
    variant: Hashable,
    kernel: Any,
    values: dict[str, Any],
    options: dict[str, Any],
    dtype: torch.dtype,
) -> int:
    """Return how many programs of a variant of a kernel the current GPU runs at once, as it
    compiles them for these arguments and constants.
    """
    if variant not in _programs:
        _programs[variant] = (
            4 * NO_GPU.sms
            if gpu() is NO_GPU
            else _compiled_programs(kernel, values, options, dtype)
        )
    return _programs[variant]


def _compiled_programs(
    kernel: Any, values: dict[str, Any], options: dict[str, Any], dtype: torch.dtype
) -> int:
    values = (
        values | dict.fromkeys(("partial", "lse"), torch.float32) | {"out": dtype, "num_splits": 2}
    )
    made = kernel.warmup(*(values[name] for name in kernel.arg_names), **options, grid=(1, 1, 1))
    try:
        made._init_handles()  # private: loads it, which says how many registers it takes
        return gpu().programs(made.n_regs, made.metadata.shared, made.metadata.num_warps)
    except AttributeError:  # another version of Triton
        return USUAL_PROGRAMS * gpu().sms


def merge_rows(query_rows: int, numbers_per_row: int) -> int:
    """Return the query rows that a merging program takes: as many as its registers hold."""
    return min(power_of_2(query_rows), max(1, MERGED_NUMBERS // numbers_per_row))


def split_count(programs: int, num_slots: int, block: int, at_once: int) -> int:
    """Return into how many splits each of `programs` is divided so that the GPU ends first: few
    waves of `at_once` programs, the last one full. All take the same time, as many blocks.
    """

    def time(splits: int) -> int:
        waves, blocks = -(-programs * splits // at_once), -(-num_slots // (block * splits))
        return waves * (blocks * block + START) + (MERGE if splits > 1 else 0)

    most = min(num_slots // MIN_SPLIT, MAX_SPLITS, MAX_WAVES * at_once // programs)
    return min(range(1, max(1, most) + 1), key=time)


class Parts(NamedTuple):
    """The output of a pass, and what its splits write: `partial` (B x K, splits, R, D) only if
    there are several, and the log-sum-exp (B x K, splits, R), both in fp32, for R query rows of a
    KV head.
    """

    out_BTHD: Tensor
    partial: Tensor | None
    lse: Tensor

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the kernels' arguments."""
        return {
            "out": self.out_BTHD,
            "partial": self.partial,
            "lse": self.lse,
            "num_splits": self.lse.shape[1],
        }


def allocate(q_BTHD: Tensor, num_kv_heads: int, splits: int) -> Parts:
    """Allocate the output of a pass and its parts."""
    B, T, H, D = q_BTHD.shape
    shape = (B * num_kv_heads, splits, H // num_kv_heads * T)
    out_BTHD = torch.empty((B, T, H, D), dtype=q_BTHD.dtype, device=q_BTHD.device)
    partial = (
        torch.empty((*shape, D), dtype=torch.float32, device=q_BTHD.device) if splits > 1 else None
    )
    return Parts(out_BTHD, partial, torch.empty(shape, dtype=torch.float32, device=q_BTHD.device))


def merge(parts: Parts, num_kv_heads: int) -> None:
    """Merge the splits, if there are several."""
    if parts.partial is None:
        return
    heads, splits, query_rows, D = parts.partial.shape
    T = parts.out_BTHD.shape[1]
    padded, padded_dim = power_of_2(splits), power_of_2(D)
    rows = merge_rows(query_rows, padded * padded_dim)
    kernels().merge_splits[(heads, ceil_div(query_rows, rows))](
        parts.partial, parts.lse, parts.out_BTHD, T, splits, K=num_kv_heads, J=query_rows // T, D=D,
        PADDED_D=padded_dim, PADDED_SPLITS=padded, ROWS=rows, enable_fp_fusion=True,
    )  # fmt: skip
