"""Prefill by PyTorch's own attention for rows of different lengths (torch.nn.attention.varlen), for
NVIDIA GPUs: FlashAttention as PyTorch ships it.

B rows, S slots, T new tokens, H query heads over K KV heads, D head dim. The function takes the
tokens of all rows side by side, and where each row begins. Ours are apart: the entries of KV head k
of row b start at slot (b K + k) S of one memory. Seen as tokens of the first head, with the others
S slots further on each, row b begins at token b K S, and `seqused_k` says how many it has. So
nothing is copied, and lengths stay on the device.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from magicdec.attention.cuda.triton_fallback import FEW_TOKENS, LibraryAttention, flash_obstacle
from magicdec.attention.sdpa_fallback import KernelPlan
from magicdec.config.choices import Backend
from magicdec.config.registry import BACKENDS

NEEDED = {"seqused_k", "enable_gqa", "window_size"}  # parameters, which early versions lack


def library() -> Callable[..., Any]:
    """Return PyTorch's function. Raise ImportError where it is missing, or cannot read a cache."""
    from torch.nn.attention.varlen import varlen_attn

    if missing := NEEDED - signature(varlen_attn).parameters.keys():
        raise ImportError(f"torch.nn.attention.varlen_attn has no {', '.join(sorted(missing))}")
    return varlen_attn


@BACKENDS.register(Backend("varlen", "cuda"))
class VarlenAttention(LibraryAttention):
    """PyTorch's kernel for a prefill; Triton's for decoding and verification."""

    def __init__(self) -> None:
        super().__init__()
        self._library = library()

    @classmethod
    @override
    def obstacle(cls, dtype: torch.dtype, head_dim: int) -> str | None:
        if obstacle := flash_obstacle(dtype, head_dim):
            return obstacle
        try:
            library()
        except ImportError as error:
            return f"needs a newer PyTorch than {torch.__version__} ({error})"
        return None

    @classmethod
    @override
    def version(cls) -> str:
        return f"PyTorch {torch.__version__}"

    @override
    def takes(self, q_BTHD: Tensor, k_BKSD: Tensor) -> bool:
        """Take every prefill, which is bound by arithmetic and not by reading K and V."""
        return q_BTHD.shape[1] > FEW_TOKENS

    @override
    def read_all(self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: KernelPlan) -> Tensor:
        if q_BTHD.is_meta:
            return torch.empty_like(q_BTHD)
        (B, T, H, _), (K, S) = q_BTHD.shape, k_BKSD.shape[1:3]
        row = torch.arange(B + 1, dtype=torch.int32, device=q_BTHD.device)
        out = self._library(
            q_BTHD.flatten(0, 1),
            side_by_side(k_BKSD),
            side_by_side(v_BKSD),
            row * T,
            row * (K * S),
            T,
            S,
            window_size=(-1 if plan.window is None else plan.window - 1, 0),
            enable_gqa=H != K,
            seqused_k=plan.seqlens_B,
        )
        attended: Tensor = out.view(q_BTHD.shape)
        return attended


def side_by_side(x_BKSD: Tensor) -> Tensor:
    """Return the same entries as (token, K, D), where row b begins at token b K S."""
    assert x_BKSD.is_contiguous()
    B, K, S, D = x_BKSD.shape
    return x_BKSD.as_strided((((B - 1) * K + 1) * S, K, D), (D, S * D, 1))
