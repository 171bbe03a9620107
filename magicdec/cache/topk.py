"""Exact top-k attention: the oracle of dynamic policies.

B rows, T new tokens, H query heads, D head dim, K KV heads, N selected slots, S slots.
"""

from typing import Any

from pydantic.dataclasses import dataclass
from torch import Tensor
from typing_extensions import override

from magicdec.architectures.model_config import ModelConfig
from magicdec.attention.base import Attention
from magicdec.cache.dynamic import DynamicCache
from magicdec.config.choices import CacheConfig, CacheSpec
from magicdec.config.registry import POLICIES
from magicdec.inputs.rules import STRICT


@dataclass(frozen=True, config=STRICT)
class TopK(CacheConfig):
    """The entries with the most attention from each query."""

    policy: str = "topk"
    selects = "step"

    @override
    def selection_bytes(self, spec: CacheSpec, model: ModelConfig, element_bytes: float) -> float:
        """Count every key."""
        return model.kv_elements_per_token / 2 * spec.max_len * element_bytes


@POLICIES.register(TopK)
class TopKCache(DynamicCache):
    """The entries with the most attention from this very query: no other set of this size retains
    more of it.

    It is impractical, because selecting them takes the full attention that a selection should save.
    It shows the best that a budget can do.
    """

    @override
    def select(self, layer: int, q_BTHD: Tensor, attention: Attention, plan: Any) -> Tensor:
        entries = self.k_LBKSD[layer], self.v_LBKSD[layer]
        return attention.select_slots(q_BTHD, *entries, plan, self.length_B, self.budget)
