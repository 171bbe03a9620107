"""A view of a cache that records the attention of a forward pass, by which policies select entries.

L layers, B rows, K KV heads, S slots, T new tokens.
"""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from magicdec.attention.base import Attention
from magicdec.models.kv_cache import KVCache, Place


class ObservedCache(KVCache):
    """Another cache's entries and lengths, shared. `scores_LBKS` adds up the attention that each entry receives, over
    the query heads of a KV head and over tokens.
    """

    def __init__(self, source: KVCache, num_layers: int | None = None):
        """Record the first `num_layers` layers; None: all."""
        super().__init__(source.config, source.num_rows, 0, source.k_LBKSD.dtype, source.k_LBKSD.device)
        self.k_LBKSD, self.v_LBKSD, self.seqlens_B = source.k_LBKSD, source.v_LBKSD, source.seqlens_B
        self.scores_LBKS = torch.zeros(source.k_LBKSD[:num_layers].shape[:4], device=source.k_LBKSD.device)
        self.counted_BT: Tensor | None = None  # which of the new tokens count; None: all
        self.attention: Attention | None = None  # that was observed last

    @override
    def attend(self, layer: int, q_BTHD: Tensor, attention: Attention, plan: Any) -> Tensor:
        if layer >= len(self.scores_LBKS):
            return super().attend(layer, q_BTHD, attention, plan)
        k_BKSD, v_BKSD, self.attention = self.k_LBKSD[layer], self.v_LBKSD[layer], attention
        out_BTHD, scores_BKS = attention.attend_scored(q_BTHD, k_BKSD, v_BKSD, plan, self.counted_BT)
        self.scores_LBKS[layer][..., : scores_BKS.shape[-1]] += scores_BKS
        return out_BTHD


class ReplayedCache(ObservedCache):
    """A view for tokens whose entries are in the cache already: it has its own lengths, and nothing is written."""

    def __init__(self, source: KVCache):
        super().__init__(source)
        self.seqlens_B = source.seqlens_B.clone()

    @override
    def place(self, layer: int, slots_BT: Tensor) -> Place | None:
        """Write nothing: the entries are in place."""
        return None
