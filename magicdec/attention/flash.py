"""Attention by the flash-attn package, for NVIDIA GPUs (FlashAttention-2, arXiv 2307.08691, and -3, arXiv 2407.08608).

T new tokens, H query heads over K KV heads, G = H / K. One function of the library, that for caches, serves prefill as
well as decoding: it takes each row at its own length.

FlashAttention-2 reads K and V once for the G heads that share them only where there is a single query token. A
verification of few tokens therefore goes to Triton's kernel, which reads them once for all G x T. FlashAttention-3
packs query heads by itself, and does everything.
"""

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from magicdec.attention.kernel import KernelPlan, gpu_obstacle
from magicdec.attention.library import LibraryAttention

MAX_HEAD_DIM = 256
FEW_TOKENS = 32  # a verification; more are a prefill


def library() -> tuple[Callable, bool]:
    """Return the library's function for caches, and whether it packs query heads; raises ImportError without it."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9:  # FlashAttention-3 is for Hopper
        with suppress(ImportError):
            from flash_attn_interface import flash_attn_with_kvcache

            return flash_attn_with_kvcache, True
    from flash_attn import flash_attn_with_kvcache

    return flash_attn_with_kvcache, False


class FlashAttention(LibraryAttention):
    """The library's kernels; Triton's for a verification with FlashAttention-2."""

    name = "flash"

    def __init__(self) -> None:
        super().__init__()
        self._library, self._packs = library()

    @classmethod
    def obstacle(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """See Attention.obstacle; raises ImportError where the library is missing."""
        if obstacle := gpu_obstacle(device, dtype, (torch.bfloat16, torch.float16)):
            return obstacle
        if head_dim % 8 or head_dim > MAX_HEAD_DIM:
            return f"needs a head dim that is a multiple of 8 and at most {MAX_HEAD_DIM}, not {head_dim}"
        library()
        return None

    def takes(self, q_BTHD: Tensor, k_BKSD: Tensor) -> bool:
        """See LibraryAttention.takes. In a prefill arithmetic decides, not how often K and V are read."""
        num_new, group = q_BTHD.shape[1], q_BTHD.shape[2] // k_BKSD.shape[1]
        return self._packs or group == 1 or num_new == 1 or num_new > FEW_TOKENS

    def read_all(self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: KernelPlan) -> Tensor:
        """See LibraryAttention.read_all."""
        if q_BTHD.is_meta:  # what the library allocates for its splits is a few MiB
            return torch.empty_like(q_BTHD)
        return self._library(
            q_BTHD,
            k_BKSD.transpose(1, 2),
            v_BKSD.transpose(1, 2),
            cache_seqlens=plan.seqlens_B,
            causal=True,
            window_size=(-1, -1) if plan.window is None else (plan.window - 1, 0),
        )
