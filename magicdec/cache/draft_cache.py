"""What every draft cache has in common: the interface of a cache policy.

A policy decides which KV entries a draft keeps. To add one, subclass DraftCache in a file of this package and register
it: `@CACHES.register("name")`.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from magicdec.attention.base import Attention
from magicdec.cache.kv_cache import KVCache
from magicdec.models.config import ModelConfig
from magicdec.registry import Registry

Selects = Literal["never", "prefill", "round", "step"]


@dataclass(frozen=True)
class CacheSpec:
    """What a policy is asked for: the keys of `cache` but its name, and what the run adds to them.

    `budget` counts committed entries per sequence and layer; proposals live in slots beyond it. `max_len` is the
    longest a sequence can become. `in_cache_positions` is set where a sequence may outgrow the draft's trained context.
    """

    gamma: int
    max_len: int
    in_cache_positions: bool = False
    budget: int = 0
    num_sink: int = 0
    observation_window: int = 32
    kernel: int = 5
    beta: int = 20
    page_size: int = 16
    refresh: int = 1
    bits: int = 4
    group_size: int = 32


class DraftCache(KVCache):
    """A cache with `length_B` committed tokens (int32) and, in its last valid slots, the proposals of this round."""

    # Whether it keeps positions within what the draft was trained for, however long the text becomes.
    bounds_positions: ClassVar[bool] = False
    # Whether it lives on the target's own attention or entries, so that an independent draft has no use for it.
    needs_target: ClassVar[bool] = False
    # When it chooses entries by their attention: at the prefill, once a round, or in every draft step. Timed apart.
    selects: ClassVar[Selects] = "never"
    per_row: ClassVar[tuple[str, ...]] = (*KVCache.per_row, "length_B")

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
        self.spec = spec
        self.length_B = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.set_up()

    def set_up(self) -> None:
        """Allocate what a policy keeps beside keys and values."""

    @classmethod
    @abstractmethod
    def num_slots(cls, spec: CacheSpec, shares_target: bool) -> int:
        """Slots per row to allocate, beyond the target's own where a draft shares them."""

    @classmethod
    def bytes_per_row(cls, spec: CacheSpec, config: ModelConfig, dtype: torch.dtype, shares_target: bool) -> int:
        """What a row takes, known before anything is allocated."""
        return config.kv_elements_per_token * cls.num_slots(spec, shares_target) * dtype.itemsize

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
        """Allocate; `target` is the target's own cache where the target drafts for itself."""
        return cls(spec, config, num_rows, cls.num_slots(spec, target is not None), dtype, device)

    @property
    def phases(self) -> int:
        """Kinds of rounds that take turns, each of a static shape of its own."""
        return 1

    def watch(self, verified: KVCache, phase: int) -> KVCache:
        """The target's cache as a verification of this phase is to see it: itself, unless its attention is observed."""
        return verified

    def select(self, attention: Attention) -> None:
        """Choose once more, as a step or a round does: to be timed. What `selects` never has nothing to do."""

    @property
    def observes(self) -> int:
        """How many of the context's last tokens are to score it before it is loaded; see `load`."""
        return 0

    @abstractmethod
    def load(self, source: KVCache, scores_LBKS: Tensor | None = None) -> None:
        """Keep what the policy chooses of the entries of a whole prefilled context: the target's, where it drafts for
        itself. `scores_LBKS`, for a policy that observes, is the attention that each entry received.
        """

    @abstractmethod
    def for_prefill(self, chunk: int) -> "DraftCache":
        """An independent draft's cache while it prefills in chunks of `chunk` tokens: empty, and with room for one."""

    @abstractmethod
    def adopt(self, prefilled: "DraftCache", scores_LBKS: Tensor | None = None) -> None:
        """Take over what `for_prefill`'s cache holds after the prefill; see `load` for the scores."""

    @abstractmethod
    def take(self, source: KVCache, first_slot_B: Tensor, count_B: Tensor, width: int) -> None:
        """Drop this round's proposals and commit `count_B` <= `width` tokens to each row.

        Their entries lie in `source`, in slots from `first_slot_B` on: the target's cache, which holds their exact
        keys and values, or, for an independent draft, this cache itself.
        """

    @abstractmethod
    def set_length(self, length_B: Tensor) -> None:
        """Declare `length_B` tokens committed and none proposed; their entries are in place, or do not matter."""

    def clear_row(self, row: int) -> None:
        """See KVCache.clear_row."""
        length_B = self.length_B.clone()
        length_B[row] = 0
        self.set_length(length_B)

    @property
    @abstractmethod
    def committed_slots_B(self) -> Tensor:
        """Slots that committed tokens occupy, proposals excluded (int32)."""


CACHES: Registry[type[DraftCache]] = Registry("magicdec.cache", "cache.policy")
