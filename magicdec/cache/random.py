"""Entries chosen by chance: the control that every policy which looks at the text or at attention
must beat.

B rows, S slots of the source, F fixed slots.
"""

from collections.abc import Iterator

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from typing_extensions import override

from magicdec.cache.compact import CompactCache
from magicdec.config.choices import CacheConfig, mistakes_of_sinks
from magicdec.config.registry import POLICIES
from magicdec.inputs.rules import STRICT, Count, Natural, Size
from magicdec.models.kv_cache import KVCache
from magicdec.verification.sampling import Sampling, Use, uniform_BT

# Between the random numbers of two layers: more than any sequence has tokens.
LAYER_STRIDE = 1 << 32


@dataclass(frozen=True, config=STRICT)
class Random(CacheConfig):
    """The first `num_sink` tokens, the `recent` latest ones, and a random choice of the prompt's
    others.
    """

    policy: str = "random"
    num_sink: Size = 0
    recent: Count = 32
    seed: Natural = 0
    compact = True

    @override
    def mistakes(self, key: str) -> Iterator[str]:
        return mistakes_of_sinks(key, self.budget, self.num_sink)


@POLICIES.register(Random)
class RandomCache(CompactCache):
    """Sinks, entries drawn without replacement at the prefill, and a ring of recent tokens.

    Recent tokens take at most half the budget, but at least gamma + 1 entries. Sinks are kept as
    far as these leave room for them. Each layer draws for itself, and all its KV heads keep the
    same entries. A draw is a pure function of `seed`, the sequence's place in the run, the layer
    and the position, so that it depends neither on the batch nor on the device.
    """

    settings: Random

    @override
    def fixed_slots(self, budget: int) -> int:
        return max(0, budget - self.spec.num_recent(self.settings.recent))

    @override
    def select(self, layer: int, source: KVCache, scores_LBKS: Tensor | None) -> Tensor:
        """Select the sinks and the positions with the largest random numbers; what the layer no
        longer sees is last.
        """
        num_sink = min(self.settings.num_sink, self.num_fixed)
        slot_S = torch.arange(source.capacity, device=source.seqlens_B.device)
        number_BS = self._numbers_BS(layer, slot_S)
        unseen_BS = slot_S < source.first_seen_B(layer, source.seqlens_B)[:, None]
        kept_BS = (slot_S < num_sink) | (slot_S >= source.seqlens_B[:, None] - self.window)
        worth_BS = number_BS.masked_fill(unseen_BS, -1.0).masked_fill(kept_BS, -2.0)
        drawn_BF = worth_BS.topk(self.num_fixed - num_sink, dim=-1).indices
        sinks_BF = slot_S[:num_sink].expand(len(drawn_BF), -1)
        return torch.cat((sinks_BF, drawn_BF), dim=-1)[:, None]

    def _numbers_BS(self, layer: int, slot_S: Tensor) -> Tensor:
        """Return a random number in [0, 1) for each row and position."""
        stream = Sampling(seed=self.settings.seed, sequence=self.spec.sequence)
        positions_BS = (slot_S + layer * LAYER_STRIDE).repeat(self.num_rows, 1)
        return uniform_BT(stream, positions_BS, Use.KEEP)
