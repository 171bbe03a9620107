"""The common part of dynamic policies: they keep every entry, and each draft step reads a few of
them by index.

B rows, K KV heads, T new tokens, N selected slots, H query heads, D head dim. For self-speculation
the entries are the target's own: nothing is copied, and the draft saves reading, not memory.
"""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from magicdec.attention.base import Attention
from magicdec.cache.draft_cache import DraftCache
from magicdec.cache.full import FullCache
from magicdec.models.kv_cache import Reads


class DynamicCache(FullCache):
    """At most `budget` committed entries are read by each KV head, and this round's proposals.

    A tentative pass verifies proposals behind its first token. It selects by that token alone: the
    distribution that verifies a proposal must depend neither on it nor on later ones.
    """

    _is_tentative = False

    @property
    def budget(self) -> int:
        """Return the committed entries that a KV head reads."""
        return self.spec.kept

    @abstractmethod
    def select(self, layer: int, q_BTHD: Tensor, attention: Attention, plan: Any) -> Tensor:
        """Return the committed slots for each KV head to read (B, K, N), negative where there are
        fewer. The queries and the plan are those of the tokens that select.
        """

    @override
    def reads(self, layer: int) -> Reads | None:
        """Return None: `select` may depend on the queries."""
        return None

    @override
    def plan(self, attention: Attention, num_new: int, dtype: torch.dtype) -> list[Any]:
        """Note the slots of proposals, which are the same in all layers."""
        next_N = torch.arange(self.spec.gamma + 1, device=self.length_B.device)
        self._proposed_BN = self.length_B.long()[:, None] + next_N
        if self._is_tentative:
            self._plans_of_first = super().plan(attention, 1, dtype)
        return super().plan(attention, num_new, dtype)

    @override
    @contextmanager
    def tentative(self) -> Iterator[None]:
        self._is_tentative = True
        try:
            with super().tentative():
                yield
        finally:
            self._is_tentative = False

    @override
    def attend(self, layer: int, q_BTHD: Tensor, attention: Attention, plan: Any) -> Tensor:
        if self._is_tentative:
            first_B1HD, plan_of_first = q_BTHD[:, :1], self._plans_of_first[layer]
            selected_BKN = self.select(layer, first_B1HD, attention, plan_of_first)
        else:
            selected_BKN = self.select(layer, q_BTHD, attention, plan)
        proposed_BKN = self._proposed_BN[:, None].expand(-1, selected_BKN.shape[1], -1)
        indices_BKN = torch.cat((selected_BKN, proposed_BKN), dim=-1)
        return attention.attend(q_BTHD, self.k_LBKSD[layer], self.v_LBKSD[layer], plan, indices_BKN)

    @override
    def read_B(self, num_new: int) -> Tensor:
        """Return all valid slots, of a resting row too: what is selected there must not lie behind
        the end.
        """
        return self.seqlens_B + num_new

    @override
    def for_prefill(self, chunk: int) -> DraftCache:
        """Return a cache that reads all of the same entries."""
        return FullCache.like(self, entries=self)

    @override
    def adopt(self, prefilled: DraftCache, scores_LBKS: Tensor | None = None) -> None:
        self.load(prefilled, scores_LBKS)

    @override
    def reselect(self, attention: Attention) -> None:
        """Select as one draft step does, in all layers. A KV head's latest key is taken for the
        queries that share it: with queries of zeros, all scores would tie.
        """
        last_B = (self.length_B.long() - 1).clamp(min=0)
        for layer, plan in enumerate(self.plan(attention, 1, self.k_LBKSD.dtype)):
            k_BKD = self.k_LBKSD[layer][self._rows_B1[:, 0], :, last_B]
            q_BTHD = k_BKD.repeat_interleave(self.config.group_size, dim=1)[:, None]
            self.select(layer, q_BTHD, attention, plan)
