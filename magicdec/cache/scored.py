"""The common part of compact caches whose entries are selected by the attention that they received.

L layers, B rows, K KV heads, S slots, F slots to select.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from magicdec.cache.compact import CompactCache
from magicdec.models.kv_cache import KVCache


class ScoredCache(CompactCache):
    """The entries with the highest scores, and recent tokens."""

    pooling: int = 1  # neighbours that a score is averaged over

    @override
    def select(self, layer: int, source: KVCache, scores_LBKS: Tensor | None) -> Tensor:
        """Select the highest pooled scores before the recent tokens; what the layer no longer sees comes last."""
        assert scores_LBKS is not None
        slot_S = torch.arange(scores_LBKS.shape[-1], device=scores_LBKS.device)
        recent_B1S = (slot_S >= source.seqlens_B[:, None] - self.window)[:, None]
        unseen_B1S = (slot_S < source.first_seen_B(layer, source.seqlens_B)[:, None])[:, None]
        scores_BKS = scores_LBKS[layer].masked_fill(recent_B1S, 0.0)
        pooled_BKS = F.avg_pool1d(scores_BKS, self.pooling, stride=1, padding=self.pooling // 2)
        worth_BKS = pooled_BKS.masked_fill(unseen_B1S, -1.0).masked_fill(recent_B1S, -2.0)
        return worth_BKS.topk(self.num_fixed, dim=-1).indices
