"""Attention by its definition, to compare backends with on the machine that they run on.

Shapes as in base.py.
"""

import torch
from torch import Tensor

from magicdec.attention.base import Attention, Shape

HEAD_DIM, KV_HEADS, GROUP, CONTEXT = 128, 2, 4, 2048
NEW_TOKENS = (1, 5, 64)  # decode, verify, a chunk of a prefill
WINDOW = 512
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def max_error(backend: Attention, device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest difference from softmax attention: decode, verify and prefill, each over
    all slots, within a window, over selected slots (all of them, out of order), and with scores.
    """
    errors = []
    for num_new in NEW_TOKENS:
        generator = torch.Generator().manual_seed(num_new)
        q_BTHD = torch.randn(3, num_new, KV_HEADS * GROUP, HEAD_DIM, generator=generator)
        k_BKSD, v_BKSD = torch.randn(2, 3, KV_HEADS, CONTEXT + 16, HEAD_DIM, generator=generator)
        indices_BKN = (
            torch.randperm(CONTEXT + 16, generator=generator).expand(3, KV_HEADS, -1).to(device)
        )
        q = q_BTHD.to(device, dtype)
        k = k_BKSD.to(device, dtype)
        v = v_BKSD.to(device, dtype)
        seqlens_B = torch.tensor([num_new, CONTEXT // 2, CONTEXT], dtype=torch.int32, device=device)
        shape = Shape(num_new, k.shape[2], GROUP, dtype)
        plan = backend.plan(seqlens_B, shape, None)
        windowed = backend.plan(seqlens_B, shape, WINDOW)
        right, scores_BKS = softmax_attention(q, k, v, seqlens_B)
        scored, received_BKS = backend.attend_scored(q, k, v, plan)
        pairs = [
            (backend.attend(q, k, v, plan), right),
            (backend.attend(q, k, v, plan, indices_BKN), right),
            (scored, right),
            (received_BKS, scores_BKS[..., : received_BKS.shape[-1]]),
            (backend.attend(q, k, v, windowed), softmax_attention(q, k, v, seqlens_B, WINDOW)[0]),
        ]
        errors += [(ours.float() - theirs).abs().max() for ours, theirs in pairs]
    return float(torch.stack(errors).max())  # NaN if there is one


def softmax_attention(
    q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, seqlens_B: Tensor, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention in fp32 by its definition, and the weights that each slot receives (B, K,
    S).
    """
    T = q_BTHD.shape[1]
    S = k_BKSD.shape[2]
    q_BKJTD = q_BTHD.float().transpose(1, 2).unflatten(1, (k_BKSD.shape[1], -1))
    own_BT1 = (seqlens_B[:, None] - T + torch.arange(T, device=seqlens_B.device))[..., None]
    slot_S = torch.arange(S, device=seqlens_B.device)
    hidden_BTS = (slot_S > own_BT1) | (slot_S <= own_BT1 - (window or S))
    scores_BKJTS = q_BKJTD @ k_BKSD.float()[:, :, None].mT * q_BTHD.shape[-1] ** -0.5
    weights_BKJTS = scores_BKJTS.masked_fill(hidden_BTS[:, None, None], float("-inf")).softmax(-1)
    out_BKJTD = weights_BKJTS @ v_BKSD.float()[:, :, None]
    return out_BKJTD.flatten(1, 2).transpose(1, 2), weights_BKJTS.sum((2, 3))
