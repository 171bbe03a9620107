"""Attention by the flash-attn package, for NVIDIA GPUs (FlashAttention-2, arXiv 2307.08691, and -3, arXiv 2407.08608).

B rows, S slots, T new tokens, H query heads over K KV heads, G = H / K, D head dim. One function of the library, that
for caches, serves prefill as well as decoding: it takes each row at its own length, and as all rows have T query tokens
in a chunk, the one for ragged queries (varlen), the same kernel, would only want the cache copied together first.

FlashAttention-2 reads K and V once for the G heads that share them only where there is a single query token. For more,
all query rows attend to what was committed before as if they were T x G tokens of K heads, unmasked; then to the T new
tokens causally; and the two parts are merged by their log-sum-exp. FlashAttention-3 packs by itself.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from magicdec.attention.kernel import KernelPlan, gpu_obstacle
from magicdec.attention.library import LibraryAttention

MAX_HEAD_DIM = 256
FEW_TOKENS = 32  # a verification; more are a prefill


def library() -> tuple[Callable, bool]:
    """The library's function for caches, and whether it packs by itself; raises ImportError where it is missing."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9:  # FlashAttention-3 is for Hopper
        with suppress(ImportError):
            from flash_attn_interface import flash_attn_with_kvcache

            return flash_attn_with_kvcache, True
    from flash_attn import flash_attn_with_kvcache

    return flash_attn_with_kvcache, False


class FlashAttention(LibraryAttention):
    """The fastest on a GPU, where it is installed."""

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

    def read_all(self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: KernelPlan) -> Tensor:
        """See LibraryAttention.read_all."""
        T, G = q_BTHD.shape[1], q_BTHD.shape[2] // k_BKSD.shape[1]
        # In a prefill arithmetic decides, not memory; and a window starts elsewhere for each token.
        if 1 < T <= FEW_TOKENS and G > 1 and plan.window is None and not self._packs:
            return self._attend_in_parts(q_BTHD, k_BKSD, v_BKSD, plan.seqlens_B)
        return self._attend(
            q_BTHD,
            k_BKSD.transpose(1, 2),
            v_BKSD.transpose(1, 2),
            cache_seqlens=plan.seqlens_B,
            causal=True,
            window_size=(-1, -1) if plan.window is None else (plan.window - 1, 0),
        )

    def _attend(self, q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, **options: Any) -> Any:
        """The library's function; where memory is estimated, what it allocates (its splits' parts are a few MiB)."""
        if not q_BTHD.is_meta:
            return self._library(q_BTHD, k_BSKD, v_BSKD, **options)
        B, T, H, _ = q_BTHD.shape
        out_BTHD, lse_BHT = torch.empty_like(q_BTHD), q_BTHD.new_empty((B, H, T), dtype=torch.float32)
        return (out_BTHD, lse_BHT) if "return_softmax_lse" in options else out_BTHD

    def _attend_in_parts(self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, seqlens_B: Tensor) -> Tensor:
        (_, T, _, D), K = q_BTHD.shape, k_BKSD.shape[1]
        before_B = seqlens_B - T
        q_BRKD = q_BTHD.unflatten(2, (K, -1)).transpose(2, 3).flatten(1, 2)  # R = T x G
        kv = (k_BKSD.transpose(1, 2), v_BKSD.transpose(1, 2))
        out_BRKD, lse_BKR = self._attend(q_BRKD, *kv, cache_seqlens=before_B, return_softmax_lse=True)
        old_BTHD = out_BRKD.unflatten(1, (T, -1)).transpose(2, 3).flatten(2, 3)
        old_lse_BTH = lse_BKR.unflatten(2, (T, -1)).permute(0, 2, 1, 3).flatten(2, 3)

        slots_BT = before_B.long()[:, None] + torch.arange(T, device=seqlens_B.device)
        slots_BKTD = slots_BT[:, None, :, None].expand(-1, K, -1, D)
        new_kv = (x.gather(2, slots_BKTD).transpose(1, 2) for x in (k_BKSD, v_BKSD))
        new_BTHD, new_lse_BHT = self._attend(q_BTHD, *new_kv, causal=True, return_softmax_lse=True)
        return merge(old_BTHD, old_lse_BTH, new_BTHD, new_lse_BHT.transpose(1, 2), before_B > 0)


def merge(old_BTHD: Tensor, old_lse_BTH: Tensor, new_BTHD: Tensor, new_lse_BTH: Tensor, any_old_B: Tensor) -> Tensor:
    """Attention over two disjoint sets of entries from that over each, in fp32.

    Where a row has no old entries (`any_old_B`), the library's log-sum-exp over them may be +inf: it is not looked at.
    """
    exists_B11 = any_old_B[:, None, None]
    share_BTH1 = torch.where(exists_B11, torch.sigmoid(old_lse_BTH - new_lse_BTH), 0.0)[..., None]
    old = torch.where(exists_B11[..., None], old_BTHD.float(), 0.0)
    return (old * share_BTH1 + new_BTHD.float() * (1 - share_BTH1)).to(new_BTHD.dtype)
