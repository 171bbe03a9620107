"""PyramidKV: SnapKV's selection, with budgets that fall from layer to layer (Cai et al. 2024, arXiv
2406.02069).

L layers, B rows, T tokens, K KV heads, S slots, D head dim.
"""

from dataclasses import replace
from typing import Any

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from typing_extensions import override

from magicdec.architectures.model_config import ModelConfig
from magicdec.attention.base import Attention
from magicdec.cache.draft_cache import DraftCache
from magicdec.cache.full import FullCache
from magicdec.cache.snapkv import SnapKV, SnapKVCache
from magicdec.config.choices import CacheSpec
from magicdec.config.registry import POLICIES
from magicdec.inputs.rules import STRICT, Count
from magicdec.models.kv_cache import KVCache, Place, Reads


@dataclass(frozen=True, config=STRICT)
class PyramidKV(SnapKV):
    """SnapKV with budgets that fall over the layers, in the last one to 1 / `beta` of their mean.

    As in the authors' code, a layer holds no more than the longest sequence, which leaves more to
    the later ones; and sequences below twice the budget, without its recent tokens, get the same
    budget in all layers.
    """

    policy: str = "pyramidkv"
    beta: Count = 20

    def window(self, spec: CacheSpec) -> int:
        """Return the recent tokens that every layer keeps."""
        return min(spec.num_recent(self.observation_window), self.budget)

    @override
    def budgets(self, spec: CacheSpec, num_layers: int) -> list[int]:
        """Return the same recent tokens for all layers, and a falling number of selected
        entries.
        """
        window = self.window(spec)
        mean = self.budget - window
        is_uniform = spec.max_len <= self.budget or spec.max_len < 2 * mean
        first = mean if is_uniform else min(2 * mean - mean / self.beta, spec.max_len - window)
        return [window + selected for selected in falling(mean, num_layers, first)]


class LayerCache(SnapKVCache):
    """The cache of one layer. All layers have rings of the same size, whatever their budgets."""

    @override
    def fixed_slots(self, budget: int) -> int:
        return max(0, budget - self.settings.observation_window)


