"""Decide which proposals are accepted, and choose the target's own token that ends the round.

B rows, G = gamma proposals, T = G + 1 target distributions (the last one follows the last
proposal), V vocabulary. Pure functions on tensors, without models and caches.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from magicdec.verification.sampling import (
    RowSampling,
    Sampling,
    Use,
    draw,
    probabilities,
    uniform_BT,
)


class Verdict(NamedTuple):
    """`num_accepted_B` proposals hold; `tokens_BT` starts with them, then the bonus token (the rest
    is unused).
    """

    num_accepted_B: Tensor
    tokens_BT: Tensor


def accept_greedy(proposed_BG: Tensor, logits_BTV: Tensor) -> Verdict:
    """Accept proposals as long as each is the target's argmax. Lossless for greedy decoding."""
    best_BT = logits_BTV.argmax(-1)
    num_accepted_B = _leading(proposed_BG == best_BT[:, :-1])
    return Verdict(
        num_accepted_B, _with_bonus(proposed_BG, num_accepted_B, _at(best_BT, num_accepted_B))
    )


def accept_sampled(
    proposed_BG: Tensor,
    q_BGV: Tensor | None,
    logits_BTV: Tensor,
    places_BT: Tensor,
    sampling: Sampling | RowSampling,
    accept: Use = Use.ACCEPT,
    decide: Use = Use.DECIDE,
) -> Verdict:
    """Accept by rejection sampling (Leviathan et al. 2023; Chen et al. 2023), which keeps the
    target's distribution.

    `q_BGV` is what the proposals were drawn from, after temperature and truncation; None means
    one-hot, a draft that does not sample. `places_BT` are those of the T tokens, in the sequence
    or in a round. With `accept` and `decide` they name the random numbers.
    """
    p_BTV = probabilities(logits_BTV, sampling)
    if q_BGV is None:
        q_BGV = torch.zeros_like(p_BTV[:, :-1]).scatter_(-1, proposed_BG[..., None], 1.0)
    u_BG = uniform_BT(sampling, places_BT, accept)[:, :-1]
    p_BG = p_BTV[:, :-1].gather(-1, proposed_BG[..., None]).squeeze(-1)
    q_BG = q_BGV.gather(-1, proposed_BG[..., None]).squeeze(-1)
    num_accepted_B = _leading(u_BG * q_BG < p_BG)
    p_BV = _at(p_BTV, num_accepted_B)
    q_BV = _at(torch.cat((q_BGV, torch.zeros_like(p_BTV[:, :1])), dim=1), num_accepted_B)
    residual_BV = (p_BV - q_BV).clamp(min=0.0)
    residual_BV = torch.where(residual_BV.sum(-1, keepdim=True) > 0, residual_BV, p_BV)
    u_B = _at(uniform_BT(sampling, places_BT, decide), num_accepted_B)
    return Verdict(num_accepted_B, _with_bonus(proposed_BG, num_accepted_B, draw(residual_BV, u_B)))


def accept_synthetic(
    proposed_BG: Tensor,
    logits_BTV: Tensor,
    places_BT: Tensor,
    alpha_G: Tensor,
    sampling: Sampling | RowSampling,
) -> Verdict:
    """Draw the outcome instead: each proposal holds with its probability in `alpha_G`, given that
    all before it did.

    For timing without a trained draft; the bonus is the target's argmax.
    """
    num_accepted_B = _leading(uniform_BT(sampling, places_BT, Use.ACCEPT)[:, :-1] < alpha_G)
    best_BT = logits_BTV.argmax(-1)
    return Verdict(
        num_accepted_B, _with_bonus(proposed_BG, num_accepted_B, _at(best_BT, num_accepted_B))
    )


def _leading(holds_BG: Tensor) -> Tensor:
    """Return how many entries at the start of each row are true (int32)."""
    return holds_BG.int().cumprod(1).sum(1, dtype=torch.int32)


def _at(x: Tensor, index_B: Tensor) -> Tensor:
    """Return x[b, index[b]] for every row."""
    return x[torch.arange(x.shape[0], device=x.device), index_B.long()]


def _with_bonus(proposed_BG: Tensor, num_accepted_B: Tensor, bonus_B: Tensor) -> Tensor:
    padded_BT = torch.cat((proposed_BG, bonus_B[:, None]), dim=1)
    return padded_BT.scatter(1, num_accepted_B.long()[:, None], bonus_B[:, None])
