"""Selection of slots in Triton: how the kernels of kernels/selected_slots.py are launched.

Shapes as there.
"""

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from magicdec.attention.base import PageBounds
from magicdec.attention.cuda import triton_grid as grid
from magicdec.attention.cuda.triton_grid import LOG2_E, ceil_div, kernels, power_of_2
from magicdec.attention.sdpa_fallback import KernelPlan

BLOCK: Final = 64  # places that are weighed at a time
MAX_ROWS: Final = 32  # query rows: one tile
MIN_GROUPS, MAX_GROUPS = 1024, 8192
# Where all programs run at once, groups are so many that each has few places to wait for.
ALONE: Final = 2048
PLACES: Final = 8  # of a group
PER_THREAD: Final = 8  # groups


class Weighed(NamedTuple):
    """The products of query rows and places (B x K, R, P), in fp16 for half precision, and the
    log-sum-exp of each split (B x K, splits, R) in fp32, both in powers of two.
    """

    raw: Tensor
    lse: Tensor


def fits(q_BTHD: Tensor, num_kv_heads: int) -> bool:
    """Return whether the query rows of a KV head are one tile."""
    return q_BTHD.shape[1] * q_BTHD.shape[2] // num_kv_heads <= MAX_ROWS


def slots(q_BTHD: Tensor, k_BKSD: Tensor, plan: KernelPlan, length_B: Tensor, count: int) -> Tensor:
    """Select slots as Attention.select_slots does, from keys alone."""
    weighed = _weigh(q_BTHD, k_BKSD, None, None, plan.seqlens_B, 1, plan.window)
    count = min(count, k_BKSD.shape[2])
    return _largest(None, weighed, None, length_B, count, k_BKSD.shape[:3])


def pages(
    q_BTHD: Tensor, bounds: PageBounds, first_B: Tensor, length_B: Tensor, count: int
) -> Tensor:
    """Select slots of pages as Attention.select_pages does."""
    largest = bounds.largest_BKPD
    weighed = _weigh(q_BTHD, largest, bounds.least_BKPD, first_B, length_B, bounds.size, None)
    return _largest(
        None, weighed, first_B, length_B, count - 1, largest.shape[:3], bounds.size, paged=True
    )


def largest(scores: Tensor, first: Tensor, last: Tensor, count: int) -> Tensor:
    """Select places as Attention.select_largest does."""
    *leading, size = scores.shape
    first, last = first.expand(leading).contiguous(), last.expand(leading).contiguous()
    return _largest(scores.contiguous(), None, first, last, min(count, size), scores.shape)


def group_count(rows: int, num_places: int, count: int) -> int:
    """Return the groups of a program, so that few more than `count` places reach the least number
    that is looked at.
    """
    few = rows <= grid.gpu().sms
    alone = min(ALONE, power_of_2(ceil_div(num_places, PLACES))) if few else 0
    return min(max(MIN_GROUPS, power_of_2(2 * count), alone), MAX_GROUPS)


def _weigh(
    q_BTHD: Tensor,
    keys_BKPD: Tensor,
    least_BKPD: Tensor | None,
    first_B: Tensor | None,
    end_B: Tensor,
    page_size: int,
    reach: int | None,
) -> Weighed:
    from magicdec.kernels import selected_slots  # imports Triton

    (B, T, H, D), (K, P) = q_BTHD.shape, keys_BKPD.shape[1:3]
    J = H // K
    half = q_BTHD.dtype != torch.float32
    raw = q_BTHD.new_empty((B * K, J * T, P), dtype=torch.float16 if half else torch.float32)
    arguments: dict[str, Any] = {
        "q": q_BTHD, "keys": keys_BKPD, "least": least_BKPD, "first": first_B, "end": end_B, "raw": raw,  # noqa: E501
        "T": T, "P": P, "reach": reach, "scale": D**-0.5 * LOG2_E,
    }  # fmt: skip
    arguments |= grid.strides("q", q_BTHD) | grid.strides("k", keys_BKPD)
    constants = {
        "K": K, "J": J, "D": D, "PADDED_D": power_of_2(D), "TILE": max(16, power_of_2(J * T)), "BLOCK": BLOCK,  # noqa: E501
        "E": page_size, "UPCAST": kernels().INTERPRETED,
    }  # fmt: skip
    compiler = {"num_warps": 4, "num_stages": 3 if half else 2, "enable_fp_fusion": True}
    variant = (
        q_BTHD.dtype,
        least_BKPD is None,
        first_B is None,
        reach is None,
        T == 1,
        *constants.items(),
    )
    at_once = grid.programs_at_once(
        variant, selected_slots.weigh_places, arguments | constants, compiler, q_BTHD.dtype
    )
    splits = grid.split_count(B * K, P, BLOCK, at_once)
    lse = torch.empty((B * K, splits, J * T), dtype=torch.float32, device=q_BTHD.device)
    if not q_BTHD.is_meta:
        selected_slots.weigh_places[splits, B * K](
            **arguments, lse=lse, num_splits=splits, **constants, **compiler
        )
    return Weighed(raw, lse)


def _largest(
    scores: Tensor | None,
    weighed: Weighed | None,
    first: Tensor | None,
    end: Tensor,
    count: int,
    shape: torch.Size,
    page_size: int = 1,
    paged: bool = False,
) -> Tensor:
    from magicdec.kernels import selected_slots  # imports Triton

    *leading, P = shape
    rows, N = shape.numel() // P, (count + paged) * page_size

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=end.device)

    groups = group_count(rows, P, count)
    copied, out = 2 * groups, empty(rows, N, dtype=torch.int64)
    splits = 1 if weighed is None else weighed.lse.shape[1]
    arguments: dict[str, Any] = {
        "scores": empty(rows, P, dtype=torch.float32) if scores is None else scores,
        "raw": None if weighed is None else weighed.raw, "lse": None if weighed is None else weighed.lse,  # noqa: E501
        "first": first, "end": end, "copied": empty(rows, 2, copied), "chosen": empty(rows, max(1, count)), "out": out,  # noqa: E501
        "P": P, "count": count, "num_splits": splits, "num_out": N,
    }  # fmt: skip
    if not end.is_meta:
        selected_slots.select_places[rows,](
            **arguments, PER=rows // end.numel(), R=1 if weighed is None else weighed.raw.shape[1],
            E=page_size, PAGED=paged, PADDED_SPLITS=power_of_2(splits), GROUPS=groups,
            COPIED=copied, num_warps=max(1, groups // (32 * PER_THREAD)), num_stages=1,
            enable_fp_fusion=True,
        )  # fmt: skip
    return out.view(*leading, N)
