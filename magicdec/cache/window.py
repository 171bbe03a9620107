"""A sliding window without sinks: the simplest policy, which shows what the sinks of `streaming`
are for.
"""

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from typing_extensions import override

from magicdec.cache.compact import CompactCache
from magicdec.cache.draft_cache import DraftCache
from magicdec.config.choices import CacheConfig
from magicdec.config.registry import POLICIES
from magicdec.inputs.rules import STRICT
from magicdec.models.kv_cache import KVCache


@dataclass(frozen=True, config=STRICT)
class Window(CacheConfig):
    """The latest tokens."""

    policy: str = "window"
    compact = bounds_positions = True


@POLICIES.register(Window)
class WindowCache(CompactCache):
    """The `budget` latest tokens of every row."""

    @override
    def fixed_slots(self, budget: int) -> int:
        return 0

    @override
    def select(self, layer: int, source: KVCache, scores_LBKS: Tensor | None) -> Tensor:
        """Select the first tokens in every head."""
        return torch.arange(self.num_fixed, device=self.length_B.device).expand(
            self.num_rows, 1, -1
        )

    @override
    def for_prefill(self, chunk: int) -> "WindowCache":
        """Return a cache of this kind with room for a chunk instead of proposals."""
        capacity = self.budget + chunk
        k = self.k_LBKSD
        return type(self)(self.spec, self.config, self.num_rows, capacity, k.dtype, k.device)

    @override
    def adopt(self, prefilled: DraftCache, scores_LBKS: Tensor | None = None) -> None:
        """Copy the slots."""
        assert isinstance(prefilled, WindowCache)
        self.k_LBKSD[:, :, :, : self.budget] = prefilled.k_LBKSD[:, :, :, : self.budget]
        self.v_LBKSD[:, :, :, : self.budget] = prefilled.v_LBKSD[:, :, :, : self.budget]
        if self.positions_LBKS is not None and prefilled.positions_LBKS is not None:
            self.positions_LBKS[..., : self.budget] = prefilled.positions_LBKS[..., : self.budget]
        self.set_length(prefilled.length_B)
