"""H2O: heavy hitters, the entries with the most attention so far (Zhang et al. 2023, arXiv
2306.14048).

L layers, B rows, K KV heads, S slots of the source, C slots of this cache, D head dim, F heavy
hitters, W tokens committed at a time, G = gamma draft steps of a round.
"""

from typing import Any, ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from typing_extensions import override

from magicdec.architectures.model_config import ModelConfig
from magicdec.attention.base import Attention
from magicdec.cache.compact import ScoredCache
from magicdec.config.choices import FP32, CacheConfig, CacheSpec, all_kv_heads
from magicdec.config.registry import POLICIES
from magicdec.inputs.rules import STRICT
from magicdec.models.kv_cache import KVCache, Reads


@dataclass(frozen=True, config=STRICT)
class H2O(CacheConfig):
    """The entries with the most attention so far, and recent tokens."""

    policy: str = "h2o"
    compact = replays = True
    selects, scores = "prefill", "step"

    @override
    def observed(self, spec: CacheSpec) -> int:
        """Return the whole context."""
        return spec.max_len

    @override
    def extra_bytes(self, spec: CacheSpec, model: ModelConfig, element_bytes: float) -> float:
        """Count a score for every slot, and one for each draft step of a round."""
        return all_kv_heads(model) * (spec.kept + spec.gamma + 1) * (1 + spec.gamma) * FP32


