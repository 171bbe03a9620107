"""Attention through PyTorch's scaled_dot_product_attention: runs everywhere, and the twin every other backend meets.

For few query tokens the G query heads that share a KV head are folded into the query rows, so that one pass over K and
V serves all of them: the multi-token verification for GQA of the MagicDec paper (arXiv 2408.11049, section 5).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.attention.base import Attention, Shape

# Above this many query tokens (prefill) a mask folded over G would be larger than the keys it guards.
MAX_FOLDED_TOKENS = 64


@dataclass(frozen=True)
class SdpaPlan:
    """`length` entries are read; `mask` is additive and broadcasts against the scores, None where nothing is hidden.

    `folded`: query rows are (G, T) of one KV head, else each query head stands for itself.
    """

    length: int
    mask: Tensor | None
    folded: bool


class SdpaAttention(Attention[SdpaPlan]):
    """The reference backend."""

    name = "sdpa"

    def plan(self, seqlens_B: Tensor, shape: Shape, window: int | None) -> SdpaPlan:
        """See Attention.plan. Reads lengths on the host only on a CPU, where that costs nothing."""
        length, uniform = shape.capacity, False
        if seqlens_B.device.type == "cpu":
            length = int(seqlens_B.max())
            uniform = bool((seqlens_B == length).all())
        folded = shape.num_new <= MAX_FOLDED_TOKENS
        if uniform and shape.num_new == 1 and (window is None or window >= length):
            return SdpaPlan(length, None, folded)
        if uniform:
            seqlens_B = seqlens_B[:1]
        slot_S = torch.arange(length, device=seqlens_B.device)
        own_T = torch.arange(shape.num_new, device=seqlens_B.device)
        last_BT1 = (seqlens_B.long()[:, None] - shape.num_new + own_T)[..., None]
        hidden_BTS = slot_S > last_BT1
        if window is not None:
            hidden_BTS |= slot_S <= last_BT1 - window
        mask_BTS = torch.zeros(hidden_BTS.shape, dtype=shape.dtype, device=seqlens_B.device)
        mask_BTS.masked_fill_(hidden_BTS, float("-inf"))
        if folded:
            mask_BTS = mask_BTS.repeat(1, shape.group_size, 1)
        return SdpaPlan(length, mask_BTS[:, None], folded)

    def attend(self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: SdpaPlan) -> Tensor:
        """See Attention.attend."""
        B, T, H, D = q_BTHD.shape
        K = k_BKSD.shape[1]
        k, v = k_BKSD[:, :, : plan.length], v_BKSD[:, :, : plan.length]
        if not plan.folded:
            q = q_BTHD.transpose(1, 2)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=plan.mask, enable_gqa=H != K).transpose(1, 2)
        q = q_BTHD.unflatten(2, (K, -1)).permute(0, 2, 3, 1, 4).reshape(B, K, -1, D)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=plan.mask)
        return out.view(B, K, H // K, T, D).permute(0, 3, 1, 2, 4).reshape(B, T, H, D)
