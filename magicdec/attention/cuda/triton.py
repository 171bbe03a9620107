"""Attention in Triton, for NVIDIA GPUs: how the kernels of kernels/split_kv.py are launched.

Shapes as there.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from magicdec.attention.base import PageBounds
from magicdec.attention.codes import Coded
from magicdec.attention.cuda import triton_codes as codes
from magicdec.attention.cuda import triton_grid as grid
from magicdec.attention.cuda import triton_scores as scores
from magicdec.attention.cuda import triton_selection as selection
from magicdec.attention.cuda.triton_grid import LOG2_E, ceil_div, kernels, power_of_2
from magicdec.attention.sdpa_fallback import (
    KernelAttention,
    KernelPlan,
    dtype_obstacle,
    with_dense_entries,
)
from magicdec.config.choices import Backend
from magicdec.config.registry import BACKENDS
from magicdec.kernels.toolchain import triton_obstacle

HEAD_DIMS = (64, 80, 96, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_SCORED = 256  # tokens of each row
THREE_PROGRAMS = 168  # registers of a thread with which three programs of 4 warps fit
MIN_TILE, MAX_TILE = 16, 128  # query rows of a program: what tensor cores take, what registers hold


@BACKENDS.register(Backend("triton", "cuda", priority=2))
class TritonAttention(KernelAttention):
    """The kernels of kernels/split_kv.py."""

    takes_weighting = True
    most_heads = 65_535  # programs along the second and the third dimension of CUDA's grids

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
    def scored_tokens(self, scores_per_token: int, dtype: torch.dtype, head_dim: int) -> int:
        """Allow many: beyond some, no scores are written (triton_scores.py)."""
        return MAX_SCORED

    @override
    def decode(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: KernelPlan,
        indices_BKN: Tensor | None,
    ) -> Tensor:
        return self._attend(q_BTHD, k_BKSD, v_BKSD, plan, indices_BKN, None)[0]

    @override
    def decode_scored(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: KernelPlan,
        counted_BT: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        scores_BKS = scores.empty(k_BKSD)
        given = self._observation(q_BTHD, k_BKSD, plan, counted_BT)
        return self._observe(given, v_BKSD, scores_BKS), scores_BKS

    @override
    def attend_observed(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: KernelPlan,
        scores_BKS: Tensor,
    ) -> Tensor:
        q, k, v = map(with_dense_entries, (q_BTHD, k_BKSD, v_BKSD))
        given = self._observation(q, k, plan, None)._replace(ends_alone=q.shape[1] > 1)
        return self._observe(given, v, scores_BKS)

    @override
    def score_keys(
        self, q_BTHD: Tensor, k_BKSD: Tensor, plan: KernelPlan, counted_BT: Tensor | None = None
    ) -> Tensor:
        q, k = map(with_dense_entries, (q_BTHD, k_BKSD))
        counted_BT = counted_BT if counted_BT is None else counted_BT.contiguous()
        return scores.from_keys(self._observation(q, k, plan, counted_BT))

    def _observation(
        self, q_BTHD: Tensor, k_BKSD: Tensor, plan: KernelPlan, counted_BT: Tensor | None
    ) -> scores.Observation:
        return scores.Observation(q_BTHD, k_BKSD, plan, counted_BT, self.weighting)

    def _observe(self, given: scores.Observation, v_BKSD: Tensor, scores_BKS: Tensor) -> Tensor:
        """Attend, and write what each slot received."""
        raw = scores.allocate(given)
        out_BTHD, lse = self._attend(
            given.q_BTHD, given.k_BKSD, v_BKSD, given.plan, None, raw, True, given.ends_alone
        )
        scores.receive(given, raw, lse, scores_BKS)
        return out_BTHD

    @override
    def attend_coded(
        self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: KernelPlan, coded: Coded
    ) -> Tensor:
        if not (self.weighting.is_plain and codes.reads(coded, plan, q_BTHD)):
            return super().attend_coded(q_BTHD, k_BKSD, v_BKSD, plan, coded)
        q, k, v = map(with_dense_entries, (q_BTHD, k_BKSD, v_BKSD))
        return codes.attend(q, k, v, plan.seqlens_B, coded)

    @override
    def select_largest(self, scores: Tensor, first: Tensor, last: Tensor, count: int) -> Tensor:
        return selection.largest(scores, first, last, count)

    @override
    def select_slots(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: KernelPlan,
        length_B: Tensor,
        count: int,
    ) -> Tensor:
        if not (self.weighting.is_plain and selection.fits(q_BTHD, k_BKSD.shape[1])):
            return super().select_slots(q_BTHD, k_BKSD, v_BKSD, plan, length_B, count)
        q, k = map(with_dense_entries, (q_BTHD, k_BKSD))
        return selection.slots(q, k, plan, length_B, count)

    @override
    def select_pages(
        self, q_BTHD: Tensor, bounds: PageBounds, first_B: Tensor, length_B: Tensor, count: int
    ) -> Tensor:
        heads = bounds.least_BKPD.shape[1]
        if not (self.weighting.is_plain and selection.fits(q_BTHD, heads)):
            return super().select_pages(q_BTHD, bounds, first_B, length_B, count)
        return selection.pages(with_dense_entries(q_BTHD), bounds, first_B, length_B, count)

    def _attend(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: KernelPlan,
        indices_BKN: Tensor | None,
        raw: Tensor | None,
        summed: bool = False,
        ends_alone: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the output, and the log-sum-exp of each split if there are several or they are to
        be `summed`; write scores to `raw` where it is given, all or those of the first and the last
        token.
        """
        (B, T, H, D), (K, S) = q_BTHD.shape, k_BKSD.shape[1:3]
        J, positions = H // K, plan.positions_BKS
        variant = Variant(
            q_BTHD.dtype,
            K,
            J,
            D,
            J * T,
            T == 1,
            indices_BKN is not None,
            raw is not None,
            positions is not None,
            ends_alone,
        )
        arguments: dict[str, Any] = {
            "q": q_BTHD, "k": k_BKSD, "v": v_BKSD, "seqlens": plan.seqlens_B, "indices": indices_BKN,  # noqa: E501
            "positions": positions, "raw": raw, "T": T, "S": S, "reach": plan.window,
            "num_indices": 0 if indices_BKN is None else indices_BKN.shape[-1], "scale": D**-0.5 * LOG2_E,  # noqa: E501
        }  # fmt: skip
        sinks_H, softcap = self.weighting
        arguments["sinks"] = None if sinks_H is None else sinks_H.float() * LOG2_E
        arguments["softcap"] = None if softcap is None else softcap * LOG2_E
        for name, x in (("q", q_BTHD), ("k", k_BKSD), ("v", v_BKSD)):
            arguments |= grid.strides(name, x)
        reads = S if positions is not None else min(S, plan.reach + T)
        if variant.selected:
            reads = arguments["num_indices"]
        tiles = ceil_div(J * T, variant.tile)
        compiled = replace(variant, query_rows=min(2 * MAX_TILE, power_of_2(variant.query_rows)))
        constants, options = variant.constants(split=True), variant.options
        # Triton compiles the kernel again where one of these is missing.
        key = (compiled, plan.window is None, sinks_H is None, softcap is None)
        at_once = grid.programs_at_once(
            key, kernels().attend_split, arguments | constants, options, q_BTHD.dtype
        )
        splits = grid.split_count(B * K * tiles, reads, variant.block, at_once)
        parts = grid.allocate(q_BTHD, K, splits)
        if not q_BTHD.is_meta:  # a memory estimate counts these allocations alone
            arguments |= {**parts.arguments, **constants, "SPLIT": splits > 1}
            arguments["SUMMED"] = splits > 1 or summed
            kernels().attend_split[tiles, splits, B * K](**arguments, **options)
            grid.merge(parts, K)
        return parts.out_BTHD, parts.lse


