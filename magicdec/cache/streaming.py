"""StreamingLLM: attention sinks and a window of recent tokens (Xiao et al. 2023, arXiv 2309.17453).

L layers, B rows, K KV heads, S slots, N = num_sink, D head dim.
"""

from typing import ClassVar

import torch
from torch import Tensor

from magicdec.cache.compact import CompactCache
from magicdec.cache.draft_cache import DraftCache
from magicdec.models.kv_cache import KVCache
from magicdec.models.rope import rope_frequencies, rotate
from magicdec.policies import Streaming


class StreamingCache(CompactCache):
    """`budget` committed entries a row and layer: num_sink first tokens and the budget - num_sink latest.

    With `in_cache_positions` the sinks' keys are rotated forward to sit right before the window, so that the model
    never sees a distance beyond budget + gamma: rotary embeddings know differences alone, and one shift serves all
    sinks of a row.
    """

    settings: Streaming
    per_row: ClassVar[dict[str, int]] = {**CompactCache.per_row, "sink_k_LBKND": 1}

    def set_up(self) -> None:
        """See DraftCache.set_up."""
        super().set_up()
        self.inv_freq = rope_frequencies(self.config)[0].to(self.k_LBKSD.device)
        # Sink keys at their true positions; the cache's own are rotated from these, so that errors do not add up.
        self.sink_k_LBKND = self.k_LBKSD[:, :, :, : self.num_fixed].clone() if self.spec.in_cache_positions else None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the entries and of the sinks' keys."""
        return super().num_bytes + (0 if self.sink_k_LBKND is None else self.sink_k_LBKND.nbytes)

    def fixed_slots(self, budget: int) -> int:
        """See CompactCache.fixed_slots."""
        return self.settings.num_sink

    def choose(self, layer: int, source: KVCache, scores_LBKS: Tensor | None) -> Tensor:
        """See CompactCache.choose: the first tokens, in every head."""
        return torch.arange(self.num_fixed, device=self.length_B.device).expand(self.num_rows, 1, -1)

    def for_prefill(self, chunk: int) -> "StreamingCache":
        """See DraftCache.for_prefill: the same, wide enough for a chunk in place of proposals."""
        capacity = self.budget + chunk
        k = self.k_LBKSD
        return type(self)(self.spec, self.config, self.num_rows, capacity, k.dtype, k.device)

    def adopt(self, prefilled: DraftCache, scores_LBKS: Tensor | None = None) -> None:
        """See DraftCache.adopt: what its slots hold."""
        assert isinstance(prefilled, StreamingCache)
        self.k_LBKSD[:, :, :, : self.budget] = prefilled.k_LBKSD[:, :, :, : self.budget]
        self.v_LBKSD[:, :, :, : self.budget] = prefilled.v_LBKSD[:, :, :, : self.budget]
        if self.positions_LBKS is not None and prefilled.positions_LBKS is not None:
            self.positions_LBKS[..., : self.budget] = prefilled.positions_LBKS[..., : self.budget]
        if self.sink_k_LBKND is not None and prefilled.sink_k_LBKND is not None:
            self.sink_k_LBKND.copy_(prefilled.sink_k_LBKND)
        self.set_length(prefilled.length_B)

    def write(self, source: KVCache, first_slot_B: Tensor, count_B: Tensor, width: int) -> None:
        """See CompactCache.write; keeps sink keys as long as they are at the position where they were computed."""
        super().write(source, first_slot_B, count_B, width)
        if self.sink_k_LBKND is not None:
            still_BKND = (self.shift_B == 0)[:, None, None, None]
            in_cache = self.k_LBKSD[:, :, :, : self.num_fixed]
            self.sink_k_LBKND.copy_(torch.where(still_BKND, in_cache, self.sink_k_LBKND))

    def set_length(self, length_B: Tensor) -> None:
        """See DraftCache.set_length."""
        super().set_length(length_B)
        if self.sink_k_LBKND is not None:
            angle_BD2 = self.shift_B[:, None].float() * self.inv_freq
            cos, sin = angle_BD2.cos()[:, None, None], angle_BD2.sin()[:, None, None]
            self.k_LBKSD[:, :, :, : self.num_fixed] = rotate(self.sink_k_LBKND, cos, sin)
            if self.positions_LBKS is not None:
                slot_N = torch.arange(self.num_fixed, device=length_B.device)
                self.positions_LBKS[..., : self.num_fixed] = (slot_N + self.shift_B[:, None])[:, None]
