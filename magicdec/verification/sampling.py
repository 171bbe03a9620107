"""From logits to tokens: greedy, or temperature, top-k and top-p with counter-based random numbers.

B rows, T tokens, V vocabulary. A random number is a pure function of (seed, row, position, use), so that a row's
sample depends neither on its neighbours nor on the order in which anything is computed.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class Use(IntEnum):
    """What a random number decides; each use of a position has a stream of its own."""

    PROPOSE = 1
    ACCEPT = 2
    DECIDE = 3  # the target's own token: autoregressive, or the bonus of a round
    INNER_ACCEPT = 4  # the same two of a draft that verifies proposals itself
    INNER_DECIDE = 5


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. temperature 0 is greedy; top_k and top_p None keep everything."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """Whether the largest logit decides."""
        return self.temperature == 0.0


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution (..., V) in fp32 that sampling draws from: temperature, then top-k, then top-p."""
    logits = logits.float() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    p = logits.softmax(-1)
    if sampling.top_p is not None and sampling.top_p < 1.0:
        ordered, index = p.sort(dim=-1, descending=True)
        # A token stays while the mass before it is below top_p: the smallest set that reaches it.
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= sampling.top_p, 0.0)
        p = torch.zeros_like(p).scatter_(-1, index, ordered)
        p = p / p.sum(-1, keepdim=True)
    return p


def uniform_BT(seed: int, positions_BT: Tensor, use: Use) -> Tensor:
    """Uniform fp64 numbers in [0, 1), one for each row and position (int64)."""
    rows_B1 = torch.arange(positions_BT.shape[0], device=positions_BT.device)[:, None]
    key = _mix(_mix(rows_B1 + _signed(seed * 0x9E3779B97F4A7C15)) + positions_BT * 8 + int(use))
    return (_mix(key) >> 11 & (1 << 53) - 1).double() * 2.0**-53


def draw(p: Tensor, u: Tensor) -> Tensor:
    """The token (...) at which the cumulative distribution of p (..., V) first exceeds u (...) in [0, 1)."""
    cdf = p.double().cumsum(-1)
    threshold = (u * cdf[..., -1]).unsqueeze(-1)
    return torch.searchsorted(cdf, threshold, right=True).squeeze(-1).clamp(max=p.shape[-1] - 1)


def choose(logits_BTV: Tensor, positions_BT: Tensor, use: Use, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """Tokens (B, T) for the given positions, and the distribution (B, T, V) they were drawn from (greedy: None)."""
    if sampling.greedy:
        return logits_BTV.argmax(-1), None
    p_BTV = probabilities(logits_BTV, sampling)
    return draw(p_BTV, uniform_BT(sampling.seed, positions_BT, use)), p_BTV


def _signed(value: int) -> int:
    """A 64-bit pattern as Python's signed integer, which is what torch's int64 holds."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele et al. 2014) on int64, whose products wrap around."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return x ^ (x >> 31 & (1 << 33) - 1)