@POLICIES.register(H2O)
class H2OCache(ScoredCache):
    """Half of the budget for the entries with the largest accumulated attention, half for recent
    tokens, but at least gamma + 1 recent ones.

    At the prefill, every token of the context scores it, which takes a second pass over the prompt.
    Then the draft's own steps add to the scores, except those of rejected proposals. A token that
    leaves the window replaces the lightest heavy hitter if its score is higher. Evicted entries are
    lost. The authors evict after every token; here, after every round. The last proposal of a round
    adds no scores, because the draft has not fed it.
    """

    per_row: ClassVar[dict[str, int]] = {
        **ScoredCache.per_row,
        "scores_LBKC": 1,
        "step_scores_GLBKC": 2,
    }

    @override
    def set_up(self) -> None:
        super().set_up()
        self.observes = self.spec.cache.observed(self.spec)
        self.scores_LBKC = torch.zeros(
            self.k_LBKSD.shape[:4], dtype=torch.float32, device=self.k_LBKSD.device
        )
        self.step_scores_GLBKC = self.scores_LBKC.new_zeros(
            self.spec.gamma, *self.scores_LBKC.shape
        )
        self._step, self._has_attended = 0, False

    @override
    def fixed_slots(self, budget: int) -> int:
        return max(0, budget - self.spec.num_recent(self.spec.cache.budget))

    @override
    def keep(
        self, layer: int, source: KVCache, from_BKS: Tensor, scores_LBKS: Tensor | None
    ) -> None:
        """Copy the entries' scores, too."""
        super().keep(layer, source, from_BKS, scores_LBKS)
        assert scores_LBKS is not None
        self.scores_LBKC[layer][..., : self.budget] = scores_LBKS[layer].gather(2, from_BKS)

    @override
    def reads(self, layer: int) -> Reads | None:
        """Return None: `attend` keeps the scores of each step."""
        return None

    @override
    def attend(self, layer: int, q_BTHD: Tensor, attention: Attention, plan: Any) -> Tensor:
        """Count the last token alone: one that is fed again has been scored before."""
        k_BKSD = self.k_LBKSD[layer]
        v_BKSD = self.v_LBKSD[layer]
        counted_BT = torch.zeros(q_BTHD.shape[:2], dtype=torch.bool, device=q_BTHD.device)
        counted_BT[:, -1] = True
        out_BTHD, scores_BKC = attention.attend_scored(q_BTHD, k_BKSD, v_BKSD, plan, counted_BT)
        self.step_scores_GLBKC[self._step, layer, :, :, : scores_BKC.shape[-1]] = scores_BKC
        self._has_attended = True
        return out_BTHD

    @override
    def advance(self, num_new: int) -> None:
        """End a step if there was one: a block counts tokens before they attend."""
        super().advance(num_new)
        if self._has_attended:
            self._step += 1
            self._has_attended = False

    @override
    def take(self, source: KVCache, first_slot_B: Tensor, count_B: Tensor, width: int) -> None:
        """Add the scores of committed tokens: step i has fed one if more than i are committed.

        Under `draft=hierarchical`, a step may feed several tokens and scores the last of them, so
        that this is an approximation.
        """
        step_G1 = torch.arange(self.spec.gamma, device=count_B.device)[:, None]
        counted_GB = (step_G1 < count_B).float()
        self.scores_LBKC += torch.einsum("glbkc,gb->lbkc", self.step_scores_GLBKC, counted_GB)
        self._evict(count_B, width)
        super().take(source, first_slot_B, count_B, width)

    @override
    def set_length(self, length_B: Tensor) -> None:
        super().set_length(length_B)
        slot_C = torch.arange(self.capacity, device=length_B.device)
        behind_BC = slot_C >= self.committed_slots_B[:, None]
        self.scores_LBKC.masked_fill_(behind_BC[:, None], 0.0)
        self.step_scores_GLBKC.zero_()
        self._step, self._has_attended = 0, False

    def _evict(self, count_B: Tensor, width: int) -> None:
        """Let tokens that the window is about to lose compete with the heavy hitters, and note the
        new ones' scores.

        A row that has not outgrown its budget loses nothing, and its slots stay in order.
        """
        index_W = torch.arange(width, device=count_B.device)
        F = self.num_fixed
        committed_BW = index_W < count_B[:, None]
        position_BW = self.length_B.long()[:, None] + index_W
        slot_BW = self.ring_slots(position_BW)
        lost_BW = committed_BW & (position_BW >= self.budget)
        new_LBKW = self._of_slots(
            self.scores_LBKC, self.committed_slots_B.long()[:, None] + index_W
        )
        worth_LBKC = self._worth(self.length_B + count_B)
        lost_LBKW = self._of_slots(worth_LBKC, slot_BW).masked_fill(~lost_BW[:, None], -2.0)
        best = torch.cat((worth_LBKC[..., :F], lost_LBKW), dim=-1).topk(F, dim=-1)
        slot_BN = torch.cat(
            (torch.arange(F, device=count_B.device).expand(self.num_rows, -1), slot_BW), dim=1
        )
        slot_LBKN = slot_BN[:, None].expand(*best.indices.shape[:3], -1)
        winner_LBKF = slot_LBKN.gather(3, best.indices)
        winner_LBKF = torch.where(lost_BW.any(1)[:, None, None], winner_LBKF, slot_BN[:, None, :F])
        self.scores_LBKC[..., :F] = self.scores_LBKC.gather(3, winner_LBKF)
        winner_LBKFD = winner_LBKF[..., None].expand(*winner_LBKF.shape, self.config.head_dim)
        self.k_LBKSD[:, :, :, :F] = self.k_LBKSD.gather(3, winner_LBKFD)
        self.v_LBKSD[:, :, :, :F] = self.v_LBKSD.gather(3, winner_LBKFD)
        if self.positions_LBKS is not None:
            self.positions_LBKS[..., :F] = self.positions_LBKS.gather(3, winner_LBKF)
        trash_BW = torch.where(committed_BW, slot_BW, self.capacity - 1)
        self.scores_LBKC.scatter_(3, trash_BW[:, None].expand(new_LBKW.shape), new_LBKW)

    def _worth(self, position_B: Tensor) -> Tensor:
        """Return the scores (L, B, K, C), negative where a token at `position_B` no longer sees the
        slot.
        """
        if self.positions_LBKS is None:
            return self.scores_LBKC
        first_LB = torch.stack(
            [self.first_seen_B(layer, position_B) for layer in range(self.config.num_layers)]
        )
        return self.scores_LBKC.masked_fill(self.positions_LBKS < first_LB[..., None, None], -1.0)

    def _of_slots(self, scores_LBKC: Tensor, slot_BW: Tensor) -> Tensor:
        """Return the scores (L, B, K, W) of some slots."""
        slot_BW = slot_BW.clamp(max=self.capacity - 1)
        return scores_LBKC.gather(3, slot_BW[:, None].expand(*scores_LBKC.shape[:3], -1))
