"""From logits to tokens: greedy, or temperature, top-k and top-p with counter-based random numbers.

B rows, T tokens, V vocabulary. A random number is a pure function of (seed, sequence, position, use): a sequence is
counted through the whole run, so that its sample depends neither on its batch nor on the order of computation.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

EVERYTHING = 1 << 31  # a top_k beyond any vocabulary
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: SplitMix64's stride between seeds


class Use(IntEnum):
    """What a random number decides; each use of a position has a stream of its own."""

    PROPOSE = 1
    ACCEPT = 2
    DECIDE = 3  # the target's own token: autoregressive, or the bonus of a round
    INNER_ACCEPT = 4  # the same two of a draft that verifies proposals itself
    INNER_DECIDE = 5


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. temperature 0 is greedy; top_k and top_p None keep everything.

    `sequence` is the index in the run of row 0's sequence; the other rows count up from it.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    sequence: int = 0

    @property
    def greedy(self) -> bool:
        """Whether the largest logit decides."""
        return self.temperature == 0.0

    @property
    def key(self) -> int:
        """Name the random numbers of row 0's sequence: a whole number of 64 bits."""
        return _signed(self.seed * GOLDEN + self.sequence)

    def keys_B1(self, positions_BT: Tensor) -> Tensor:
        """Return the key of every row."""
        return self.key + torch.arange(positions_BT.shape[0], device=positions_BT.device)[:, None]


class RowSampling:
    """Settings of each row, in tensors that stay where they are when a row changes hands.

    `greedy` is the caller's word that all rows are, which saves sorting the vocabulary; otherwise a greedy row draws
    from its likeliest token alone. A row draws what row 0 of a batch draws with the same `Sampling`, in any slot.
    """

    def __init__(self, num_rows: int, device: torch.device | str):
        shape = (num_rows, 1, 1)
        self.greedy = True
        self.temperature = torch.ones(shape, device=device)
        self.top_k = torch.ones(shape, dtype=torch.int64, device=device)
        self.top_p = torch.ones(shape, device=device)
        self._key_B1 = torch.zeros(num_rows, 1, dtype=torch.int64, device=device)

    def keys_B1(self, positions_BT: Tensor) -> Tensor:
        """See Sampling.keys_B1."""
        return self._key_B1

    def set_row(self, row: int, sampling: Sampling) -> None:
        """From now on a row is sampled so."""
        top_k, top_p = sampling.top_k or EVERYTHING, sampling.top_p or 1.0
        if sampling.greedy:
            top_k, top_p = 1, 1e-30  # of equally large logits, the first alone
        self.temperature[row] = sampling.temperature or 1.0
        self.top_k[row] = top_k
        self.top_p[row] = top_p if top_p < 1.0 else float("inf")
        self._key_B1[row] = sampling.key


def probabilities(logits: Tensor, sampling: Sampling | RowSampling) -> Tensor:
    """The distribution (..., V) in fp32 that sampling draws from: temperature, then top-k, then top-p."""
    logits = logits.float() / sampling.temperature
    if isinstance(sampling.top_k, Tensor):
        ordered = logits.sort(dim=-1, descending=True).values
        last = sampling.top_k.clamp(max=logits.shape[-1]) - 1
        least = ordered.gather(-1, last.expand(*logits.shape[:-1], 1))
        logits = logits.masked_fill(logits < least, float("-inf"))
    elif sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    p = logits.softmax(-1)
    if isinstance(sampling.top_p, Tensor) or (sampling.top_p is not None and sampling.top_p < 1.0):
        # Stable: of equal ones the first stays, as for argmax.
        ordered, index = p.sort(dim=-1, descending=True, stable=True)
        # A token stays while the mass before it is below top_p: the smallest set that reaches it.
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= sampling.top_p, 0.0)
        p = torch.zeros_like(p).scatter_(-1, index, ordered)
        p = p / p.sum(-1, keepdim=True)
    return p


def uniform_BT(sampling: Sampling | RowSampling, positions_BT: Tensor, use: Use) -> Tensor:
    """Return uniform fp64 numbers in [0, 1), one for each row and position (int64)."""
    key = _mix(_mix(sampling.keys_B1(positions_BT)) + positions_BT * 8 + int(use))
    return (_mix(key) >> 11 & (1 << 53) - 1).double() * 2.0**-53


def draw(p: Tensor, u: Tensor) -> Tensor:
    """The token (...) at which the cumulative distribution of p (..., V) first exceeds u (...) in [0, 1)."""
    cdf = p.double().cumsum(-1)
    threshold = (u * cdf[..., -1]).unsqueeze(-1)
    return torch.searchsorted(cdf, threshold, right=True).squeeze(-1).clamp(max=p.shape[-1] - 1)


def choose(
    logits_BTV: Tensor, positions_BT: Tensor, use: Use, sampling: Sampling | RowSampling
) -> tuple[Tensor, Tensor | None]:
    """Tokens (B, T) for the given positions, and the distribution (B, T, V) they were drawn from (greedy: None)."""
    if sampling.greedy:
        return logits_BTV.argmax(-1), None
    p_BTV = probabilities(logits_BTV, sampling)
    return draw(p_BTV, uniform_BT(sampling, positions_BT, use)), p_BTV


def _signed(value: int) -> int:
    """A 64-bit pattern as Python's signed integer, which is what torch's int64 holds."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele et al. 2014) on int64, whose products wrap around."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return x ^ (x >> 31 & (1 << 33) - 1)
