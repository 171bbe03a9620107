"""The scoring pass: the last tokens of a context run again over its cache, to see which entries they attend to.

B rows, T tokens of a chunk, L layers, K KV heads, S slots.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from magicdec.models.kv_cache import KVCache
from magicdec.models.transformer import Transformer

MAX_CHUNK = 32  # the most that the C++ kernel takes; with more, scores take several times as long on a CPU


def score(
    model: Transformer,
    cache: KVCache,
    feed: Callable[[Tensor, KVCache], object],
    longest: int,
    last: int,
    progress: Callable[[int], None],
) -> Tensor:
    """Return the attention (L, B, K, S) that every entry receives from the last `last` tokens of each row.

    The cache holds the rows' first `cache.seqlens_B` <= `longest` tokens, and is left as it is. `feed` runs the model
    over tokens, by their indices (B, T), and a view of the cache. A row shorter than `last` is scored by all of its
    tokens. Call `progress` with the number of tokens of each chunk.
    """
    from magicdec.cache.observed import ReplayedCache  # few policies score

    view, lengths_B1 = ReplayedCache(cache), cache.seqlens_B.long()[:, None]
    width = min(last, longest)
    start_B1 = (lengths_B1 - width).clamp(min=0)
    per_token = cache.num_rows * model.config.num_heads * cache.capacity
    at_once = model.attention.scores_at_once(cache.k_LBKSD.dtype, model.config.head_dim)
    chunk = min(MAX_CHUNK, max(1, at_once // per_token))
    for done in range(0, width, chunk):
        index_BT = start_B1 + torch.arange(done, min(done + chunk, width), device=start_B1.device)
        view.counted_BT = index_BT < lengths_B1
        view.rollback(index_BT[:, 0])
        feed(index_BT, view)
        progress(index_BT.shape[1])
    return view.scores_LBKS
