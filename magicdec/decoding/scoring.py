"""Scores of a prefilled context: the attention that its entries receive from its last tokens.

B rows, T tokens at a time, L layers, K KV heads, S slots.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from magicdec.attention.base import Attention
from magicdec.cache.observed import ReplayedCache
from magicdec.decoding.prefill import Advance
from magicdec.errors import UserError
from magicdec.models.kv_cache import KVCache
from magicdec.models.last_queries import MOST_KEPT, LastQueries
from magicdec.models.transformer import Transformer


def score(
    model: Transformer,
    cache: KVCache,
    feed: Callable[[Tensor, KVCache], object],
    longest: int,
    last: int,
    progress: Advance | None = None,
) -> Tensor:
    """Return the attention (L, B, K, S) that every entry receives from the last `last` tokens of
    each row, which run again.

    The cache holds the rows' first `cache.seqlens_B` <= `longest` tokens, and is left as it is.
    `feed` runs the model over tokens, by their indices (B, T), and a view of the cache. A row
    shorter than `last` is scored by all of its tokens. Call `progress` with the number of tokens of
    each chunk. Raise UserError for a cache with recurrent states, which cannot go back to the
    first of these tokens.
    """
    if cache.states is not None:
        raise UserError(
            f"cache: the policy scores the context by running its last {last} tokens again, and"
            " recurrent layers cannot go back; choose one that scores by at most"
            f" {MOST_KEPT} tokens"
        )
    view = ReplayedCache(cache)
    for index_BT in _chunks(view, model.attention, longest, last):
        feed(index_BT, view)
        if progress is not None:
            progress(index_BT.shape[1])
    return view.scores_LBKS


def score_by_queries(
    queries: LastQueries,
    cache: KVCache,
    longest: int,
    last: int,
    progress: Advance | None = None,
) -> Tensor:
    """Return the same by the queries that the prefill has kept, and keys. A cache of fewer layers
    has the first ones.
    """
    view = ReplayedCache(cache)
    for index_BT in _chunks(view, queries.attention[0], longest, last):
        num_new = index_BT.shape[1]
        plans = view.plan(queries.attention[0], num_new, cache.k_LBKSD.dtype)
        for layer, plan in enumerate(plans):
            attention = queries.attention[layer]
            k_BKSD = cache.k_LBKSD[layer]
            q_BTHD = queries.of(layer, index_BT)
            view.receive(layer, attention.score_keys(q_BTHD, k_BKSD, plan, view.counted_BT))
        if progress is not None:
            progress(num_new)
    return view.scores_LBKS


def _chunks(view: ReplayedCache, attention: Attention, longest: int, last: int) -> Iterator[Tensor]:
    """Yield the indices (B, T) of the last tokens, some at a time. The view ends in front of them,
    and counts those that exist.
    """
    lengths_B1 = view.seqlens_B.long()[:, None]
    width = min(last, longest)
    start_B1 = (lengths_B1 - width).clamp(min=0)
    config = view.config
    per_token = view.num_rows * config.num_heads * view.capacity
    at_once = attention.scored_tokens(per_token, view.k_LBKSD.dtype, config.head_dim)
    for done in range(0, width, at_once):
        index_T = torch.arange(done, min(done + at_once, width), device=start_B1.device)
        index_BT = start_B1 + index_T
        view.counted_BT = index_BT < lengths_B1
        view.rollback(index_BT[:, 0])
        yield index_BT
