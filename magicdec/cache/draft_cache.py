"""What every draft cache has in common: the interface of a cache policy.

A policy decides which KV entries a draft keeps. To add one, subclass DraftCache in a file of this package and register
it: `@CACHES.register("name")`.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.cache.kv_cache import KVCache
from magicdec.models.config import ModelConfig
from magicdec.registry import Registry


@dataclass(frozen=True)
class CacheSpec:
    """What a policy is asked for.

    `budget` counts committed entries per sequence and layer; proposals live in slots beyond it. `max_len` is the
    longest a sequence can become. `in_cache_positions` is set where a sequence may outgrow the draft's trained context.
    """

    budget: int
    num_sink: int
    gamma: int
    max_len: int
    in_cache_positions: bool = False


class DraftCache(KVCache):
    """A cache with `length_B` committed tokens (int32) and, in its last valid slots, the proposals of this round."""

    # Whether the draft may read positions it was not trained for (a policy that hides them sets this).
    bounds_positions = False

    def __init__(
        self,
        spec: CacheSpec,
        config: ModelConfig,
        num_rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        super().__init__(config, num_rows, capacity, dtype, device)
        self.spec, self.config = spec, config
        self.length_B = torch.zeros(num_rows, dtype=torch.int32, device=device)

    @classmethod
    @abstractmethod
    def build(
        cls,
        spec: CacheSpec,
        config: ModelConfig,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device | str,
        target: KVCache | None,
    ) -> "DraftCache":
        """Allocate; `target` is the target's own cache where the target drafts for itself."""

    @abstractmethod
    def load(self, target: KVCache) -> None:
        """Self-speculation, after the target's prefill: keep what the policy chooses of its exact entries."""

    @abstractmethod
    def for_prefill(self, chunk: int) -> "DraftCache":
        """An independent draft's cache while it prefills in chunks of `chunk` tokens: empty, and with room for one."""

    @abstractmethod
    def adopt(self, prefilled: "DraftCache") -> None:
        """Take over what `for_prefill`'s cache holds after the prefill."""

    @abstractmethod
    def take(self, source: KVCache, first_slot_B: Tensor, count_B: Tensor, width: int) -> None:
        """Drop this round's proposals and commit `count_B` <= `width` tokens to each row.

        Their entries lie in `source`, in slots from `first_slot_B` on: the target's cache, which holds their exact
        keys and values, or, for an independent draft, this cache itself.
        """

    @abstractmethod
    def set_length(self, length_B: Tensor) -> None:
        """Declare `length_B` tokens committed and none proposed; their entries are in place, or do not matter."""

    @property
    @abstractmethod
    def committed_slots_B(self) -> Tensor:
        """Slots that committed tokens occupy, proposals excluded (int32)."""


CACHES: Registry[type[DraftCache]] = Registry("magicdec.cache", "cache.policy")
