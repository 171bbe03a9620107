"""Attention through PyTorch's scaled_dot_product_attention: runs everywhere; the reference of all
other backends.

For few query tokens the J query heads that share a KV head are folded into the query rows, so that
one pass over K and V serves all of them: the multi-token verification for GQA of the MagicDec paper
(arXiv 2408.11049, section 5).

N selected slots; all other letters as in base.py.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from magicdec.attention.base import SCORES_AT_ONCE, Attention, Shape, Weighting
from magicdec.config.choices import Backend
from magicdec.config.registry import BACKENDS

# Above this many query tokens (prefill) a mask folded over J would be larger than the keys it
# guards.
MAX_FOLDED_TOKENS = 64
# Of the mask's rows in elements: the fused kernels of CUDA would copy it in front of every layer.
ALIGNMENT = 8


@dataclass(frozen=True)
class SdpaPlan:
    """`length` entries are read; `mask` is additive and broadcasts against the scores, None where
    nothing is hidden.

    `folded`: query rows are (J, T) of one KV head, else each query head is on its own. `seqlens_B`
    and `window` are kept for attention over selected slots, whose mask depends on the selection.
    """

    length: int
    mask: Tensor | None
    folded: bool
    num_new: int
    seqlens_B: Tensor
    window: int | None

    @property
    def mask_BKJTS(self) -> Tensor | None:
        """Return the mask with the query heads of a KV head in a dimension of their own."""
        if self.mask is None:
            return None
        return self.mask.unflatten(2, (-1, self.num_new)) if self.folded else self.mask[:, :, None]


@BACKENDS.register(Backend("sdpa", priority=0))
class SdpaAttention(Attention[SdpaPlan]):
    """The reference backend. With a weighting it writes the scores out, some at a time."""

    takes_weighting = True

    @override
    def plan(
        self,
        seqlens_B: Tensor,
        shape: Shape,
        window: int | None,
        positions_BKS: Tensor | None = None,
    ) -> SdpaPlan:
        """Read lengths on the host only on a CPU, where that costs nothing."""
        length, uniform = shape.capacity, False
        if seqlens_B.device.type == "cpu":
            length = int(seqlens_B.max())
            uniform = positions_BKS is None and bool((seqlens_B == length).all())
        folded = shape.num_new <= MAX_FOLDED_TOKENS
        if uniform and shape.num_new == 1 and (window is None or window >= length):
            return SdpaPlan(length, None, folded, shape.num_new, seqlens_B, window)
        masked_B = seqlens_B[:1] if uniform else seqlens_B
        slot_S = position = torch.arange(
            -(-length // ALIGNMENT) * ALIGNMENT, device=seqlens_B.device
        )
        if positions_BKS is not None:
            position = F.pad(positions_BKS[..., :length], (0, len(slot_S) - length))[:, :, None]
        own_B1T1 = _own_slots(masked_B, shape.num_new)[:, None, :, None]
        # K: 1 where all heads see the same.
        hidden_BKTS = _hidden(slot_S, own_B1T1, window, position)
        mask_BKTS = torch.zeros(hidden_BKTS.shape, dtype=shape.dtype, device=seqlens_B.device)
        mask_BKTS.masked_fill_(hidden_BKTS, float("-inf"))
        if folded:
            mask_BKTS = mask_BKTS.repeat(1, 1, shape.group_size, 1)
        mask = mask_BKTS[..., :length]
        return SdpaPlan(length, mask, folded, shape.num_new, seqlens_B, window)

    @override
    def attend(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: SdpaPlan,
        indices_BKN: Tensor | None = None,
    ) -> Tensor:
        if indices_BKN is not None:
            return self._attend_selected(q_BTHD, k_BKSD, v_BKSD, plan, indices_BKN)
        H = q_BTHD.shape[2]
        K = k_BKSD.shape[1]
        k = k_BKSD[:, :, : plan.length]
        v = v_BKSD[:, :, : plan.length]
        if not self.weighting.is_plain:
            return attend_explicitly(q_BTHD, k, v, self.weighting, plan.mask_BKJTS)
        if not plan.folded and (
            q_BTHD.device.type != "cpu" or (plan.mask is not None and plan.mask.shape[1] > 1)
        ):
            return attend_by_turns(q_BTHD, k, v, plan.mask)
        if not plan.folded:
            q = q_BTHD.transpose(1, 2)
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=plan.mask, enable_gqa=H != K
            ).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            _fold(q_BTHD, K).flatten(2, 3), k, v, attn_mask=plan.mask
        )
        return _unfold(out.unflatten(2, (H // K, -1)))

    @override
    def attend_scored(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: SdpaPlan,
        counted_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Write out the probabilities, which only suits a few query tokens at a time."""
        k = k_BKSD[:, :, : plan.length]
        v = v_BKSD[:, :, : plan.length]
        q_BKJTD = _fold(q_BTHD, k.shape[1])
        p_BKJTS = weights_of(q_BKJTD, k, self.weighting, plan.mask_BKJTS)
        out = torch.einsum("bkjts,bksd->bkjtd", p_BKJTS.to(v.dtype), v)
        if counted_BT is not None:
            p_BKJTS *= counted_BT[:, None, None, :, None]
        return _unfold(out), p_BKJTS.sum((2, 3))

    @override
    def score_keys(
        self, q_BTHD: Tensor, k_BKSD: Tensor, plan: SdpaPlan, counted_BT: Tensor | None = None
    ) -> Tensor:
        k = k_BKSD[:, :, : plan.length]
        p_BKJTS = weights_of(_fold(q_BTHD, k.shape[1]), k, self.weighting, plan.mask_BKJTS)
        if counted_BT is not None:
            p_BKJTS *= counted_BT[:, None, None, :, None]
        return p_BKJTS.sum((2, 3))

    def _attend_selected(
        self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: SdpaPlan, indices_BKN: Tensor
    ) -> Tensor:
        """Gather, then attend: N entries are read twice and written once, which is little compared
        with S.
        """
        _, T, H, D = q_BTHD.shape
        K = k_BKSD.shape[1]
        slot_BKN1 = indices_BKN.clamp(min=0)[..., None].expand(-1, -1, -1, D)
        own_B1T1 = _own_slots(plan.seqlens_B, T)[:, None, :, None]
        slot_BK1N = indices_BKN[:, :, None]
        seen_BKTN = ~(_hidden(slot_BK1N, own_B1T1, plan.window, slot_BK1N) | (slot_BK1N < 0))
        k_BKND = k_BKSD.gather(2, slot_BKN1)
        v_BKND = v_BKSD.gather(2, slot_BKN1)
        if not self.weighting.is_plain:
            mask_BKTN = torch.zeros(seen_BKTN.shape, device=seen_BKTN.device)
            mask_BKJTN = mask_BKTN.masked_fill_(~seen_BKTN, -torch.inf)[:, :, None]
            return attend_explicitly(q_BTHD, k_BKND, v_BKND, self.weighting, mask_BKJTN)
        seen = seen_BKTN.repeat(1, 1, H // K, 1) if T > 1 else seen_BKTN  # query rows are (J, T)
        q = _fold(q_BTHD, K).flatten(2, 3)
        out = F.scaled_dot_product_attention(q, k_BKND, v_BKND, seen)
        return _unfold(out.unflatten(2, (H // K, -1)))


def weights_of(
    q_BKJTD: Tensor, k_BKSD: Tensor, weighting: Weighting, mask_BKJTS: Tensor | None
) -> Tensor:
    """Return the weights (B, K, J, T, S) of all slots, in fp32. The mask is additive."""
    scores_BKJTS = torch.einsum("bkjtd,bksd->bkjts", q_BKJTD, k_BKSD).float()
    scores_BKJTS = weighting.capped(scores_BKJTS * q_BKJTD.shape[-1] ** -0.5)
    if mask_BKJTS is not None:
        scores_BKJTS = scores_BKJTS + mask_BKJTS
    return weighting.softmax(scores_BKJTS)


def attend_explicitly(
    q_BTHD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    weighting: Weighting,
    mask_BKJTS: Tensor | None,
) -> Tensor:
    """Attend by the definition, for some of the T tokens at a time: all their scores are held."""
    (B, T, H, _), S = q_BTHD.shape, k_BKSD.shape[2]
    at_once = max(1, SCORES_AT_ONCE // (B * H * S))
    parts = []
    for start in range(0, T, at_once):
        some = slice(start, start + at_once)
        q_BKJTD = _fold(q_BTHD[:, some], k_BKSD.shape[1])
        mask = None if mask_BKJTS is None else mask_BKJTS[..., some, :]
        p_BKJTS = weights_of(q_BKJTD, k_BKSD, weighting, mask).to(v_BKSD.dtype)
        parts.append(_unfold(torch.einsum("bkjts,bksd->bkjtd", p_BKJTS, v_BKSD)))
    return torch.cat(parts, dim=1)


def attend_by_turns(q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Tensor | None) -> Tensor:
    """Attend with each KV head's query heads one after another, as if each had one query head.

    On CUDA most versions of PyTorch have no fused kernel but cuDNN's for a mask together with
    `enable_gqa` (see its sdp_utils.cpp), and what they fall back to writes all scores out.
    """
    out_BTHD = torch.empty_like(q_BTHD)
    heads = (k_BKSD.shape[1], -1)
    of_BTKJD = out_BTHD.unflatten(2, heads)
    q_BTKJD = q_BTHD.unflatten(2, heads)
    for j in range(q_BTKJD.shape[3]):
        q_BKTD = q_BTKJD[:, :, :, j].transpose(1, 2)
        of_BTKJD[:, :, :, j] = F.scaled_dot_product_attention(
            q_BKTD, k_BKSD, v_BKSD, attn_mask=mask
        ).transpose(1, 2)
    return out_BTHD


def _own_slots(seqlens_B: Tensor, num_new: int) -> Tensor:
    """Return the slots of the T new tokens (B, T)."""
    return seqlens_B.long()[:, None] - num_new + torch.arange(num_new, device=seqlens_B.device)


def _hidden(slot: Tensor, query: Tensor, window: int | None, position: Tensor) -> Tensor:
    """Return whether the token in slot `query` may not see `slot`, whose token is at `position`
    (all broadcast).
    """
    hidden = slot > query
    return hidden if window is None else hidden | (position <= query - window)


def _fold(q_BTHD: Tensor, num_kv_heads: int) -> Tensor:
    """Return queries by the KV head that they share (B, K, J, T, D)."""
    return q_BTHD.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)


def _unfold(out_BKJTD: Tensor) -> Tensor:
    """Undo `_fold`: return (B, T, H, D)."""
    return out_BKJTD.permute(0, 3, 1, 2, 4).flatten(2, 3)
