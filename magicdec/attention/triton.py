"""Attention in Triton, for NVIDIA GPUs: how the kernels of split_kv.py are launched.

Shapes as there.
"""

from functools import cache

import torch
import triton
from torch import Tensor

from magicdec.attention.kernel import KernelAttention, KernelPlan, gpu_obstacle
from magicdec.attention.split_kv import attend_split, merge_splits, sum_scores

HEAD_DIMS = (64, 80, 96, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIN_TILE, MAX_TILE = 16, 64  # query rows of a program: tensor cores take 16, registers hold 64
BLOCK = 64  # slots at a time
MAX_SPLITS = 64
PROGRAMS_PER_SM = 4
SUMMED = 512  # slots of a program that sums scores
MERGED_NUMBERS = 8192  # in the registers of a merging program
INTERPRETED = triton.knobs.runtime.interpret


class TritonAttention(KernelAttention):
    """The default on GPUs where flash-attn is not installed."""

    name = "triton"

    @classmethod
    def obstacle(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """See Attention.obstacle."""
        if obstacle := gpu_obstacle(device, dtype, DTYPES):
            return obstacle
        if head_dim not in HEAD_DIMS:
            return f"knows the head dims {', '.join(map(str, HEAD_DIMS))}, not {head_dim}"
        return None

    def scores_at_once(self, dtype: torch.dtype, head_dim: int) -> int:
        """See Attention.scores_at_once. 2 GiB: with long contexts each pass reads a cache of many times that."""
        return 1 << 29

    def decode(
        self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: KernelPlan, indices_BKN: Tensor | None
    ) -> Tensor:
        """See KernelAttention.decode."""
        return self._attend(q_BTHD, k_BKSD, v_BKSD, plan, indices_BKN, None)[0]

    def decode_scored(
        self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: KernelPlan, counted_BT: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See KernelAttention.decode_scored."""
        (B, T, H, _), (K, S) = q_BTHD.shape, k_BKSD.shape[1:3]
        raw = torch.empty((B * K, H // K * T, S), dtype=torch.float32, device=q_BTHD.device)
        scores_BKS = torch.empty((B, K, S), dtype=torch.float32, device=q_BTHD.device)
        out_BTHD, lse = self._attend(q_BTHD, k_BKSD, v_BKSD, plan, None, raw)
        if not q_BTHD.is_meta:
            splits = lse.shape[1]
            sum_scores[(B * K, triton.cdiv(S, SUMMED))](
                raw,
                lse,
                plan.seqlens_B,
                plan.positions_BKS,
                None if counted_BT is None else counted_BT.view(torch.uint8),
                scores_BKS,
                T,
                S,
                splits,
                plan.reach,
                K=K,
                G=H // K,
                PADDED_SPLITS=triton.next_power_of_2(splits),
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
        """The output, and the log-sum-exp of each split; with `raw`, that is written, too."""
        (B, T, H, D), (K, S) = q_BTHD.shape, k_BKSD.shape[1:3]
        G, selected = H // K, indices_BKN is not None
        num_indices = indices_BKN.shape[-1] if indices_BKN is not None else 0
        tile = tile_size(G * T)
        tiles = triton.cdiv(G * T, tile)
        reads = num_indices if selected else min(S, plan.reach + T) if plan.positions_BKS is None else S
        splits = split_count(B * K * tiles, reads)
        out_BTHD = torch.empty((B, T, H, D), dtype=q_BTHD.dtype, device=q_BTHD.device)
        partial = None
        if splits > 1:
            partial = torch.empty((B * K, splits, G * T, D), dtype=torch.float32, device=q_BTHD.device)
        lse = torch.empty((B * K, splits, G * T), dtype=torch.float32, device=q_BTHD.device)
        if q_BTHD.is_meta:  # memory is estimated, and this is all that is allocated
            return out_BTHD, lse
        shape = {"K": K, "G": G, "D": D, "PADDED_D": triton.next_power_of_2(D)}
        attend_split[(B * K, splits, tiles)](
            q_BTHD,
            k_BKSD,
            v_BKSD,
            plan.seqlens_B,
            indices_BKN,
            plan.positions_BKS,
            out_BTHD,
            partial,
            lse,
            raw,
            T,
            S,
            splits,
            num_indices,
            plan.reach,
            D**-0.5 * 1.4426950408889634,
            *q_BTHD.stride()[:3],
            *k_BKSD.stride()[:3],
            *v_BKSD.stride()[:3],
            **shape,
            TILE=tile,
            BLOCK=BLOCK,
            SELECTED=selected,
            SPLIT=splits > 1,
            SCORED=raw is not None,
            UPCAST=INTERPRETED,  # whose bf16 matmuls are wrong
            **launch_options(q_BTHD.dtype, tile, D),
        )
        if splits > 1:
            padded = triton.next_power_of_2(splits)
            rows = merge_rows(G * T, padded * shape["PADDED_D"])
            merge_splits[(B * K, triton.cdiv(G * T, rows))](
                partial, lse, out_BTHD, T, splits, **shape, PADDED_SPLITS=padded, ROWS=rows, enable_fp_fusion=True
            )
        return out_BTHD, lse


def tile_size(query_rows: int) -> int:
    """Query rows of a program."""
    return min(MAX_TILE, max(MIN_TILE, triton.next_power_of_2(query_rows)))


def merge_rows(query_rows: int, numbers_per_row: int) -> int:
    """Query rows that a merging program takes: as many as its registers hold."""
    return min(triton.next_power_of_2(query_rows), max(1, MERGED_NUMBERS // numbers_per_row))


def split_count(programs: int, num_slots: int) -> int:
    """Enough splits to fill the current GPU, of at least a few blocks each."""
    wanted = triton.cdiv(PROGRAMS_PER_SM * multiprocessors(), programs)
    return max(1, min(wanted, num_slots // (2 * BLOCK), MAX_SPLITS))


@cache
def multiprocessors() -> int:
    """Of the current GPU; without one, for kernels that are interpreted, a few."""
    return torch.cuda.get_device_properties(None).multi_processor_count if torch.cuda.is_available() else 2


def launch_options(dtype: torch.dtype, tile: int, dim: int) -> dict[str, int | bool]:
    """A large tile's registers need more warps; in flight are as many blocks as the least shared memory holds (L40)."""
    return {
        "num_warps": 4 if tile * triton.next_power_of_2(dim) <= 4096 else 8,
        "num_stages": 2 if dtype == torch.float32 else 3,
        "enable_fp_fusion": True,
    }
