"""The full cache: a draft that keeps everything. For self-speculation it is the target's own cache, seen again."""

from typing import Self

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from magicdec.architectures import ModelConfig
from magicdec.cache.draft_cache import DraftCache
from magicdec.config.choices import CacheConfig, CacheSpec
from magicdec.config.registry import POLICIES
from magicdec.models.kv_cache import KVCache
from magicdec.rules import STRICT


@dataclass(frozen=True, config=STRICT)
class Full(CacheConfig):
    """Every entry."""

    policy: str = "full"
    reads_everything, has_budget = True, False


@POLICIES.register(Full)
class FullCache(DraftCache):
    """Every entry in the slot of its position, so that committing moves nothing."""

    @classmethod
    def build(
        cls,
        spec: CacheSpec,
        config: ModelConfig,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device | str,
        target: KVCache | None,
    ) -> Self:
        """See DraftCache.build. Proposals are written where verification will write the same tokens' exact entries."""
        cache = super().build(spec, config, num_rows, dtype, device, target)
        if target is not None:
            cache.k_LBKSD, cache.v_LBKSD = target.k_LBKSD, target.v_LBKSD
        cache.owns_storage = target is None
        return cache

    owns_storage = True

    @property
    def num_bytes(self) -> int:
        """Return the bytes beyond those of the target's cache."""
        return super().num_bytes if self.owns_storage else 0

    def load(self, source: KVCache, scores_LBKS: Tensor | None = None) -> None:
        """See DraftCache.load: everything is there already."""
        self.set_length(source.seqlens_B)

    def for_prefill(self, chunk: int) -> DraftCache:
        """See DraftCache.for_prefill: this very cache."""
        self.set_length(torch.zeros_like(self.length_B))
        return self

    def adopt(self, prefilled: DraftCache, scores_LBKS: Tensor | None = None) -> None:
        """See DraftCache.adopt: nothing to move."""

    def take(self, source: KVCache, first_slot_B: Tensor, count_B: Tensor, width: int) -> None:
        """See DraftCache.take: the entries are in place."""
        self.set_length(self.length_B + count_B)

    @property
    def committed_slots_B(self) -> Tensor:
        """Return the committed slots: one per token."""
        return self.length_B

    def set_length(self, length_B: Tensor) -> None:
        """See DraftCache.set_length."""
        self.length_B.copy_(length_B)
        self.seqlens_B.copy_(length_B)
