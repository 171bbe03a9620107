"""StreamingLLM: attention sinks and a window of recent tokens (Xiao et al. 2023, arXiv 2309.17453).

A compact cache of budget + proposals: slots [0, num_sink) hold the first tokens, slots [num_sink, budget) are a ring
over the recent ones, and slots beyond the budget hold this round's proposals, which evict nothing until committed.
Attention does not care about the order of slots, because keys carry their rotary position.
"""

import torch
from torch import Tensor

from magicdec.cache.draft_cache import CACHES, CacheSpec, DraftCache
from magicdec.cache.kv_cache import KVCache
from magicdec.models.config import ModelConfig
from magicdec.models.rope import rope_frequencies, rotate


@CACHES.register("streaming")
class StreamingCache(DraftCache):
    """`budget` committed entries a row and layer: num_sink first tokens and the budget - num_sink latest.

    Positions are absolute. With `in_cache_positions` the sinks' keys are rotated forward to sit right before the
    window, so that the model never sees a distance beyond budget + gamma: rotary embeddings know differences alone,
    and one shift serves all sinks of a row.
    """

    bounds_positions = True
    ordered = False

    def __init__(
        self,
        spec: CacheSpec,
        config: ModelConfig,
        num_rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        super().__init__(spec, config, num_rows, capacity, dtype, device)
        self.budget = min(spec.budget, spec.max_len)
        self.num_sink = min(spec.num_sink, self.budget - 1)
        self.window = self.budget - self.num_sink
        # How far the window has moved: a token's position less its slot, for tokens appended now.
        self.shift_B = torch.zeros_like(self.length_B)
        self.inv_freq = rope_frequencies(config)[0].to(device)
        # Sink keys at their true positions; the cache's own are rotated anew from these, so that no error adds up.
        self.sink_k_LBKND = self.k_LBKSD[:, :, :, : self.num_sink].clone() if spec.in_cache_positions else None

    @classmethod
    def build(
        cls,
        spec: CacheSpec,
        config: ModelConfig,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device | str,
        target: KVCache | None,
    ) -> "StreamingCache":
        """See DraftCache.build."""
        return cls(spec, config, num_rows, min(spec.budget, spec.max_len) + spec.gamma + 1, dtype, device)

    def positions_BT(self, num_new: int) -> Tensor:
        """Absolute positions of the next tokens."""
        return self.slots_BT(num_new) + self.shift_B[:, None]

    @property
    def committed_slots_B(self) -> Tensor:
        """At most the budget."""
        return self.length_B.clamp(max=self.budget)

    def load(self, target: KVCache) -> None:
        """See DraftCache.load: a gather of the sinks and of the window, each into the slot of its position."""
        length_B1 = target.seqlens_B.long()[:, None]
        slot_S = torch.arange(self.budget, device=length_B1.device)
        start_B1 = length_B1 - self.window
        in_window = start_B1 + (slot_S - start_B1) % self.window
        position_BS = torch.where((slot_S < self.num_sink) | (length_B1 <= self.budget), slot_S, in_window)
        position_BS = position_BS.clamp(max=target.capacity - 1)
        for kept, all_entries in ((self.k_LBKSD, target.k_LBKSD), (self.v_LBKSD, target.v_LBKSD)):
            for layer in range(kept.shape[0]):  # a layer at a time: no second copy of the whole cache
                kept[layer][:, :, : self.budget] = all_entries[layer][self._rows_B1, :, position_BS].transpose(1, 2)
        self.set_length(target.seqlens_B)

    def for_prefill(self, chunk: int) -> "StreamingCache":
        """See DraftCache.for_prefill: the same, wide enough for a chunk in place of proposals."""
        capacity = self.budget + chunk
        k = self.k_LBKSD
        return StreamingCache(self.spec, self.config, self.num_rows, capacity, k.dtype, k.device)

    def adopt(self, prefilled: DraftCache) -> None:
        """See DraftCache.adopt."""
        assert isinstance(prefilled, StreamingCache)
        self.k_LBKSD[:, :, :, : self.budget] = prefilled.k_LBKSD[:, :, :, : self.budget]
        self.v_LBKSD[:, :, :, : self.budget] = prefilled.v_LBKSD[:, :, :, : self.budget]
        if self.sink_k_LBKND is not None and prefilled.sink_k_LBKND is not None:
            self.sink_k_LBKND.copy_(prefilled.sink_k_LBKND)
        self.set_length(prefilled.length_B)

    def take(self, source: KVCache, first_slot_B: Tensor, count_B: Tensor, width: int) -> None:
        """See DraftCache.take. A long chunk writes only its last `window` tokens: the earlier ones are evicted by it,
        or lie in their slots already.
        """
        latest = min(width, self.window)
        index_BW = count_B.long()[:, None] - latest + torch.arange(latest, device=count_B.device)
        position_BW = self.length_B.long()[:, None] + index_BW
        ring_BW = self.num_sink + (position_BW - self.num_sink) % self.window
        slot_BW = torch.where(position_BW < self.num_sink, position_BW, ring_BW)
        slot_BW = torch.where(index_BW >= 0, slot_BW, self.capacity - 1)  # nobody reads behind the valid slots
        from_BW = (first_slot_B.long()[:, None] + index_BW).clamp(min=0)
        self.k_LBKSD[:, self._rows_B1, :, slot_BW] = source.k_LBKSD[:, self._rows_B1, :, from_BW]
        self.v_LBKSD[:, self._rows_B1, :, slot_BW] = source.v_LBKSD[:, self._rows_B1, :, from_BW]
        if self.sink_k_LBKND is not None:
            still_BKND = (self.shift_B == 0)[:, None, None, None]
            in_cache = self.k_LBKSD[:, :, :, : self.num_sink]
            self.sink_k_LBKND.copy_(torch.where(still_BKND, in_cache, self.sink_k_LBKND))
        self.set_length(self.length_B + count_B)

    def set_length(self, length_B: Tensor) -> None:
        """See DraftCache.set_length."""
        self.length_B.copy_(length_B)
        self.seqlens_B.copy_(self.committed_slots_B)
        self.shift_B.copy_(self.length_B - self.seqlens_B)
        if self.sink_k_LBKND is not None:
            angle_BD2 = self.shift_B[:, None].float() * self.inv_freq
            cos, sin = angle_BD2.cos()[:, None, None], angle_BD2.sin()[:, None, None]
            self.k_LBKSD[:, :, :, : self.num_sink] = rotate(self.sink_k_LBKND, cos, sin)
