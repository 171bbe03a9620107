"""Attention through PyTorch's scaled_dot_product_attention: runs everywhere, and the twin every other backend meets.

For few query tokens the G query heads that share a KV head are folded into the query rows, so that one pass over K and
V serves all of them: the multi-token verification for GQA of the MagicDec paper (arXiv 2408.11049, section 5).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.attention.base import Attention

# Above this many query tokens (prefill) a mask folded over G would be larger than the keys it guards.
MAX_FOLDED_TOKENS = 64


@dataclass(frozen=True)
class SdpaPlan:
    """`length` entries are read; `mask_BTS` is additive in the query's dtype, None where nothing is masked."""

    length: int
    mask_BTS: Tensor | None


class SdpaAttention(Attention[SdpaPlan]):
    """The reference backend."""

    name = "sdpa"

    def plan(self, seqlens_B: Tensor, num_new: int, capacity: int, window: int | None, dtype: object) -> SdpaPlan:
        """See Attention.plan. Reads lengths on the host only on a CPU, where that costs nothing."""
        length, uniform = capacity, False
        if seqlens_B.device.type == "cpu":
            longest = int(seqlens_B.max())
            length, uniform = longest, bool((seqlens_B == longest).all())
        if uniform:
            if num_new == 1 and (window is None or window >= length):
                return SdpaPlan(length, None)
            seqlens_B = seqlens_B[:1]
        slot_S = torch.arange(length, device=seqlens_B.device)
        last_BT = seqlens_B.long()[:, None] - num_new + torch.arange(num_new, device=seqlens_B.device)
        hidden_BTS = slot_S > last_BT[..., None]
        if window is not None:
            hidden_BTS |= slot_S <= last_BT[..., None] - window
        mask_BTS = torch.zeros(hidden_BTS.shape, dtype=dtype, device=seqlens_B.device)
        return SdpaPlan(length, mask_BTS.masked_fill_(hidden_BTS, float("-inf")))

    def attend(self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: SdpaPlan) -> Tensor:
        """See Attention.attend."""
        B, T, H, D = q_BTHD.shape
        K = k_BKSD.shape[1]
        k, v = k_BKSD[:, :, : plan.length], v_BKSD[:, :, : plan.length]
        mask = plan.mask_BTS
        if mask is not None and T > MAX_FOLDED_TOKENS:
            q = q_BTHD.transpose(1, 2)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=H != K)
            return out.transpose(1, 2)
        q = q_BTHD.view(B, T, K, H // K, D).permute(0, 2, 3, 1, 4).reshape(B, K, -1, D)
        if mask is not None:
            mask = mask.repeat(1, H // K, 1)[:, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.view(B, K, H // K, T, D).permute(0, 3, 1, 2, 4).reshape(B, T, H, D)
