"""The attention that slots received, by Triton: how the kernels of kernels/received_scores.py are
launched.

Shapes as there.
"""

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from magicdec.attention.base import Weighting, ends
from magicdec.attention.cuda import triton_grid as grid
from magicdec.attention.cuda.triton_grid import LOG2_E, ceil_div, kernels, power_of_2
from magicdec.attention.sdpa_fallback import KernelPlan

SUMMED = 512  # slots of a program that sums written scores
BLOCK: Final = 128  # slots of a program that multiplies again
TILE: Final = 64  # tokens at a time
# Query rows of a program that takes the log-sum-exp, and slots at a time.
MOST_ROWS, LSE_BLOCK = 128, 64
# Query rows whose scores are written and read in half precision, as many bytes as keys of a head
# dim of 128 have: with more rows, keys are read again.
MOST_WRITTEN = 64


class Observation(NamedTuple):
    """A pass whose attention is observed."""

    q_BTHD: Tensor
    k_BKSD: Tensor
    plan: KernelPlan
    counted_BT: Tensor | None  # whose attention is summed; None: every token's
    weighting: Weighting
    ends_alone: bool = False  # that of the first and the last of several tokens

    @property
    def capped_at(self) -> float | None:
        """Return the soft cap, in powers of two."""
        softcap = self.weighting.softcap
        return None if softcap is None else softcap * LOG2_E


def empty(k_BKSD: Tensor) -> Tensor:
    """Allocate what slots receive."""
    return torch.empty(k_BKSD.shape[:3], dtype=torch.float32, device=k_BKSD.device)


def allocate(given: Observation) -> Tensor | None:
    """Allocate what attention writes its scores to (B x K, R or 2 J, S): in fp16 for half
    precision. None where there would be too many.
    """
    (B, T, H, _), (K, S) = given.q_BTHD.shape, given.k_BKSD.shape[1:3]
    rows = H // K * (2 if given.ends_alone else T)
    dtype = torch.float32 if given.q_BTHD.dtype == torch.float32 else torch.float16
    if rows > MOST_WRITTEN:
        return None
    return torch.empty((B * K, rows, S), dtype=dtype, device=given.q_BTHD.device)


def receive(given: Observation, raw: Tensor | None, lse: Tensor, scores_BKS: Tensor) -> None:
    """Write what slots received, by the scores or else from the keys."""
    from magicdec.kernels import received_scores  # imports Triton

    if given.q_BTHD.is_meta:
        return
    q, k, plan, counted = given.q_BTHD, given.k_BKSD, given.plan, given.counted_BT
    (B, T, H, D), (K, S) = q.shape, k.shape[1:3]
    if given.ends_alone and raw is None:
        counted = ends(B, T, q.device)
    arguments: dict[str, Any] = {
        "lse": lse, "seqlens": plan.seqlens_B, "positions": plan.positions_BKS,
        "counted": None if counted is None else counted.view(torch.uint8), "out": scores_BKS,
        "T": T, "S": S, "num_splits": lse.shape[1], "reach": plan.window, "K": K, "J": H // K,
    }  # fmt: skip
    if raw is not None:
        received_scores.sum_scores[B * K, ceil_div(S, SUMMED)](
            raw=raw, **arguments, BLOCK=SUMMED, ENDS_ALONE=given.ends_alone, enable_fp_fusion=True
        )
        return
    few = q.dtype == torch.float32  # numbers that registers hold
    block, most = (BLOCK // 4, TILE // 2) if few else (BLOCK, TILE)
    tile = min(most, max(16, power_of_2(T)))
    received_scores.score_keys[ceil_div(S, block), B * K](
        **_products(given), **arguments, D=D, PADDED_D=power_of_2(D), TILE=tile, BLOCK=block,
        UPCAST=kernels().INTERPRETED, num_warps=4, num_stages=2, enable_fp_fusion=True,
    )  # fmt: skip


def from_keys(given: Observation) -> Tensor:
    """Return what slots receive (B, K, S), by two passes over the keys."""
    scores_BKS = empty(given.k_BKSD)
    receive(given, None, _log_sums(given), scores_BKS)
    return scores_BKS


def _log_sums(given: Observation) -> Tensor:
    """Return the log-sum-exp of query rows, sinks included (B x K, 1, R)."""
    from magicdec.kernels import received_scores  # imports Triton

    q, plan = given.q_BTHD, given.plan
    (B, T, H, D), (K, S) = q.shape, given.k_BKSD.shape[1:3]
    single = q.dtype == torch.float32
    tile = min(MOST_ROWS // 4 if single else MOST_ROWS, max(16, power_of_2(H // K * T)))
    arguments: dict[str, Any] = {
        "seqlens": plan.seqlens_B, "positions": plan.positions_BKS, "T": T, "S": S,
        "reach": plan.window, **_products(given),
    }  # fmt: skip
    constants = {
        "K": K, "J": H // K, "D": D, "PADDED_D": power_of_2(D), "TILE": tile,
        "BLOCK": LSE_BLOCK // 2 if single else LSE_BLOCK, "UPCAST": kernels().INTERPRETED,
    }  # fmt: skip
    compiler = {
        "num_warps": 8 if tile == MOST_ROWS else 4,
        "num_stages": 2 if single else 3,
        "enable_fp_fusion": True,
    }
    optional = (plan.positions_BKS is None, plan.window is None, given.capped_at is None)
    variant = ("sum_keys", q.dtype, *optional, *constants.items())
    at_once = grid.programs_at_once(
        variant, received_scores.sum_keys, arguments | constants, compiler, q.dtype
    )
    tiles = ceil_div(H // K * T, tile)
    reads = S if plan.positions_BKS is not None else min(S, plan.reach + T)
    splits = grid.split_count(B * K * tiles, reads, constants["BLOCK"], at_once)
    lse = torch.empty((B * K, splits, H // K * T), dtype=torch.float32, device=q.device)
    if not q.is_meta:
        received_scores.sum_keys[tiles, splits, B * K](
            **arguments, lse=lse, num_splits=splits, **constants, **compiler
        )
    if splits > 1:
        lse = torch.logsumexp(lse / LOG2_E, dim=1, keepdim=True) * LOG2_E
    sinks_H = given.weighting.sinks_H
    if sinks_H is not None:
        sinks_KR = (sinks_H.float() * LOG2_E).view(K, -1).repeat_interleave(T, dim=1)
        lse = torch.logaddexp2(lse, sinks_KR.repeat(B, 1)[:, None])
    return lse


def _products(given: Observation) -> dict[str, Any]:
    """Return the arguments by which kernels multiply queries with keys."""
    q, k = given.q_BTHD, given.k_BKSD
    arguments: dict[str, Any] = {
        "q": q,
        "k": k,
        "scale": q.shape[-1] ** -0.5 * LOG2_E,
        "softcap": given.capped_at,
    }
    return arguments | grid.strides("q", q) | grid.strides("k", k)
