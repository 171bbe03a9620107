"""The full cache: a draft that keeps everything. For self-speculation it is a view of the target's
cache.
"""

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from typing_extensions import override

from magicdec.cache.draft_cache import DraftCache
from magicdec.config.choices import CacheConfig
from magicdec.config.registry import POLICIES
from magicdec.inputs.rules import STRICT
from magicdec.models.kv_cache import KVCache


@dataclass(frozen=True, config=STRICT)
class Full(CacheConfig):
    """Every entry."""

    policy: str = "full"
    reads_everything, has_budget = True, False


@POLICIES.register(Full)
class FullCache(DraftCache):
    """Every entry in the slot of its position, so that committing moves nothing."""

    owns_storage = True

    @classmethod
    def like(cls, other: DraftCache, entries: KVCache | None = None) -> "FullCache":
        """Return a cache of everything of another one's sizes: an empty one, or one over these
        entries.
        """
        k = other.k_LBKSD
        return FullCache.build(other.spec, other.config, other.num_rows, k.dtype, k.device, entries)

    @override
    def share(self, target: KVCache) -> None:
        """Write proposals where verification will write the same tokens' exact entries."""
        self.k_LBKSD, self.v_LBKSD = target.k_LBKSD, target.v_LBKSD
        self.owns_storage = False

    @property
    @override
    def num_bytes(self) -> int:
        """Return the bytes beyond those of the target's cache."""
        return super().num_bytes - (
            0 if self.owns_storage else self.k_LBKSD.nbytes + self.v_LBKSD.nbytes
        )

    @override
    def load(self, source: KVCache, scores_LBKS: Tensor | None = None) -> None:
        """Copy nothing: all entries are in place."""
        self.set_length(source.seqlens_B)

    @override
    def for_prefill(self, chunk: int) -> DraftCache:
        """Return this cache, emptied."""
        self.set_length(torch.zeros_like(self.length_B))
        return self

    @override
    def adopt(self, prefilled: DraftCache, scores_LBKS: Tensor | None = None) -> None:
        """Do nothing: `for_prefill` returned this cache."""

    @override
    def take(self, source: KVCache, first_slot_B: Tensor, count_B: Tensor, width: int) -> None:
        """Move nothing: the entries are in place."""
        self.set_length(self.length_B + count_B)

    @property
    @override
    def committed_slots_B(self) -> Tensor:
        """Return the committed slots: one per token."""
        return self.length_B

    @override
    def set_length(self, length_B: Tensor) -> None:
        self.length_B.copy_(length_B)
        self.seqlens_B.copy_(length_B)
