"""SnapKV: what the end of the prompt attends to (Li et al. 2024, arXiv 2404.14469).

L layers, B rows, K KV heads, S slots, F slots to choose.
"""

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic.dataclasses import dataclass
from torch import Tensor

from magicdec.cache.compact import CompactCache
from magicdec.config.choices import CacheConfig
from magicdec.config.registry import POLICIES
from magicdec.models.kv_cache import KVCache
from magicdec.rules import STRICT, Count, must


@dataclass(frozen=True, config=STRICT)
class SnapKV(CacheConfig):
    """Entries that the last `observation_window` prompt tokens attend to; scores averaged over `kernel` neighbours."""

    policy: str = "snapkv"
    observation_window: Count = 32
    kernel: Annotated[int, must("must be an odd number of at least 1", lambda k: k >= 1 and k % 2 == 1)] = 5
    compact = True
    selects = "prefill"


@POLICIES.register(SnapKV)
class SnapKVCache(CompactCache):
    """The entries that the prompt's last `observation_window` tokens attend to most, and as many recent tokens.

    Scores are summed over the query heads of a KV head, so that each KV head keeps entries of its own, and averaged
    over `kernel` neighbours, so that a chosen one brings its surroundings. Recent tokens take half the budget at most.
    The choice is made once: what is generated afterwards passes through the ring of recent tokens. In the authors'
    code it adds to the budget, and each query head has entries of its own.
    """

    settings: SnapKV

    @property
    def observes(self) -> int:
        """See DraftCache.observes."""
        return self.settings.observation_window

    @property
    def pooling(self) -> int:
        """Return the number of neighbours that a score is averaged over."""
        return self.settings.kernel

    def fixed_slots(self, budget: int) -> int:
        """See CompactCache.fixed_slots."""
        return max(0, budget - self.spec.num_recent(self.settings.observation_window))

    def choose(self, layer: int, source: KVCache, scores_LBKS: Tensor | None) -> Tensor:
        """See CompactCache.choose: the highest pooled scores before the recent tokens. What the layer no longer sees
        is taken only where nothing else is left.
        """
        assert scores_LBKS is not None
        slot_S = torch.arange(scores_LBKS.shape[-1], device=scores_LBKS.device)
        recent_B1S = (slot_S >= source.seqlens_B[:, None] - self.window)[:, None]
        unseen_B1S = (slot_S < source.first_seen_B(layer, source.seqlens_B)[:, None])[:, None]
        scores_BKS = scores_LBKS[layer].masked_fill(recent_B1S, 0.0)
        pooled_BKS = F.avg_pool1d(scores_BKS, self.pooling, stride=1, padding=self.pooling // 2)
        worth_BKS = pooled_BKS.masked_fill(unseen_B1S, -1.0).masked_fill(recent_B1S, -2.0)
        return worth_BKS.topk(self.num_fixed, dim=-1).indices
