"""A view of a cache that records the attention of a forward pass, by which policies select entries.

L layers, B rows, K KV heads, S slots, T new tokens.
"""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from magicdec.attention.base import Attention
from magicdec.models.kv_cache import KVCache, Place, Reads


class ObservedCache(KVCache):
    """Another cache's entries and lengths, shared. `scores_LBKS` adds up the attention that each
    entry receives, over the query heads of a KV head and over tokens.
    """

    def __init__(self, source: KVCache, num_layers: int | None = None):
        """Record the first `num_layers` layers; None: all."""
        k_LBKSD = source.k_LBKSD
        super().__init__(
            source.config, source.num_rows, 0, k_LBKSD.dtype, k_LBKSD.device, source.states
        )
        self.k_LBKSD, self.v_LBKSD = source.k_LBKSD, source.v_LBKSD
        self.seqlens_B = source.seqlens_B
        self.scores_LBKS = torch.zeros(
            source.k_LBKSD[:num_layers].shape[:4], device=source.k_LBKSD.device
        )
        self.counted_BT: Tensor | None = None  # which of the new tokens count; None: all
        self.attention: Attention | None = None  # that was observed last
        self._is_clear = True

    def clear(self) -> None:
        """Forget what was observed."""
        self.scores_LBKS.zero_()
        self._is_clear = True

    @override
    def plan(self, attention: Attention, num_new: int, dtype: torch.dtype) -> list[Any]:
        self.attention = attention
        return super().plan(attention, num_new, dtype)

    @override
    def advance(self, num_new: int) -> None:
        super().advance(num_new)
        self._is_clear = False

    @override
    def reads(self, layer: int) -> Reads | None:
        """Let a pass over all tokens write the scores, if there are none yet to add to."""
        if not self._is_clear or self.counted_BT is not None:
            return None
        return Reads(scores_BKS=self.scores_LBKS[layer] if layer < len(self.scores_LBKS) else None)

    @override
    def attend(self, layer: int, q_BTHD: Tensor, attention: Attention, plan: Any) -> Tensor:
        if layer >= len(self.scores_LBKS):
            return super().attend(layer, q_BTHD, attention, plan)
        entries = self.k_LBKSD[layer], self.v_LBKSD[layer]
        scores_BKS = self.scores_LBKS[layer]
        return attention.attend_observed(q_BTHD, *entries, plan, scores_BKS, self.counted_BT)


class ReplayedCache(ObservedCache):
    """A view for tokens whose entries are in the cache already: it has its own lengths, and nothing
    is written.
    """

    def __init__(self, source: KVCache):
        super().__init__(source)
        self.seqlens_B = source.seqlens_B.clone()

    @override
    def place(self, layer: int, slots_BT: Tensor) -> Place | None:
        """Write nothing: the entries are in place."""
        return None

    @override
    def reads(self, layer: int) -> Reads | None:
        """Return None: a pass in one call would write."""
        return None
