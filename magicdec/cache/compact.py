"""The compact cache that static policies share: a fixed part and a ring of recent tokens.

L layers, B rows, K KV heads, S slots, D head dim, F fixed slots, R ring slots, W tokens committed
at a time.

Of `budget` slots the first F hold what the policy has selected, the others are a ring over the
latest tokens, and slots beyond the budget hold this round's proposals, which evict nothing until
committed. Until a row outgrows its budget every token is in the slot of its position. Attention
does not depend on the order of slots, because keys carry their position. Only a sliding window
needs the position of each slot.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from magicdec.attention.base import Attention, Shape
from magicdec.cache.draft_cache import DraftCache
from magicdec.cache.full import FullCache
from magicdec.config.choices import CacheSpec
from magicdec.models.kv_cache import KVCache


class CompactCache(DraftCache):
    """`budget` committed entries a row and layer; positions are absolute."""

    per_row: ClassVar[dict[str, int]] = {**DraftCache.per_row, "shift_B": 0, "positions_LBKS": 1}

    @classmethod
    @override
    def num_slots(cls, spec: CacheSpec, shares_target: bool) -> int:
        return spec.kept + spec.gamma + 1

    @override
    def set_up(self) -> None:
        super().set_up()
        self.budget = self.spec.kept
        self.num_fixed = min(self.fixed_slots(self.budget), self.budget - 1)
        self.window = self.budget - self.num_fixed
        # The tokens by which a row has outgrown its budget: the position less the slot of a token
        # that is appended now.
        self.shift_B = torch.zeros_like(self.length_B)
        # The positions of all slots, for a sliding window; those behind the committed ones are the
        # proposals'.
        self.positions_LBKS: Tensor | None = None
        if self.config.sliding_window:
            slot_S = torch.arange(self.capacity, dtype=torch.int32, device=self.length_B.device)
            self.positions_LBKS = slot_S.repeat(*self.k_LBKSD.shape[:3], 1)

    @abstractmethod
    def fixed_slots(self, budget: int) -> int:
        """Return how many of `budget` slots the policy selects; the ring has the others."""

    @abstractmethod
    def select(self, layer: int, source: KVCache, scores_LBKS: Tensor | None) -> Tensor:
        """Return the slots of `source` that one layer keeps (B, K or 1, F), for rows that outgrow
        the budget.
        """

    @override
    def for_prefill(self, chunk: int) -> DraftCache:
        """Return a cache of everything, from which `adopt` selects."""
        return FullCache.like(self)

    @override
    def plan(self, attention: Attention, num_new: int, dtype: torch.dtype) -> list[Any]:
        """Plan a sliding window by positions, because slots are in no order."""
        if self.positions_LBKS is None:
            return super().plan(attention, num_new, dtype)
        shape = Shape(num_new, self.capacity, self.config.group_size, dtype)
        seqlens_B = self.read_B(num_new)
        # A new token's is its slot.
        positions_LBKS = self.positions_LBKS - self.shift_B[:, None, None]
        everything = attention.plan(seqlens_B, shape, None)
        plans = []
        for layer, positions_BKS in enumerate(positions_LBKS):
            window = self.config.window_of(layer)
            plans.append(
                attention.plan(seqlens_B, shape, window, positions_BKS) if window else everything
            )
        return plans

    @override
    def positions_BT(self, num_new: int) -> Tensor:
        """Return the absolute positions of the next tokens."""
        return self.slots_BT(num_new) + self.shift_B[:, None]

    @property
    @override
    def committed_slots_B(self) -> Tensor:
        """Return the committed slots: at most the budget."""
        return self.length_B.clamp(max=self.budget)

    @override
    def load(self, source: KVCache, scores_LBKS: Tensor | None = None) -> None:
        """Gather the selected entries and the window, each into the slot of its position."""
        length_B1 = source.seqlens_B.long()[:, None]
        slot_S = torch.arange(self.budget, device=length_B1.device)
        start_B1 = length_B1 - self.window
        ring_BR = start_B1 + (slot_S[self.num_fixed :] - start_B1) % self.window
        fits_B11 = (length_B1 <= self.budget)[..., None]
        # One at a time: no second copy of the whole cache.
        for layer in range(self.config.num_layers):
            selected_BKF = self.select(layer, source, scores_LBKS)
            ring_BKR = ring_BR[:, None].expand(-1, selected_BKF.shape[1], -1)
            from_BKS = torch.where(fits_B11, slot_S, torch.cat((selected_BKF, ring_BKR), dim=-1))
            from_BKS = from_BKS.clamp(0, source.capacity - 1).expand(
                -1, self.config.num_kv_heads, -1
            )
            self.keep(layer, source, from_BKS, scores_LBKS)
        self.set_length(source.seqlens_B)

    def keep(
        self, layer: int, source: KVCache, from_BKS: Tensor, scores_LBKS: Tensor | None
    ) -> None:
        """Copy one layer's entries from these slots of `source`, where they are positions, to the
        first `budget`.
        """
        from_BKSD = from_BKS[..., None].expand(-1, -1, -1, self.config.head_dim)
        self.k_LBKSD[layer][:, :, : self.budget] = source.k_LBKSD[layer].gather(2, from_BKSD)
        self.v_LBKSD[layer][:, :, : self.budget] = source.v_LBKSD[layer].gather(2, from_BKSD)
        if self.positions_LBKS is not None:
            self.positions_LBKS[layer][..., : self.budget] = from_BKS

    def ring_slots(self, position: Tensor) -> Tensor:
        """Return the slots of tokens by their positions, for tokens of the window."""
        ring = self.num_fixed + (position - self.num_fixed) % self.window
        return torch.where(position < self.num_fixed, position, ring)

    @override
    def take(self, source: KVCache, first_slot_B: Tensor, count_B: Tensor, width: int) -> None:
        self.write(source, first_slot_B, count_B, width)
        self.set_length(self.length_B + count_B)

    def write(self, source: KVCache, first_slot_B: Tensor, count_B: Tensor, width: int) -> None:
        """Copy new tokens into their slots. A long chunk writes only its last `window` tokens: the
        earlier ones are evicted by it, or are in their slots already.
        """
        latest = min(width, self.window)
        index_BW = count_B.long()[:, None] - latest + torch.arange(latest, device=count_B.device)
        position_BW = self.length_B.long()[:, None] + index_BW
        slot_BW = self.ring_slots(position_BW)
        # Slots behind the valid ones are never read.
        slot_BW = torch.where(index_BW >= 0, slot_BW, self.capacity - 1)
        from_BW = (first_slot_B.long()[:, None] + index_BW).clamp(min=0)
        for ours, theirs in ((self.k_LBKSD, source.k_LBKSD), (self.v_LBKSD, source.v_LBKSD)):
            wide(ours)[:, self._rows_B1, :, slot_BW] = wide(theirs)[:, self._rows_B1, :, from_BW]
        if self.positions_LBKS is not None:
            self.positions_LBKS[:, self._rows_B1, :, slot_BW] = position_BW[..., None, None].int()

    @override
    def set_length(self, length_B: Tensor) -> None:
        self.length_B.copy_(length_B)
        self.seqlens_B.copy_(self.committed_slots_B)
        self.shift_B.copy_(self.length_B - self.seqlens_B)
        if self.positions_LBKS is not None:
            slot_S = torch.arange(self.capacity, dtype=torch.int32, device=length_B.device)
            position_BS = slot_S + self.shift_B[:, None]
            free_BS = slot_S >= self.seqlens_B[:, None]
            self.positions_LBKS.copy_(
                torch.where(free_BS[:, None], position_BS[:, None], self.positions_LBKS)
            )


def wide(x: Tensor) -> Tensor:
    """Return the same memory as fewer numbers, of 16 bytes where they fit: indexing moves them one
    by one.
    """
    return x.view(torch.complex128) if x.shape[-1] * x.itemsize % 16 == 0 else x


class ScoredCache(CompactCache):
    """The entries with the highest scores, and recent tokens."""

    pooling: int = 1  # neighbours that a score is averaged over

    @override
    def select(self, layer: int, source: KVCache, scores_LBKS: Tensor | None) -> Tensor:
        """Select the highest pooled scores before the recent tokens; what the layer no longer sees
        comes last.
        """
        assert scores_LBKS is not None
        slot_S = torch.arange(scores_LBKS.shape[-1], device=scores_LBKS.device)
        recent_B1S = (slot_S >= source.seqlens_B[:, None] - self.window)[:, None]
        unseen_B1S = (slot_S < source.first_seen_B(layer, source.seqlens_B)[:, None])[:, None]
        scores_BKS = scores_LBKS[layer].masked_fill(recent_B1S, 0.0)
        pooled_BKS = F.avg_pool1d(scores_BKS, self.pooling, stride=1, padding=self.pooling // 2)
        worth_BKS = pooled_BKS.masked_fill(unseen_B1S, -1.0).masked_fill(recent_B1S, -2.0)
        return worth_BKS.topk(self.num_fixed, dim=-1).indices
