"""Attention in Triton over codes: how the kernel of kernels/coded_kv.py is launched.

Shapes as there.
"""

from typing import Any, Final

import torch
from torch import Tensor

from magicdec.attention.codes import Coded
from magicdec.attention.cuda import triton_grid as grid
from magicdec.attention.cuda.triton_grid import LOG2_E, ceil_div, kernels, power_of_2
from magicdec.attention.sdpa_fallback import KernelPlan

HEAD_DIMS: Final = (64, 128)
EXACT: Final = 32  # slots that are read at a time, and of codes at most
BLOCK: Final = 64
MAX_ROWS: Final = 32  # query rows: one tile


def reads(coded: Coded, plan: KernelPlan, q_BTHD: Tensor) -> bool:
    """Return whether the kernel can read these codes: without a window, and as the usual groups and
    head dims are.
    """
    fits = coded.k.group_size % EXACT == 0 and q_BTHD.shape[-1] // 2 % coded.v.group_size == 0
    rows = plan.shape.group_size * plan.shape.num_new
    plain = plan.window is None and plan.positions_BKS is None
    return fits and plain and q_BTHD.shape[-1] in HEAD_DIMS and rows <= MAX_ROWS


def block(dtype: torch.dtype, tile: int, head_dim: int, group_size: int) -> int:
    """Return the slots of codes that are read at a time: many where registers suffice, in whole
    groups of keys or a part of one.
    """
    few_rows = dtype != torch.float32 and tile == 16 and head_dim == 128
    many = few_rows and (group_size == EXACT or group_size % BLOCK == 0)
    return BLOCK if many else EXACT


def options(dtype: torch.dtype, tile: int) -> dict[str, int | bool]:
    """Return the compiler's options: each of few warps decodes codes for all query rows of a tile.
    More warps hold more numbers.
    """
    if dtype == torch.float32:
        warps, stages = 4 if tile == 16 else 8, 2
    else:
        # Shared memory holds four programs of three stages, but for small ones.
        deep = tile == 16 and grid.gpu().shared > 128 << 10
        warps, stages = 2 if tile == 16 else 4, 3 if deep else 2
    return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}


def attend(
    q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, seqlens_B: Tensor, coded: Coded
) -> Tensor:
    """Return attention (B, T, H, D) over codes before the exact entries."""
    from magicdec.kernels import coded_kv  # imports Triton

    (B, T, H, D), (K, S) = q_BTHD.shape, k_BKSD.shape[1:3]
    J, bits = H // K, coded.k.bits
    layer = coded.layer
    tile = max(16, power_of_2(J * T))
    arguments: dict[str, Any] = {
        "q": q_BTHD, "k": k_BKSD, "v": v_BKSD, "seqlens": seqlens_B, "first_exact": coded.first_exact_B, "T": T,  # noqa: E501
        "num_tiles": coded.k.codes_LBKNC.shape[3], "scale": D**-0.5 * LOG2_E,
    }  # fmt: skip
    for name, codes in (("k", coded.k), ("v", coded.v)):
        arguments[f"{name}_codes"] = codes.codes_LBKNC[layer]
        arguments[f"{name}_scales"] = codes.scales[layer]
    for name, x in (("q", q_BTHD), ("k", k_BKSD), ("v", v_BKSD)):
        arguments |= grid.strides(name, x)
    constants = {
        "K": K, "J": J, "D": D, "BITS": bits, "G": coded.k.group_size, "F": coded.v.group_size, "TILE": tile,  # noqa: E501
        "BLOCK": block(q_BTHD.dtype, tile, D, coded.k.group_size), "EXACT": EXACT, "SPLIT": True,
        "UPCAST": kernels().INTERPRETED,
    }  # fmt: skip
    compiler = options(q_BTHD.dtype, tile)
    variant = (q_BTHD.dtype, T == 1, *constants.items())
    at_once = grid.programs_at_once(
        variant, coded_kv.attend_coded, arguments | constants, compiler, q_BTHD.dtype
    )
    splits = grid.split_count(B * K, S, constants["BLOCK"], at_once)
    parts = grid.allocate(q_BTHD, K, splits)
    if not q_BTHD.is_meta:
        constants["SPLIT"] = splits > 1
        coded_kv.attend_coded[ceil_div(J * T, tile), splits, B * K](
            **arguments, **parts.arguments, **constants, **compiler
        )
        grid.merge(parts, K)
    return parts.out_BTHD
