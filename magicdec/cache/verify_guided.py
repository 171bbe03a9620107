"""Guided by verification: the draft reads the entries that the target has just attended to.

The idea of SparseSpec's PillarAttn and of Vegas (https://github.com/platformxlab/vegas): a
verification computes the attention over everything anyway, so that selecting by it needs no
additional pass.

L layers, B rows, T tokens of a verification, H query heads, D head dim, K KV heads, S slots, N
selected slots.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from typing_extensions import override

from magicdec.architectures.model_config import ModelConfig
from magicdec.attention.base import Attention, select_largest
from magicdec.cache.dynamic import DynamicCache
from magicdec.cache.observed import ObservedCache
from magicdec.config.choices import FP32, INT64, CacheConfig, CacheSpec, all_kv_heads
from magicdec.config.registry import POLICIES
from magicdec.inputs.rules import STRICT, Count
from magicdec.models.kv_cache import KVCache, Reads


@dataclass(frozen=True, config=STRICT)
class VerifyGuided(CacheConfig):
    """The entries that the last verification attended to, selected every `refresh` rounds."""

    policy: str = "verify_guided"
    refresh: Count = 1
    observation_window: Count = 32
    selects, scores = "round", "verification"
    needs_target = True

    @property
    @override
    def rounds_per_selection(self) -> int:
        return self.refresh

    @override
    def observed(self, spec: CacheSpec) -> int:
        return self.observation_window

    def window(self, spec: CacheSpec) -> int:
        """Return the recent tokens that are always read."""
        return min(spec.num_recent(self.budget // 4), spec.kept)

    @override
    def extra_bytes(self, spec: CacheSpec, model: ModelConfig, element_bytes: float) -> float:
        """Count the indices of the selected entries, and the attention that a verification gives to
        every entry.
        """
        return all_kv_heads(model) * ((spec.kept + spec.gamma + 1) * INT64 + spec.capacity * FP32)

    @override
    def selection_bytes(self, spec: CacheSpec, model: ModelConfig, element_bytes: float) -> float:
        """Count the scores that verification has computed: written and ranked."""
        return 2 * all_kv_heads(model) * spec.max_len * FP32


@POLICIES.register(VerifyGuided)
class VerifyGuidedCache(DynamicCache):
    """The entries that the last verification attended to most, and recent tokens: a quarter of the
    budget, but at least gamma + 1.

    Selected again every `refresh` rounds, by the attention of the first and the last verified
    token, as in Vegas; the first time by that of the prompt's last `observation_window` tokens.
    Recent tokens move on in between.
    """

    settings: VerifyGuided
    per_row: ClassVar[dict[str, int]] = {**DynamicCache.per_row, "read_LBKN": 1}

    @override
    def set_up(self) -> None:
        super().set_up()
        self.observes = self.settings.observed(self.spec)
        refresh = self.settings.refresh
        self.phases = (1,) if refresh == 1 else (1, refresh - 1)
        self.window = self.settings.window(self.spec)
        # the selected slots, the recent ones, and those of proposals: the same in every step of a
        # round
        shape = (
            self.config.num_layers,
            self.num_rows,
            self.config.num_kv_heads,
            self.budget + self.spec.gamma + 1,
        )
        self.read_LBKN = torch.full(shape, -1, dtype=torch.int64, device=self.k_LBKSD.device)
        self._observed: ObservedCache | None = None
        self._is_fresh = False

    @property
    @override
    def num_bytes(self) -> int:
        """Return the bytes of the scores, too."""
        return super().num_bytes + (
            0 if self._observed is None else self._observed.scores_LBKS.nbytes
        )

    @override
    def watch(self, verified: KVCache, phase: int) -> KVCache:
        """Observe the first round of a cycle."""
        self._is_fresh = phase == 0
        if not self._is_fresh:
            return verified
        if self._observed is None:
            self._observed = ObservedCache(verified, self.config.num_layers)
        self._observed.resting_B = verified.resting_B
        return self._observed

    @override
    def load(self, source: KVCache, scores_LBKS: Tensor | None = None) -> None:
        super().load(source, scores_LBKS)
        assert scores_LBKS is not None
        self._is_fresh = False
        self._refresh(scores_LBKS, select_largest)

    @override
    def take(self, source: KVCache, first_slot_B: Tensor, count_B: Tensor, width: int) -> None:
        super().take(source, first_slot_B, count_B, width)
        if self._is_fresh and self._observed is not None and self._observed.attention is not None:
            self._refresh(self._observed.scores_LBKS, self._observed.attention.select_largest)

    @override
    def set_length(self, length_B: Tensor) -> None:
        """Move the recent tokens on."""
        super().set_length(length_B)
        last_N = torch.arange(-self.window, self.spec.gamma + 1, device=length_B.device)
        self.read_LBKN[..., self.budget - self.window :] = (length_B.long()[:, None] + last_N)[
            :, None
        ]

    @override
    def plan(self, attention: Attention, num_new: int, dtype: torch.dtype) -> list[Any]:
        """Note nothing: the slots of proposals are among those that are read."""
        return super(DynamicCache, self).plan(attention, num_new, dtype)

    @override
    def select(self, layer: int, q_BTHD: Tensor, attention: Attention, plan: Any) -> Tensor:
        """Return the last selection, and the latest tokens."""
        return self.read_LBKN[layer, ..., : self.budget]

    @override
    def reads(self, layer: int) -> Reads | None:
        return Reads(indices_BKN=self.read_LBKN[layer])

    @override
    def attend(self, layer: int, q_BTHD: Tensor, attention: Attention, plan: Any) -> Tensor:
        return attention.attend(
            q_BTHD, self.k_LBKSD[layer], self.v_LBKSD[layer], plan, self.read_LBKN[layer]
        )

    @override
    def reselect(self, attention: Attention) -> None:
        """Select as one round does, by scores that the verification has computed."""
        if self._observed is not None:
            self._refresh(self._observed.scores_LBKS, attention.select_largest)

    def _refresh(
        self, scores_LBKS: Tensor, select_largest: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    ) -> None:
        """Choose among the entries before the recent ones, of what each layer still sees."""
        layers = range(len(self.read_LBKN))
        count = self.budget - self.window
        first_LB = torch.stack([self.first_seen_B(layer, self.length_B) for layer in layers])
        older_B1 = self.length_B[:, None] - self.window
        self.read_LBKN[..., :count] = select_largest(
            scores_LBKS, first_LB[..., None], older_B1, count
        )
