"""Attention in Triton, for NVIDIA GPUs: how the kernels of kernels/split_kv.py are launched.

Shapes as there.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from magicdec.attention.sdpa_fallback import KernelAttention, KernelPlan, dtype_obstacle
from magicdec.config.choices import Backend
from magicdec.config.registry import BACKENDS
from magicdec.kernels.toolchain import triton_obstacle

HEAD_DIMS = (64, 80, 96, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIN_TILE, MAX_TILE = 16, 128  # query rows of a program: what tensor cores take, what registers hold
MIN_SPLIT = 128  # slots
MAX_SPLITS = 64
MAX_WAVES = 4  # of programs that are made by splitting: partial results take memory
MERGE = 512  # slots that a program reads in the time that merging splits takes, another launch included
START = 128  # slots' worth of time that a program takes to fill its pipeline and to write its part
SUMMED = 512  # slots of a program that sums scores
MERGED_NUMBERS = 8192  # in the registers of a merging program
REGISTERS = 1 << 16  # of a multiprocessor
USUAL_PROGRAMS = 2  # at once on a multiprocessor, where Triton does not report it
SYSTEM_SHARED = 1024  # bytes of shared memory that a program takes beyond its own


def kernels() -> Any:
    """Return the module of the kernels. Importing Triton takes long, and it may not be installed."""
    from magicdec.kernels import split_kv

    return split_kv


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n."""
    return 1 << (n - 1).bit_length()


