"""From logits to tokens: greedy, or temperature, top-k and top-p with counter-based random numbers.

B rows, T tokens, V vocabulary. A random number is a pure function of (seed, sequence, place, use).
A sequence is counted through the whole run, so that its sample depends neither on its batch nor on
the order of computation. The place is a position in the sequence, or for drafts one in a round
(`State.places_in_round_BT`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

import torch
from torch import Tensor

from magicdec.config.groups import SamplingConfig
from magicdec.kernels.toolchain import triton_obstacle

EVERYTHING = 1 << 31  # a top_k beyond any vocabulary
BLOCK = 256  # tokens of a large vocabulary that are drawn from together
ONCE = 4096  # tokens that are summed up at once
FEW, SHARE = 256, 64  # most nuclei fit into so many tokens, and into this part of the vocabulary
LARGEST = 1 - 2.0**-53  # double below 1
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: SplitMix64's stride between seeds


class Use(IntEnum):
    """The decision that a random number makes; each use of a place has a stream of its own."""

    PROPOSE = 1
    ACCEPT = 2
    DECIDE = 3  # the target's own token: autoregressive, or the bonus of a round
    INNER_ACCEPT = 4  # the same two of a draft that verifies proposals itself
    INNER_DECIDE = 5
    KEEP = 6  # an entry that cache=random keeps


@dataclass(frozen=True)
class Sampling(SamplingConfig):
    """The group `sampling`, for one batch: `sequence` is the index in the run of row 0's sequence.
    Rows count up.
    """

    sequence: int = 0

    @classmethod
    def of(cls, group: SamplingConfig, sequence: int) -> "Sampling":
        """Return the group for a batch that begins with this sequence of the run."""
        return cls(**{**vars(group), "sequence": sequence})

    @property
    def key(self) -> int:
        """Name the random numbers of row 0's sequence: a whole number of 64 bits. Other rows count
        up from it.
        """
        return _signed(self.seed * GOLDEN + self.sequence)


class RowSampling:
    """Settings of each row, in tensors that stay where they are when a row changes hands.

    `greedy` is the caller's word that all rows are, which saves sorting the vocabulary; otherwise a
    greedy row draws from its likeliest token alone. A row draws what row 0 of a batch draws with
    the same `Sampling`, in any slot.
    """

    def __init__(self, num_rows: int, device: torch.device | str):
        shape = (num_rows, 1, 1)
        self.greedy = True
        # On the host: what names the row's random numbers; None where the row draws none.
        self.keys: list[int | None] = [None] * num_rows
        self.temperature = torch.ones(shape, device=device)
        self.top_k = torch.ones(shape, dtype=torch.int64, device=device)
        self.top_p = torch.ones(shape, device=device)
        self.key = torch.zeros(num_rows, 1, dtype=torch.int64, device=device)

    def set_row(self, row: int, sampling: Sampling) -> None:
        """Set how a row is sampled from now on."""
        top_k = sampling.top_k or EVERYTHING
        top_p = sampling.top_p or 1.0
        if sampling.greedy:
            top_k, top_p = 1, 1e-30  # the first of equally large logits
        self.temperature[row] = sampling.temperature or 1.0
        self.top_k[row] = top_k
        self.top_p[row] = top_p if top_p < 1.0 else float("inf")
        self.key[row] = sampling.key
        self.keys[row] = None if sampling.greedy else sampling.key


def probabilities(logits: Tensor, sampling: Sampling | RowSampling) -> Tensor:
    """Return the distribution (..., V) in fp32 that sampling draws from: temperature, then top-k,
    then top-p.

    Top-k keeps every token that is as likely as the k-th. For top-p, tokens are ordered by
    probability, equal ones by their number; a token stays while the mass before it is below top_p:
    the smallest set that reaches it.
    """
    top_k, top_p = sampling.top_k, sampling.top_p
    if logits.is_cuda and not (top_k is None and top_p is None) and (kernels := _kernels()):
        return kernels.truncated(logits, sampling.temperature, top_k, top_p)
    logits = logits.float() / sampling.temperature
    likeliest = None
    if top_k is not None:
        least, likeliest = _top_k(logits, top_k)
        logits = logits.masked_fill(logits < least, float("-inf"))
    p = logits.softmax(-1)
    if top_p is not None:
        p = p.masked_fill(~_nucleus(p, top_p, likeliest), 0.0)
        p = p / p.sum(-1, keepdim=True)
    return p


def _top_k(logits: Tensor, top_k: int | Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the k-th largest logit of each row (..., 1), and which tokens (..., k) come first if k
    is the same for all rows. A k beyond the vocabulary keeps everything.
    """
    V = logits.shape[-1]
    if isinstance(top_k, int):
        ordered, likeliest = logits.topk(min(top_k, V))
        return ordered[..., -1:], likeliest
    count = int(top_k.masked_fill(top_k >= V, 1).max()) if _host_may_look(logits) else V
    least = logits.topk(count).values.gather(
        -1, (top_k.clamp(max=count) - 1).expand(*logits.shape[:-1], 1)
    )
    return least.masked_fill(top_k >= V, float("-inf")), None


