"""StreamingLLM: attention sinks and a window of recent tokens (Xiao et al. 2023, arXiv 2309.17453).

L layers, B rows, K KV heads, S slots, N = num_sink, D head dim.
"""

from collections.abc import Iterator
from typing import ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from typing_extensions import override

from magicdec.architectures.model_config import ModelConfig
from magicdec.cache.draft_cache import DraftCache
from magicdec.cache.window import Window, WindowCache
from magicdec.config.choices import CacheSpec, all_kv_heads, mistakes_of_sinks
from magicdec.config.registry import POLICIES
from magicdec.inputs.rules import STRICT, Size
from magicdec.models.kv_cache import KVCache
from magicdec.models.rope import rope_frequencies, rotate


@dataclass(frozen=True, config=STRICT)
class Streaming(Window):
    """StreamingLLM: the first `num_sink` tokens, and the latest ones."""

    policy: str = "streaming"
    num_sink: Size = 0

    @override
    def mistakes(self, key: str) -> Iterator[str]:
        return mistakes_of_sinks(key, self.budget, self.num_sink)

    @override
    def extra_bytes(self, spec: CacheSpec, model: ModelConfig, element_bytes: float) -> float:
        """Count the unrotated keys of the sinks, where positions are those in the cache."""
        num_sink = min(self.num_sink, spec.kept - 1) if spec.in_cache_positions else 0
        return all_kv_heads(model) * num_sink * model.head_dim * element_bytes


@POLICIES.register(Streaming)
class StreamingCache(WindowCache):
    """`budget` committed entries a row and layer: num_sink first tokens and the budget - num_sink
    latest.

    With `in_cache_positions`, which the authors always use, the sinks' keys are rotated forward to
    sit right before the window, so that the model never sees a distance beyond budget + gamma.
    Rotary embeddings depend on differences only, so that one shift serves all sinks of a row.
    Otherwise positions are those of the text, like the target's.
    """

    settings: Streaming
    per_row: ClassVar[dict[str, int]] = {**WindowCache.per_row, "sink_k_LBKND": 1}

    @override
    def set_up(self) -> None:
        super().set_up()
        # Sink keys at their true positions; the cache's own are rotated from these, so that errors
        # do not add up.
        self.sink_k_LBKND = (
            self.k_LBKSD[:, :, :, : self.num_fixed].clone()
            if self.spec.in_cache_positions
            else None
        )
        if self.sink_k_LBKND is not None:
            self.inv_freq = rope_frequencies(self.config)[0].to(self.k_LBKSD.device)

    @override
    def fixed_slots(self, budget: int) -> int:
        return min(self.settings.num_sink, budget - 1)  # a sequence may be shorter than the sinks

    @override
    def load(self, source: KVCache, scores_LBKS: Tensor | None = None) -> None:
        """Copy the sinks' unrotated keys from the source, where they are at the position where they
        were computed.
        """
        if self.sink_k_LBKND is not None:
            self.sink_k_LBKND.copy_(source.k_LBKSD[:, :, :, : self.num_fixed])
        super().load(source, scores_LBKS)

    @override
    def adopt(self, prefilled: DraftCache, scores_LBKS: Tensor | None = None) -> None:
        """Copy the sinks' unrotated keys, too; setting the length rotates them."""
        assert isinstance(prefilled, StreamingCache)
        if self.sink_k_LBKND is not None and prefilled.sink_k_LBKND is not None:
            self.sink_k_LBKND.copy_(prefilled.sink_k_LBKND)
        super().adopt(prefilled, scores_LBKS)

    @override
    def write(self, source: KVCache, first_slot_B: Tensor, count_B: Tensor, width: int) -> None:
        """Save the sink keys, as long as they are at the position where they were computed."""
        super().write(source, first_slot_B, count_B, width)
        if self.sink_k_LBKND is not None:
            still_BKND = (self.shift_B == 0)[:, None, None, None]
            in_cache = self.k_LBKSD[:, :, :, : self.num_fixed]
            self.sink_k_LBKND.copy_(torch.where(still_BKND, in_cache, self.sink_k_LBKND))

    @override
    def set_length(self, length_B: Tensor) -> None:
        super().set_length(length_B)
        if self.sink_k_LBKND is not None:
            angle_BD2 = self.shift_B[:, None].float() * self.inv_freq
            cos = angle_BD2.cos()[:, None, None]
            sin = angle_BD2.sin()[:, None, None]
            self.k_LBKSD[:, :, :, : self.num_fixed] = rotate(self.sink_k_LBKND, cos, sin)
            if self.positions_LBKS is not None:
                slot_N = torch.arange(self.num_fixed, device=length_B.device)
                self.positions_LBKS[..., : self.num_fixed] = (slot_N + self.shift_B[:, None])[
                    :, None
                ]