@BACKENDS.register(Backend("triton", "cuda", priority=1))
class TritonAttention(KernelAttention):
    """The kernels of kernels/split_kv.py."""

    @classmethod
    @override
    def obstacle(cls, dtype: torch.dtype, head_dim: int) -> str | None:
        if obstacle := dtype_obstacle(dtype, DTYPES):
            return obstacle
        if head_dim not in HEAD_DIMS:
            return f"supports the head dims {', '.join(map(str, HEAD_DIMS))}, not {head_dim}"
        if obstacle := triton_obstacle():
            return obstacle
        try:
            kernels()
        except ImportError as error:
            return f"cannot be imported ({error})"
        return None

    @override
    def scores_at_once(self, dtype: torch.dtype, head_dim: int) -> int:
        """Allow 2 GiB: with long contexts each pass reads a cache of many times that."""
        return 1 << 29

    @override
    def decode(
        self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: KernelPlan, indices_BKN: Tensor | None
    ) -> Tensor:
        return self._attend(q_BTHD, k_BKSD, v_BKSD, plan, indices_BKN, None)[0]

    @override
    def decode_scored(
        self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: KernelPlan, counted_BT: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        (B, T, H, _), (K, S) = q_BTHD.shape, k_BKSD.shape[1:3]
        raw = torch.empty((B * K, H // K * T, S), dtype=torch.float32, device=q_BTHD.device)
        scores_BKS = torch.empty((B, K, S), dtype=torch.float32, device=q_BTHD.device)
        out_BTHD, lse = self._attend(q_BTHD, k_BKSD, v_BKSD, plan, None, raw)
        if not q_BTHD.is_meta:
            splits = lse.shape[1]
            kernels().sum_scores[(B * K, ceil_div(S, SUMMED))](
                raw,
                lse,
                plan.seqlens_B,
                plan.positions_BKS,
                None if counted_BT is None else counted_BT.view(torch.uint8),
                scores_BKS,
                T,
                S,
                splits,
                plan.window,
                K=K,
                J=H // K,
                PADDED_SPLITS=power_of_2(splits),
                BLOCK=SUMMED,
                enable_fp_fusion=True,
            )
        return out_BTHD, scores_BKS

    def _attend(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: KernelPlan,
        indices_BKN: Tensor | None,
        raw: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the output, and the log-sum-exp of each split; write scores to `raw` where it is given."""
        (B, T, H, D), (K, S) = q_BTHD.shape, k_BKSD.shape[1:3]
        J, positions = H // K, plan.positions_BKS
        variant = Variant(
            q_BTHD.dtype, K, J, D, J * T, T == 1, indices_BKN is not None, raw is not None, positions is not None
        )
        arguments: dict[str, Any] = {
            "q": q_BTHD, "k": k_BKSD, "v": v_BKSD, "seqlens": plan.seqlens_B, "indices": indices_BKN,
            "positions": positions, "raw": raw, "T": T, "S": S, "reach": plan.window,
            "num_indices": 0 if indices_BKN is None else indices_BKN.shape[-1], "scale": D**-0.5 * 1.4426950408889634,
        }  # fmt: skip
        for name, x in (("q", q_BTHD), ("k", k_BKSD), ("v", v_BKSD)):
            second, third = ("token", "head") if name == "q" else ("head", "slot")
            arguments |= zip((f"{name}_row", f"{name}_{second}", f"{name}_{third}"), x.stride(), strict=False)
        reads = S if positions is not None else min(S, plan.reach + T)
        if variant.selected:
            reads = arguments["num_indices"]
        tiles = ceil_div(J * T, variant.tile)
        splits = split_count(B * K * tiles, reads, variant.block, programs_at_once(variant, arguments))
        out_BTHD = torch.empty((B, T, H, D), dtype=q_BTHD.dtype, device=q_BTHD.device)
        partial = None
        if splits > 1:
            partial = torch.empty((B * K, splits, J * T, D), dtype=torch.float32, device=q_BTHD.device)
        lse = torch.empty((B * K, splits, J * T), dtype=torch.float32, device=q_BTHD.device)
        if q_BTHD.is_meta:  # a memory estimate counts these allocations alone
            return out_BTHD, lse
        arguments |= {"out": out_BTHD, "partial": partial, "lse": lse, "num_splits": splits}
        kernels().attend_split[tiles, splits, B * K](**arguments, **variant.constants(splits > 1), **variant.options)
        if splits > 1:
            padded, padded_dim = power_of_2(splits), power_of_2(D)
            rows = merge_rows(J * T, padded * padded_dim)
            kernels().merge_splits[(B * K, ceil_div(J * T, rows))](
                partial, lse, out_BTHD, T, splits, K=K, J=J, D=D, PADDED_D=padded_dim, PADDED_SPLITS=padded, ROWS=rows,
                enable_fp_fusion=True,
            )  # fmt: skip
        return out_BTHD, lse


@dataclass(frozen=True)
class Variant:
    """The facts that attend_split is compiled for, and how its programs divide the work."""

    dtype: torch.dtype
    num_kv_heads: int
    group_size: int
    head_dim: int
    query_rows: int
    is_single: bool  # new token
    selected: bool
    scored: bool
    positioned: bool

    @property
    def tile(self) -> int:
        """The query rows of a program: all of them if registers suffice, so that K and V are read once."""
        # The registers of other GPUs hold 128 rows while they are split, but not while a prefill writes its output.
        most = MAX_TILE if reads_shared() or self.query_rows <= MAX_TILE else MAX_TILE // 2
        if self.selected or self.scored:
            most = 64
        if self.dtype == torch.float32:
            most = 32  # 64 rows spill, and take more shared memory than an L40 has
        return min(most, max(MIN_TILE, power_of_2(self.query_rows)))

    @property
    def block(self) -> int:
        """The slots that are read at a time. Scores that are written out take registers; an A100 has few for fp32."""
        few_registers = self.scored or (self.dtype == torch.float32 and gpu().capability < 90)
        return 32 if few_registers or self.shallow else 64

    @property
    def shallow(self) -> bool:
        """Return whether blocks are short, so that three programs fit into the shared memory of an H100."""
        return self.tile == 32 and self.dtype != torch.float32 and not self.scored

    @property
    def options(self) -> dict[str, int | bool]:
        """The compiler's options. As many blocks are in flight as the smallest shared memory holds, that of an L40."""
        numbers = self.tile * power_of_2(self.head_dim)
        few = numbers <= (8192 if reads_shared() else 4096)
        if self.dtype == torch.float32:
            few = self.tile == MIN_TILE
        return {
            "num_warps": 4 if few else 8,
            "num_stages": 2 if self.dtype == torch.float32 else 5 if self.shallow else 3,
            "enable_fp_fusion": True,
        }

    def constants(self, split: bool) -> dict[str, int | bool]:
        """The kernel's constants."""
        return {
            "K": self.num_kv_heads,
            "J": self.group_size,
            "D": self.head_dim,
            "PADDED_D": power_of_2(self.head_dim),
            "TILE": self.tile,
            "BLOCK": self.block,
            "SELECTED": self.selected,
            "SPLIT": split,
            "SCORED": self.scored,
            "UNMASKED": self.query_rows > MAX_TILE and not (self.selected or self.scored or self.positioned),
            "UPCAST": kernels().INTERPRETED,  # whose bf16 matmuls are wrong
        }


@dataclass(frozen=True)
class Gpu:
    """The facts of a GPU that decide how many programs run at once."""

    capability: int
    sms: int
    shared: int  # bytes of a multiprocessor
    warps: int  # of a multiprocessor

    def programs(self, registers: int, shared: int, warps: int) -> int:
        """Return the programs at once, from the registers of a thread, the bytes and the warps of a program."""
        of_warp = -(-registers * 32 // 256) * 256
        by_shared = self.shared // (shared + SYSTEM_SHARED)
        return self.sms * max(1, min(REGISTERS // of_warp // warps, by_shared, self.warps // warps))


NO_GPU = Gpu(80, 2, 164 << 10, 64)


@cache
def gpu() -> Gpu:
    """Return the current GPU; without one, for kernels that are interpreted, a small one that compiles nothing."""
    if not torch.cuda.is_available():
        return NO_GPU
    found = torch.cuda.get_device_properties(None)
    return Gpu(
        10 * found.major + found.minor,
        found.multi_processor_count,
        found.shared_memory_per_multiprocessor,
        found.max_threads_per_multi_processor // 32,
    )


def reads_shared() -> bool:
    """Return whether matmuls read shared memory, so that operands take no registers: on Hopper and B200."""
    return gpu().capability in (90, 100)


_programs: dict[Variant, int] = {}


def programs_at_once(variant: Variant, arguments: dict[str, Any]) -> int:
    """Return how many programs of a variant the current GPU runs at once, as it compiles them for these arguments."""
    variant = replace(variant, query_rows=min(2 * MAX_TILE, power_of_2(variant.query_rows)))  # as compiled
    if variant not in _programs:
        _programs[variant] = 4 * NO_GPU.sms if gpu() is NO_GPU else _compiled_programs(variant, arguments)
    return _programs[variant]


def _compiled_programs(variant: Variant, arguments: dict[str, Any]) -> int:
    parts = dict.fromkeys(("partial", "lse"), torch.float32) | {"out": variant.dtype, "num_splits": 2}
    values = arguments | parts | variant.constants(split=True)
    kernel = kernels().attend_split
    made = kernel.warmup(*(values[name] for name in kernel.arg_names), **variant.options, grid=(1, 1, 1))
    try:
        made._init_handles()  # private: loads it, which says how many registers it takes
        return gpu().programs(made.n_regs, made.metadata.shared, made.metadata.num_warps)
    except AttributeError:  # another version of Triton
        return USUAL_PROGRAMS * gpu().sms


def merge_rows(query_rows: int, numbers_per_row: int) -> int:
    """Return the query rows that a merging program takes: as many as its registers hold."""
    return min(power_of_2(query_rows), max(1, MERGED_NUMBERS // numbers_per_row))


def split_count(programs: int, num_slots: int, block: int, at_once: int) -> int:
    """Return into how many splits each of `programs` is divided so that the GPU ends first: few waves of `at_once`
    programs, the last one full. All take the same time, as many blocks.
    """

    def time(splits: int) -> int:
        waves, blocks = -(-programs * splits // at_once), -(-num_slots // (block * splits))
        return waves * (blocks * block + START) + (MERGE if splits > 1 else 0)

    most = min(num_slots // MIN_SPLIT, MAX_SPLITS, MAX_WAVES * at_once // programs)
    return min(range(1, max(1, most) + 1), key=time)