@dataclass(frozen=True)
class Variant:
    """The facts that decide how programs divide the work of attend_split, and how they do."""

    dtype: torch.dtype
    num_kv_heads: int
    group_size: int
    head_dim: int
    query_rows: int
    is_single: bool  # a single new token, for which Triton compiles it separately
    selected: bool
    scored: bool
    positioned: bool
    ends_alone: bool = False  # scores are written of the first and the last new token alone

    @property
    def tile(self) -> int:
        """The query rows of a program: all of them if registers suffice, so that K and V are read
        once.
        """
        # The registers of other GPUs hold 128 rows while they are split, but not while a prefill
        # writes its output.
        most = MAX_TILE if grid.reads_shared() or self.query_rows <= MAX_TILE else MAX_TILE // 2
        if self.selected or self.scored:
            most = 64
        if self.dtype == torch.float32:
            most = 32  # 64 rows spill, and take more shared memory than an L40 has
        return min(most, max(MIN_TILE, power_of_2(self.query_rows)))

    @property
    def block(self) -> int:
        """The slots that are read at a time. Scores that are written out take registers; an A100
        has few for fp32.
        """
        few_registers = self.scored or (self.dtype == torch.float32 and grid.gpu().capability < 90)
        return 32 if few_registers else 64

    @property
    def shallow(self) -> bool:
        """Return whether few blocks are in flight, so that three programs fit into the registers of
        an H100 and the shared memory of others. Shorter blocks would have more barriers.
        """
        return self.tile == 32 and self.dtype != torch.float32 and not self.scored

    @property
    def options(self) -> dict[str, int | bool]:
        """The compiler's options. As many blocks are in flight as the smallest shared memory holds,
        that of an L40.
        """
        numbers = self.tile * power_of_2(self.head_dim)
        few = numbers <= (8192 if grid.reads_shared() else 4096)
        if self.dtype == torch.float32:
            few = self.tile == MIN_TILE
        return {
            "num_warps": 4 if few else 8,
            "num_stages": 2 if self.dtype == torch.float32 or self.shallow else 3,
            "enable_fp_fusion": True,
        } | ({"maxnreg": THREE_PROGRAMS} if self.shallow else {})

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
            "ENDS_ALONE": self.ends_alone,
            "SUMMED": split or self.scored,
            "UNMASKED": (
                self.query_rows > MAX_TILE and not (self.selected or self.scored or self.positioned)
            ),
            "UPCAST": kernels().INTERPRETED,  # whose bf16 matmuls are wrong
        }