def _nucleus(p: Tensor, top_p: float | Tensor, likeliest: Tensor | None) -> Tensor:
    """Return which tokens (..., V) top-p keeps. No others are likelier than those that `likeliest`
    names.
    """
    for ordered in _likeliest_first(p, likeliest):
        cdf = ordered.cumsum(-1)
        if ordered.shape == p.shape or ((cdf[..., -1:] >= top_p) | (top_p >= 1)).all():
            break
    stays = cdf - ordered < top_p
    last = (stays.sum(-1, keepdim=True) - 1).clamp(min=0)  # none stays where p is NaN
    least = ordered.gather(-1, last)
    ties = p == least
    num_ties = (stays & (ordered == least)).sum(-1, keepdim=True)
    return (p > least) | ties & (ties.cumsum(-1, dtype=torch.int32) <= num_ties) | (top_p >= 1)


def _host_may_look(values: Tensor) -> bool:
    """Return whether the host may read values: a GPU must not wait for it, and a fake tensor has
    none.
    """
    return values.device.type == "cpu"


def _likeliest_first(p: Tensor, likeliest: Tensor | None) -> Iterator[Tensor]:
    """Yield the largest probabilities of each row, sorted. Yield more and more where the host may
    check them.
    """
    if _host_may_look(p):
        if likeliest is not None:
            yield p.gather(-1, likeliest)
        elif p.shape[-1] > 2 * (few := max(FEW, p.shape[-1] // SHARE)):
            yield p.topk(few).values
    yield p.sort(dim=-1, descending=True).values


@cache
def _kernels() -> Any:
    """Return the module of kernels that do the same on GPUs; None where Triton cannot be used."""
    if triton_obstacle():
        return None
    from magicdec.kernels import triton_sampling  # here, because Triton may not be installed

    return triton_sampling


def uniform_BT(sampling: Sampling | RowSampling, places_BT: Tensor, use: Use) -> Tensor:
    """Return uniform fp64 numbers in [0, 1), one for each row and place (int64)."""
    key = sampling.key
    if places_BT.is_cuda and (kernels := _kernels()):
        return kernels.uniform(key, places_BT, int(use))
    key_B1 = (
        key
        if isinstance(key, Tensor)
        else key + torch.arange(len(places_BT), device=places_BT.device)[:, None]
    )
    bits_BT = _mix(_mix(_mix(key_B1) + places_BT * 8 + int(use)))
    return (bits_BT >> 11 & (1 << 53) - 1).double() * 2.0**-53


def draw(p: Tensor, u: Tensor) -> Tensor:
    """Return the token (...) at which the cumulative distribution of p (..., V) first exceeds u
    (...) in [0, 1).

    A large vocabulary is read once: first a block of tokens is drawn, then a token of the block.
    """
    V = p.shape[-1]
    if V <= ONCE:
        return _draw(p, u)[0]
    whole = V // BLOCK * BLOCK
    sums = torch.cat(
        (p[..., :whole].unflatten(-1, (-1, BLOCK)).sum(-1), p[..., whole:].sum(-1, keepdim=True)),
        dim=-1,
    )
    block, u = _draw(sums, u)
    tokens = block[..., None] * BLOCK + torch.arange(BLOCK, device=p.device)
    p = p.gather(-1, tokens.clamp(max=V - 1)).masked_fill(tokens >= V, 0.0)
    return (tokens[..., 0] + _draw(p, u)[0]).clamp(max=V - 1)  # also where p is NaN


def _draw(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the cumulative sum of weights (..., N) first exceeds u of the total, and how far
    u is into that weight, in [0, 1). Sums are in fp64.
    """
    cdf = weights.double().cumsum(-1)
    threshold = u[..., None] * cdf[..., -1:]
    index = torch.searchsorted(cdf, threshold, right=True).clamp(max=weights.shape[-1] - 1)
    left = (cdf.gather(-1, index) - threshold) / weights.gather(-1, index)
    return index.squeeze(-1), (1 - left).clamp(0.0, LARGEST).squeeze(-1)


def choose(
    logits_BTV: Tensor, places_BT: Tensor, use: Use, sampling: Sampling | RowSampling
) -> tuple[Tensor, Tensor | None]:
    """Return tokens (B, T), drawn with the numbers of these places, and the distribution (B, T, V)
    they are drawn from, if any.
    """
    if sampling.greedy:
        return logits_BTV.argmax(-1), None
    p_BTV = probabilities(logits_BTV, sampling)
    return draw(p_BTV, uniform_BT(sampling, places_BT, use)), p_BTV


def _signed(value: int) -> int:
    """Return a 64-bit pattern as Python's signed integer, which is what torch's int64 holds."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _mix(x: Tensor) -> Tensor:
    """Return the finaliser of SplitMix64 (Steele et al. 2014) on int64, whose products wrap
    around.
    """
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return x ^ (x >> 31 & (1 << 33) - 1)
