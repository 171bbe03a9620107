"""A sliding window without sinks: the plainest policy, and the one that shows what sinks are for."""

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from magicdec.cache.compact import CompactCache
from magicdec.cache.draft_cache import DraftCache
from magicdec.config.choices import CacheConfig
from magicdec.config.registry import POLICIES
from magicdec.models.kv_cache import KVCache
from magicdec.rules import STRICT


@dataclass(frozen=True, config=STRICT)
class Window(CacheConfig):
    """The latest tokens."""

    policy: str = "window"
    compact = bounds_positions = True


@POLICIES.register(Window)
class WindowCache(CompactCache):
    """The `budget` latest tokens of every row."""

    def fixed_slots(self, budget: int) -> int:
        """See CompactCache.fixed_slots."""
        return 0

    def choose(self, layer: int, source: KVCache, scores_LBKS: Tensor | None) -> Tensor:
        """See CompactCache.choose: the first tokens, in every head."""
        return torch.arange(self.num_fixed, device=self.length_B.device).expand(self.num_rows, 1, -1)

    def for_prefill(self, chunk: int) -> "WindowCache":
        """See DraftCache.for_prefill: the same, wide enough for a chunk in place of proposals."""
        capacity = self.budget + chunk
        k = self.k_LBKSD
        return type(self)(self.spec, self.config, self.num_rows, capacity, k.dtype, k.device)

    def adopt(self, prefilled: DraftCache, scores_LBKS: Tensor | None = None) -> None:
        """See DraftCache.adopt: what its slots hold."""
        assert isinstance(prefilled, WindowCache)
        self.k_LBKSD[:, :, :, : self.budget] = prefilled.k_LBKSD[:, :, :, : self.budget]
        self.v_LBKSD[:, :, :, : self.budget] = prefilled.v_LBKSD[:, :, :, : self.budget]
        if self.positions_LBKS is not None and prefilled.positions_LBKS is not None:
            self.positions_LBKS[..., : self.budget] = prefilled.positions_LBKS[..., : self.budget]
        self.set_length(prefilled.length_B)
