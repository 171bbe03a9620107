"""The attention that slots received, by Triton: how the kernels of kernels/received_scores.py are
launched.

Shapes as there.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from magicdec.attention.cuda.triton_grid import LOG2_E, ceil_div, kernels, power_of_2
from magicdec.attention.sdpa_fallback import KernelPlan

SUMMED = 512  # slots of a program that sums written scores
BLOCK: Final = 128  # slots of a program that multiplies again
TILE: Final = 64  # tokens at a time
# Query rows whose scores are written and read in half precision, as many bytes as keys of a head
# dim of 128 have: with more rows, keys are read again.
MOST_WRITTEN = 64


@dataclass(frozen=True)
class Observation:
    """A pass whose attention is observed."""

    q_BTHD: Tensor
    k_BKSD: Tensor
    plan: KernelPlan
    counted_BT: Tensor | None
    softcap: float | None


def allocate(q_BTHD: Tensor, k_BKSD: Tensor) -> Tensor | None:
    """Allocate what attention writes its scores to (B x K, R, S): in fp16 for half precision. None
    where there would be too many.
    """
    (B, T, H, _), (K, S) = q_BTHD.shape, k_BKSD.shape[1:3]
    rows = H // K * T
    dtype = torch.float32 if q_BTHD.dtype == torch.float32 else torch.float16
    if rows > MOST_WRITTEN:
        return None
    return torch.empty((B * K, rows, S), dtype=dtype, device=q_BTHD.device)


def receive(
    given: Observation, raw: Tensor | None, lse: Tensor, scores_BKS: Tensor, added: bool
) -> None:
    """Write what slots received, or add it, by the scores or else from the keys."""
    from magicdec.kernels import received_scores  # imports Triton

    q, k, plan, counted = given.q_BTHD, given.k_BKSD, given.plan, given.counted_BT
    (B, T, H, D), (K, S), splits = q.shape, k.shape[1:3], lse.shape[1]
    arguments: dict[str, Any] = {
        "lse": lse, "seqlens": plan.seqlens_B, "positions": plan.positions_BKS,
        "counted": None if counted is None else counted.view(torch.uint8), "out": scores_BKS,
        "T": T, "S": S, "num_splits": splits, "reach": plan.window, "K": K, "J": H // K,
        "ADDED": added,
    }  # fmt: skip
    if raw is not None:
        received_scores.sum_scores[B * K, ceil_div(S, SUMMED)](
            raw=raw, **arguments, BLOCK=SUMMED, enable_fp_fusion=True
        )
        return
    arguments |= zip(("q_row", "q_token", "q_head"), q.stride(), strict=False)
    arguments |= zip(("k_row", "k_head", "k_slot"), k.stride(), strict=False)
    softcap = None if given.softcap is None else given.softcap * LOG2_E
    few = q.dtype == torch.float32  # numbers that registers hold
    block, most = (BLOCK // 4, TILE // 2) if few else (BLOCK, TILE)
    tile = min(most, max(16, power_of_2(T)))
    received_scores.score_keys[ceil_div(S, block), B * K](
        q=q, k=k, **arguments, scale=D**-0.5 * LOG2_E, softcap=softcap, D=D,
        PADDED_D=power_of_2(D), TILE=tile, BLOCK=block, UPCAST=kernels().INTERPRETED,
        num_warps=4, num_stages=2, enable_fp_fusion=True,
    )  # fmt: skip
