"""The interface of a cache policy, and the common part of all draft caches.

A policy decides which KV entries a draft keeps. To add one, subclass DraftCache in a module named
like the policy (docs/adding-a-policy.md).
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from magicdec.architectures.model_config import ModelConfig
from magicdec.attention.base import Attention
from magicdec.config.choices import CacheConfig, CacheSpec
from magicdec.models.kv_cache import KVCache


class DraftCache(KVCache, ABC):
    """A cache with `length_B` committed tokens (int32) and, in its last valid slots, the proposals
    of this round.
    """

    settings: CacheConfig  # the keys and the facts of the policy
    # How many rounds of each kind follow each other in a cycle. Each kind has its own static shape.
    phases: tuple[int, ...] = (1,)
    # How many of the context's last tokens score its entries before `load`; 0: none.
    observes: int = 0
    per_row: ClassVar[dict[str, int]] = {**KVCache.per_row, "length_B": 0}

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
        self.spec, self.settings = spec, spec.cache
        self.length_B = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.set_up()

    def set_up(self) -> None:
        """Allocate what a policy keeps in addition to keys and values; set `phases` and
        `observes`.
        """

    @classmethod
    def num_slots(cls, spec: CacheSpec, shares_target: bool) -> int:
        """Return the slots per row to allocate, beyond the target's own where a draft shares
        them.
        """
        return 0 if shares_target else spec.capacity

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
        """Allocate a cache; `target` is the target's own cache if the target drafts for itself."""
        cache = cls(spec, config, num_rows, cls.num_slots(spec, target is not None), dtype, device)
        if target is not None:
            cache.share(target)
        return cache

    def share(self, target: KVCache) -> None:
        """Use the target's own entries where the policy keeps all of them."""

    def watch(self, verified: KVCache, phase: int) -> KVCache:
        """Return the target's cache for a verification of this phase: itself, unless its attention
        is observed.
        """
        return verified

    def reselect(self, attention: Attention) -> None:
        """Select again as a step or a round does, for timing. Do nothing where the policy never
        selects.
        """

    @abstractmethod
    def load(self, source: KVCache, scores_LBKS: Tensor | None = None) -> None:
        """Keep the entries of a prefilled context that the policy selects. `source` is the target's
        own cache where it drafts for itself. `scores_LBKS`, for a policy that observes, is the
        attention that each entry received.
        """

    @abstractmethod
    def for_prefill(self, chunk: int) -> "DraftCache":
        """Return an empty cache for an independent draft's prefill in chunks of `chunk` tokens. A
        policy that selects from the whole context returns one of everything (`FullCache.like`),
        from which `adopt` selects.
        """

    def adopt(self, prefilled: "DraftCache", scores_LBKS: Tensor | None = None) -> None:
        """Take over the entries of `for_prefill`'s cache after the prefill; see `load` for the
        scores.
        """
        self.load(prefilled, scores_LBKS)

    @abstractmethod
    def take(self, source: KVCache, first_slot_B: Tensor, count_B: Tensor, width: int) -> None:
        """Drop this round's proposals and commit `count_B` <= `width` tokens to each row.

        Their entries are in `source`, in slots from `first_slot_B` on: the target's cache, which
        holds their exact keys and values, or, for an independent draft, this cache itself.
        """

    @abstractmethod
    def set_length(self, length_B: Tensor) -> None:
        """Mark `length_B` tokens as committed and none as proposed. Their entries are in place, or
        do not matter.
        """

    @override
    def clear_row(self, row: int) -> None:
        length_B = self.length_B.clone()
        length_B[row : row + 1] = 0
        self.set_length(length_B)

    @property
    @abstractmethod
    def committed_slots_B(self) -> Tensor:
        """Return the slots that committed tokens occupy, proposals excluded (int32)."""
