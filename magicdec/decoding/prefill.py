"""Prefill in chunks, so that memory stays bounded: the target's, and an independent draft's. The
scoring pass: the last tokens of a context run again over its cache, to see which entries they
attend to.

B rows, T tokens of a chunk, E hidden size, L layers, K KV heads, S slots. Rows may differ in
length. A row that has ended writes behind its valid slots, where the next token will overwrite it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from magicdec.cache.draft_cache import DraftCache
from magicdec.models.kv_cache import KVCache
from magicdec.models.taps import Taps
from magicdec.models.transformer import Transformer

Advance = Callable[[int], None]  # is called with the number of tokens that are done


def prefill(
    model: Transformer,
    cache: KVCache,
    tokens_BS: Tensor,
    lengths_B: Tensor,
    longest: int,
    chunk: int,
    progress: Advance | None = None,
    taps: Taps | None = None,
    hear: Callable[[int], None] | None = None,
) -> Tensor:
    """Fill an empty cache with the first `lengths_B` <= `longest` tokens of each row.

    Return the hidden state (B, E) of each row's last token. Call `progress` with the number of
    tokens of each chunk.

    `taps` take hidden states; call `hear` with the first token of each chunk, as soon as they have
    those of the chunk.
    """
    rows_B = torch.arange(tokens_BS.shape[0], device=tokens_BS.device)
    last_BE = None
    for start in range(0, longest, chunk):
        tokens_BT = tokens_BS[:, start : min(start + chunk, longest)]
        num_new = tokens_BT.shape[1]
        count_B = (lengths_B - start).clamp(0, num_new)
        cache.count_B = count_B
        hidden_BTE = model(tokens_BT, cache, taps)
        cache.count_B = None
        if hear is not None:
            hear(start)
        if isinstance(cache, DraftCache):
            cache.take(cache, cache.committed_slots_B, count_B, num_new)
        ends_here_B1 = ((count_B > 0) & (lengths_B <= start + num_new))[:, None]
        at_last_BE = hidden_BTE[rows_B, (count_B.long() - 1).clamp(min=0)]
        last_BE = at_last_BE if last_BE is None else torch.where(ends_here_B1, at_last_BE, last_BE)
        if progress is not None:
            progress(num_new)
    if not isinstance(cache, DraftCache):
        cache.mark(lengths_B)
    assert last_BE is not None
    return last_BE


def score(
    model: Transformer,
    cache: KVCache,
    feed: Callable[[Tensor, KVCache], object],
    longest: int,
    last: int,
    progress: Advance | None = None,
) -> Tensor:
    """Return the attention (L, B, K, S) that every entry receives from the last `last` tokens of
    each row.

    The cache holds the rows' first `cache.seqlens_B` <= `longest` tokens, and is left as it is.
    `feed` runs the model over tokens, by their indices (B, T), and a view of the cache. A row
    shorter than `last` is scored by all of its tokens. Call `progress` with the number of tokens of
    each chunk.
    """
    from magicdec.cache.observed import ReplayedCache  # few policies score

    view, lengths_B1 = ReplayedCache(cache), cache.seqlens_B.long()[:, None]
    width = min(last, longest)
    start_B1 = (lengths_B1 - width).clamp(min=0)
    per_token = cache.num_rows * model.config.num_heads * cache.capacity
    dtype, head_dim = cache.k_LBKSD.dtype, model.config.head_dim
    chunk = model.attention.scored_tokens(per_token, dtype, head_dim)
    for done in range(0, width, chunk):
        index_BT = start_B1 + torch.arange(done, min(done + chunk, width), device=start_B1.device)
        view.counted_BT = index_BT < lengths_B1
        view.rollback(index_BT[:, 0])
        feed(index_BT, view)
        if progress is not None:
            progress(index_BT.shape[1])
    return view.scores_LBKS
