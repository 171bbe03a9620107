"""Quest: pages selected by a bound on the attention to them (Tang et al. 2024, arXiv 2406.10774).

L layers, B rows, T new tokens, H query heads, D head dim, K KV heads, Q = T * H / K queries of a KV
head, S slots, P pages, E entries of a page, N selected slots, W tokens committed at a time.
"""

from math import ceil
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic.dataclasses import dataclass
from torch import Tensor
from typing_extensions import override

from magicdec.architectures.model_config import ModelConfig
from magicdec.attention.base import Attention, PageBounds
from magicdec.cache.dynamic import DynamicCache
from magicdec.config.choices import CacheConfig, CacheSpec
from magicdec.config.registry import POLICIES
from magicdec.inputs.rules import STRICT, Count
from magicdec.models.kv_cache import KVCache


@dataclass(frozen=True, config=STRICT)
class Quest(CacheConfig):
    """Pages of `page_size` entries, selected in every step by a bound on their attention."""

    policy: str = "quest"
    page_size: Count = 16
    selects = "step"

    def num_pages(self, spec: CacheSpec) -> int:
        """Return the pages of `page_size` entries, or smaller ones for a smaller budget, that cover
        the capacity.
        """
        return ceil(spec.capacity / min(self.page_size, spec.kept))

    @override
    def extra_bytes(self, spec: CacheSpec, model: ModelConfig, element_bytes: float) -> float:
        """Count the least and the largest key of every page: as much as a key and a value."""
        return model.kv_elements_per_token * self.num_pages(spec) * element_bytes

    selection_bytes = extra_bytes


@POLICIES.register(Quest)
class QuestCache(DynamicCache):
    """Pages of `page_size` entries whose keys lie within known bounds; each step reads budget /
    page_size pages.

    A page's largest possible product with a query follows from the least and the largest value of
    each feature, so that 2 / page_size of the keys are read to select. The last page is always
    read, as in the authors' kernels: the latest tokens receive much attention, and few of them have
    a low bound. Queries that share a KV head (the paper's models have none) select by the sum of
    their softmax over the bounds. The paper leaves the first two layers dense; here all of them
    select. A budget below page_size makes smaller pages.
    """

    settings: Quest
    per_row: ClassVar[dict[str, int]] = {
        **DynamicCache.per_row,
        "least_LBKPD": 1,
        "largest_LBKPD": 1,
    }

    @override
    def set_up(self) -> None:
        super().set_up()
        config, spec = self.config, self.spec
        self.page_size = min(self.settings.page_size, self.budget)
        total = self.settings.num_pages(spec)
        self.num_pages = (
            total if spec.cache.budget >= spec.max_len else self.budget // self.page_size
        )
        shape = (config.num_layers, self.num_rows, config.num_kv_heads, total, config.head_dim)
        self.least_LBKPD, self.largest_LBKPD = (
            self.k_LBKSD.new_zeros(shape),
            self.k_LBKSD.new_zeros(shape),
        )

    @override
    def plan(self, attention: Attention, num_new: int, dtype: torch.dtype) -> list[Any]:
        windows = [self.config.window_of(layer) for layer in range(self.config.num_layers)]
        first_seen = {
            window: self.first_seen_B(windows.index(window), self.seqlens_B)
            for window in set(windows)
        }
        self._first_seen = [first_seen[window] for window in windows]
        return super().plan(attention, num_new, dtype)

    @override
    def select(self, layer: int, q_BTHD: Tensor, attention: Attention, plan: Any) -> Tensor:
        bounds = PageBounds(self.least_LBKPD[layer], self.largest_LBKPD[layer], self.page_size)
        return attention.select_pages(
            q_BTHD, bounds, self._first_seen[layer], self.length_B, self.num_pages
        )

    @override
    def load(self, source: KVCache, scores_LBKS: Tensor | None = None) -> None:
        """Compute the bounds of all pages."""
        super().load(source, scores_LBKS)
        total = self.least_LBKPD.shape[3]
        size = self.page_size
        behind_BS = (
            torch.arange(total * size, device=self.length_B.device) >= self.length_B[:, None]
        )
        for layer in range(self.config.num_layers):
            k_BKSD = self.k_LBKSD[layer][:, :, : total * size]
            k_BKSD = F.pad(k_BKSD, (0, 0, 0, total * size - k_BKSD.shape[2]))
            for bound_LBKPD, sign in ((self.least_LBKPD, -1), (self.largest_LBKPD, 1)):
                masked = k_BKSD.masked_fill(behind_BS[:, None, :, None], -sign * float("inf"))
                pages = masked.unflatten(2, (total, size))
                bound_LBKPD[layer] = pages.amin(3) if sign < 0 else pages.amax(3)

    @override
    def take(self, source: KVCache, first_slot_B: Tensor, count_B: Tensor, width: int) -> None:
        """Widen the bounds of the pages by the new entries."""
        index_W = torch.arange(width, device=count_B.device)
        slot_BW = self.length_B.long()[:, None] + index_W
        new_LBKWD = self.k_LBKSD[:, self._rows_B1, :, slot_BW].permute(2, 0, 3, 1, 4)
        rejected = (index_W >= count_B[:, None])[:, None, :, None]
        page_LBKWD = (slot_BW // self.page_size)[:, None, :, None].expand(new_LBKWD.shape)
        for bound_LBKPD, name, ignored in (
            (self.least_LBKPD, "amin", float("inf")),
            (self.largest_LBKPD, "amax", -float("inf")),
        ):
            bound_LBKPD.scatter_reduce_(
                3, page_LBKWD, new_LBKWD.masked_fill(rejected, ignored), name
            )
        super().take(source, first_slot_B, count_B, width)
