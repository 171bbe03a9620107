"""The one interface of attention over a KV cache. To add a backend, subclass Attention
(docs/attention.md).

B rows, T query tokens, S cached tokens, H query heads, K KV heads, J = H / K heads that share a KV
head, D head dim, P pages, N selected slots.

A backend is used in two steps because what depends on lengths alone is the same for every layer:
`plan` once per forward pass, `attend` once per layer.
"""

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from magicdec.attention.codes import Coded

AttentionPlan = TypeVar("AttentionPlan")
# Tokens that are scored at a time: the most that the C++ kernel takes. More take several times as
# long on a CPU.
MAX_SCORED = 32
SCORES_AT_ONCE = 1 << 26  # that are written out, in fp32


@dataclass(frozen=True)
class Shape:
    """The static facts of a forward pass: T new tokens, S cache slots, J query heads per KV head,
    and the dtype.
    """

    num_new: int
    capacity: int
    group_size: int
    dtype: torch.dtype


class Weighting(NamedTuple):
    """The steps from a layer's scores to its weights, beyond the softmax.

    A sink is a logit of a query head that takes its share of the softmax and adds nothing, as in
    gpt-oss. A soft cap c replaces a score s by c tanh(s / c), as in Gemma 2.
    """

    sinks_H: Tensor | None = None
    softcap: float | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether the softmax is all."""
        return self.sinks_H is None and self.softcap is None

    def capped(self, scores: Tensor) -> Tensor:
        """Return scores under the soft cap, before anything is hidden."""
        return scores if self.softcap is None else self.softcap * (scores / self.softcap).tanh()

    def softmax(self, scores_BKJTS: Tensor) -> Tensor:
        """Return the weights that capped scores give to slots."""
        if self.sinks_H is None:
            return scores_BKJTS.softmax(-1)
        of_heads = self.sinks_H.to(scores_BKJTS.dtype).view(*scores_BKJTS.shape[1:3], 1, 1)
        sinks = of_heads.expand(*scores_BKJTS.shape[:-1], 1)
        return torch.cat((scores_BKJTS, sinks), dim=-1).softmax(-1)[..., :-1]


PLAIN = Weighting()


@dataclass(frozen=True)
class PageBounds:
    """The least and the largest value of each feature of pages of `size` keys each."""

    least_BKPD: Tensor
    largest_BKPD: Tensor
    size: int


class Attention(ABC, Generic[AttentionPlan]):
    """Attention of T new tokens over a cache whose last T valid entries are these tokens
    themselves.
    """

    # Whether `weighting` is read; otherwise a model that needs one cannot use the backend.
    takes_weighting: ClassVar[bool] = False
    # The most KV heads of all rows together that a pass can have; None: any number.
    most_heads: ClassVar[int | None] = None
    weighting: Weighting = PLAIN

    def weighted(self, weighting: Weighting) -> Self:
        """Return the same backend for a layer with this weighting. Plans of one suit the other."""
        if weighting.is_plain and self.weighting.is_plain:
            return self
        other = copy(self)
        other.weighting = weighting
        return other

    @classmethod
    def obstacle(cls, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return why it cannot be used, as the words that follow its name in a sentence; None if it
        can.
        """
        return None

    @classmethod
    def version(cls) -> str:
        """Return which version of its library was found, and why not a better one; empty without a
        library.
        """
        return ""

    def scored_tokens(self, scores_per_token: int, dtype: torch.dtype, head_dim: int) -> int:
        """Return how many tokens of each row a scoring pass takes at most. A token of all rows has
        so many scores, in fp32.
        """
        return min(MAX_SCORED, max(1, SCORES_AT_ONCE // scores_per_token))

    @abstractmethod
    def plan(
        self,
        seqlens_B: Tensor,
        shape: Shape,
        window: int | None,
        positions_BKS: Tensor | None = None,
    ) -> AttentionPlan:
        """Prepare a forward pass. `seqlens_B` (int32) counts each row's valid entries, the T new
        ones included; with `window`, a token sees only the last `window` tokens, itself included.

        Slots are in the order of their tokens, unless `positions_BKS` (int32) has the position of
        each for a window. A new token's position is its slot. `positions_BKS` needs a window, and
        cannot be combined with selected slots.
        """

    @abstractmethod
    def attend(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: AttentionPlan,
        indices_BKN: Tensor | None = None,
    ) -> Tensor:
        """Return softmax attention (B, T, H, D) with scale 1/sqrt(D) and `weighting`, causal among
        the T new tokens.

        With `indices_BKN` (int64) each KV head reads only these slots: distinct, in any order, the
        new tokens' own among them. Slots that a token may not see, and negative ones, are ignored.
        """

    def attend_coded(
        self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: AttentionPlan, coded: Coded
    ) -> Tensor:
        """Return attention as `attend` does, over codes before the exact entries. Decode them
        first, unless a backend reads codes itself.
        """
        return self.attend(q_BTHD, *coded.mixed(k_BKSD, v_BKSD), plan)

    @abstractmethod
    def attend_scored(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: AttentionPlan,
        counted_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return attention over all slots, and what each slot received: (B, K, S') in fp32, where
        S' <= S covers all valid slots, summed over the J query heads of a KV head and over the new
        tokens, or those that `counted_BT` (bool) names. The scores that a token adds to all slots
        sum up to J.
        """

    def attend_observed(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: AttentionPlan,
        scores_BKS: Tensor,
    ) -> Tensor:
        """Return attention over all slots, and write to `scores_BKS` what each slot received from
        the first and the last new token, as `attend_scored` sums it.
        """
        num_rows, num_new, *_ = q_BTHD.shape
        counted_BT = ends(num_rows, num_new, q_BTHD.device)
        out_BTHD, received_BKS = self.attend_scored(q_BTHD, k_BKSD, v_BKSD, plan, counted_BT)
        num_slots = received_BKS.shape[-1]
        scores_BKS[..., :num_slots] = received_BKS
        scores_BKS[..., num_slots:] = 0.0
        return out_BTHD

    def score_keys(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        plan: AttentionPlan,
        counted_BT: Tensor | None = None,
    ) -> Tensor:
        """Return what each slot receives, as `attend_scored` does, without the output: a backend
        may leave values unread.
        """
        return self.attend_scored(q_BTHD, k_BKSD, k_BKSD, plan, counted_BT)[1]

    def page_shares(
        self,
        q_BTHD: Tensor,
        least_BKPD: Tensor,
        largest_BKPD: Tensor,
        first_B: Tensor,
        last_B: Tensor,
    ) -> Tensor:
        """Return a bound on the attention to pages of keys, given the least and the largest value
        of each feature.

        (B, K, P) in fp32: the softmax over the bounds of the pages from `first_B` up to `last_B`
        (int32 or int64), summed over the query heads of a KV head and over tokens; 0 for other
        pages.
        """
        q_BKJTD = q_BTHD.unflatten(2, (least_BKPD.shape[1], -1)).permute(0, 2, 3, 1, 4)
        q_BKQD = q_BKJTD.flatten(2, 3)
        bound_BKQP = q_BKQD.clamp(min=0) @ largest_BKPD.mT + q_BKQD.clamp(max=0) @ least_BKPD.mT
        other_B111P = ~is_within(first_B, last_B, least_BKPD.shape[2])[:, None, None, None]
        scores_BKQP = self.weighting.capped(bound_BKQP.float() / q_BTHD.shape[-1] ** 0.5)
        scores_BKJTP = scores_BKQP.unflatten(2, q_BKJTD.shape[2:4])
        weights_BKJTP = self.weighting.softmax(scores_BKJTP.masked_fill(other_B111P, -torch.inf))
        return weights_BKJTP.masked_fill(other_B111P, 0.0).sum((2, 3))

    def select_largest(self, scores: Tensor, first: Tensor, last: Tensor, count: int) -> Tensor:
        """Return the slots (..., N) of the `count` largest scores (..., S) from `first` up to
        `last`, in any order.

        Scores are in fp32 and not negative. `first` and `last` (int32 or int64) are broadcast to
        their leading dimensions. Where there are fewer than N = min(count, S), the rest is -1.
        """
        return select_largest(scores, first, last, count)

    def select_slots(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: AttentionPlan,
        length_B: Tensor,
        count: int,
    ) -> Tensor:
        """Return the `count` slots of each KV head (B, K, N) before `length_B` that receive most
        attention, as `attend_scored` sums it.
        """
        _, scores_BKS = self.attend_scored(q_BTHD, k_BKSD, v_BKSD, plan)
        length_B1 = length_B.long()[:, None]
        return self.select_largest(scores_BKS, torch.zeros_like(length_B1), length_B1, count)

    def select_pages(
        self, q_BTHD: Tensor, bounds: PageBounds, first_B: Tensor, length_B: Tensor, count: int
    ) -> Tensor:
        """Return the slots (B, K, N) of `count` pages from `first_B` up to `length_B`: the last
        page, and others by a bound on the attention to them, as `page_shares` sums it.

        Slots of these pages that lie outside are -1. So is the rest where there are fewer pages.
        """
        first_B1 = first_B[:, None]
        size = bounds.size
        first_page_B1 = first_B1 // size
        last_page_B1 = (length_B[:, None] - 1) // size
        share_BKP = self.page_shares(
            q_BTHD,
            bounds.least_BKPD,
            bounds.largest_BKPD,
            first_page_B1[:, 0],
            last_page_B1[:, 0] + 1,
        )
        older_BKN = self.select_largest(share_BKP, first_page_B1, last_page_B1, count - 1)
        last_BK1 = last_page_B1[..., None].expand(-1, older_BKN.shape[1], -1)
        page_BKN = torch.cat((older_BKN, last_BK1), dim=-1)
        entry_E = torch.arange(size, device=q_BTHD.device)
        # Negative where there is no page.
        slot_BKN = (page_BKN[..., None] * size + entry_E).flatten(2)
        read_BKN = (slot_BKN < length_B[:, None, None]) & (slot_BKN >= first_B1[..., None])
        return slot_BKN.masked_fill(~read_BKN, -1)


def select_largest(scores: Tensor, first: Tensor, last: Tensor, count: int) -> Tensor:
    """Select as Attention.select_largest does. Without a sign the bits of fp32 numbers order as
    they do, and PyTorch compares integers in less time.
    """
    bits = scores.view(torch.int32).masked_fill(~is_within(first, last, scores.shape[-1]), -1)
    top = bits.topk(min(count, bits.shape[-1]), dim=-1, sorted=False)
    return top.indices.masked_fill(top.values < 0, -1)


def ends(num_rows: int, num_new: int, device: torch.device) -> Tensor:
    """Return the first and the last of the new tokens of each row (bool, (B, T))."""
    index_T = torch.arange(num_new, device=device)
    return ((index_T == 0) | (index_T == num_new - 1)).repeat(num_rows, 1)


def is_within(first: Tensor, last: Tensor, size: int) -> Tensor:
    """Return for each of `size` places whether it lies in [first, last)."""
    place = torch.arange(size, device=last.device)
    return (place >= first[..., None]) & (place < last[..., None])