@POLICIES.register(PyramidKV)
class PyramidKVCache(DraftCache):
    """A cache per layer. All keep the same recent tokens. The number of selected ones falls from
    about twice their mean in the first layer to 1 / `beta` of it in the last: attention is wide in
    early layers and narrow in late ones.

    `PyramidKV.budgets` is the schedule of the authors' code, which sets it by each prompt. Here the
    longest sequence of the batch sets it, because shapes are static, and the layers' budgets add up
    exactly.
    """

    settings: PyramidKV

    @override
    def set_up(self) -> None:
        super().set_up()
        self.observes = self.settings.observation_window
        dtype, device = self.k_LBKSD.dtype, self.k_LBKSD.device
        self.levels = [
            LayerCache.build(spec, layer, self.num_rows, dtype, device, None)
            for spec, layer in self.level_specs(self.spec, self.config)
        ]
        self._views: tuple[KVCache, list[KVCache]] | None = None

    @staticmethod
    def level_specs(spec: CacheSpec, config: ModelConfig) -> list[tuple[CacheSpec, ModelConfig]]:
        """Return what each layer's cache is built from."""
        settings = spec.cache
        assert isinstance(settings, PyramidKV)
        window = settings.window(spec)
        return [
            (
                replace(spec, cache=replace(settings, budget=budget, observation_window=window)),
                config.layers(i, i + 1),
            )
            for i, budget in enumerate(settings.budgets(spec, config.num_layers))
        ]

    @classmethod
    @override
    def num_slots(cls, spec: CacheSpec, shares_target: bool) -> int:
        """Return 0: the levels have slots of their own."""
        return 0

    @override
    def copy_row(self, row: int, source: KVCache) -> None:
        """Copy the row in all levels."""
        assert isinstance(source, PyramidKVCache)
        super().copy_row(row, source)
        for mine, theirs in zip(self.levels, source.levels, strict=True):
            mine.copy_row(row, theirs)

    @property
    @override
    def num_bytes(self) -> int:
        """Return the bytes of all levels, and of recurrent states."""
        return super().num_bytes + sum(level.num_bytes for level in self.levels)

    @override
    def positions_BT(self, num_new: int) -> Tensor:
        """Return the positions, which are the same in all levels."""
        return self.levels[0].positions_BT(num_new)

    @override
    def plan(self, attention: Attention, num_new: int, dtype: torch.dtype) -> list[Any]:
        """Plan every level by itself, because lengths differ."""
        for level in self.levels:
            level.resting_B = self.resting_B
        return [level.plan(attention, num_new, dtype)[0] for level in self.levels]

    @override
    def place(self, layer: int, slots_BT: Tensor) -> Place | None:
        """Return the level's own slots."""
        level = self.levels[layer]
        return level.place(0, level.slots_BT(slots_BT.shape[1]))

    @override
    def reads(self, layer: int) -> Reads | None:
        """Return None: the entries of each level are its own."""
        return None

    @override
    def attend(self, layer: int, q_BTHD: Tensor, attention: Attention, plan: Any) -> Tensor:
        return self.levels[layer].attend(0, q_BTHD, attention, plan)

    @override
    def advance(self, num_new: int) -> None:
        for level in self.levels:
            level.advance(num_new)
        if self.states is not None:  # of recurrent layers, which the levels do not have
            self.states.end_pass()

    @override
    def commit(self, num_appended: int, count_B: Tensor) -> None:
        for level in self.levels:
            level.commit(num_appended, count_B)
        if self.states is not None:
            self.states.commit(num_appended, count_B)

    @override
    def load(self, source: KVCache, scores_LBKS: Tensor | None = None) -> None:
        assert scores_LBKS is not None
        for i, (level, view) in enumerate(zip(self.levels, self._layers_of(source), strict=True)):
            level.load(view, scores_LBKS[i : i + 1])
        self.length_B.copy_(source.seqlens_B)

    @override
    def for_prefill(self, chunk: int) -> DraftCache:
        """Return a cache of everything, from which `adopt` selects."""
        return FullCache.like(self)

    @override
    def adopt(self, prefilled: DraftCache, scores_LBKS: Tensor | None = None) -> None:
        super().adopt(prefilled, scores_LBKS)
        self._views = None  # or they would keep all of a prefill's cache

    @override
    def take(self, source: KVCache, first_slot_B: Tensor, count_B: Tensor, width: int) -> None:
        first_B = first_slot_B.clone()  # it may be our own length
        for level, view in zip(self.levels, self._layers_of(source), strict=True):
            if source is self:
                level.take(level, level.committed_slots_B, count_B, width)
            else:
                level.take(view, first_B, count_B, width)
        self.length_B += count_B

    @override
    def set_length(self, length_B: Tensor) -> None:
        for level in self.levels:
            level.set_length(length_B)
        self.length_B.copy_(length_B)

    @property
    @override
    def committed_slots_B(self) -> Tensor:
        """Return the committed slots of the largest level."""
        return self.levels[0].committed_slots_B

    def _layers_of(self, source: KVCache) -> list[KVCache]:
        """Return views of single layers, made once per source."""
        if self._views is None or self._views[0] is not source:
            self._views = source, [source.view(i, i + 1) for i in range(self.config.num_layers)]
        return self._views[1]


def falling(mean: int, num_layers: int, first: float) -> list[int]:
    """Return whole numbers that fall evenly from `first` and add up to mean * num_layers."""
    step = 2 * (first - mean) / max(1, num_layers - 1)
    ends = [round((i + 1) * first - step * i * (i + 1) / 2) for i in range(num_layers)]
    ends[-1] = mean * num_layers
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
