"""Views of a cache that record the attention of a forward pass, by which policies select entries.

L layers, B rows, K KV heads, S slots, T new tokens.
"""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from magicdec.attention.base import Attention, ends
from magicdec.models.kv_cache import KVCache, Place, Reads


class ObservedCache(KVCache):
    """Another cache's entries and lengths, shared. `scores_LBKS` has the attention that each entry
    received in the last pass from its first and its last token, summed over the query heads of a KV
    head.
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
            source.k_LBKSD[:num_layers].shape[:4],
            dtype=torch.float32,
            device=source.k_LBKSD.device,
        )
        self.attention: Attention | None = None  # that was observed last
        self._ends_BT = ends(self.num_rows, 1, source.k_LBKSD.device)

    @override
    def plan(self, attention: Attention, num_new: int, dtype: torch.dtype) -> list[Any]:
        self.attention = attention
        if self._ends_BT.shape[1] != num_new:
            self._ends_BT = ends(self.num_rows, num_new, self._ends_BT.device)
        return super().plan(attention, num_new, dtype)

    @override
    def reads(self, layer: int) -> Reads | None:
        """Let a pass over all layers write the scores."""
        if layer >= len(self.scores_LBKS):
            return Reads()
        return Reads(scores_BKS=self.scores_LBKS[layer], counted_BT=self._ends_BT)

    @override
    def attend(self, layer: int, q_BTHD: Tensor, attention: Attention, plan: Any) -> Tensor:
        if layer >= len(self.scores_LBKS):
            return super().attend(layer, q_BTHD, attention, plan)
        entries = self.k_LBKSD[layer], self.v_LBKSD[layer]
        return attention.attend_observed(q_BTHD, *entries, plan, self.scores_LBKS[layer])


class ReplayedCache(ObservedCache):
    """A view for tokens whose entries are in the cache already: it has its own lengths, and nothing
    is written. `scores_LBKS` adds up the attention of all passes, from all tokens that count.
    """

    def __init__(self, source: KVCache):
        super().__init__(source)
        self.states = None  # nothing here runs recurrent layers
        self.seqlens_B = source.seqlens_B.clone()
        self.counted_BT: Tensor | None = None  # which of the new tokens count; None: all

    @override
    def place(self, layer: int, slots_BT: Tensor) -> Place | None:
        """Write nothing: the entries are in place."""
        return None

    @override
    def reads(self, layer: int) -> Reads | None:
        """Return None: a pass in one call would write."""
        return None

    @override
    def attend(self, layer: int, q_BTHD: Tensor, attention: Attention, plan: Any) -> Tensor:
        entries = self.k_LBKSD[layer], self.v_LBKSD[layer]
        out_BTHD, received_BKS = attention.attend_scored(q_BTHD, *entries, plan, self.counted_BT)
        self.receive(layer, received_BKS)
        return out_BTHD

    def receive(self, layer: int, received_BKS: Tensor) -> None:
        """Add what the first slots of a layer have received."""
        self.scores_LBKS[layer][..., : received_BKS.shape[-1]] += received_BKS
