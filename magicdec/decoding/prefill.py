"""Prefill in chunks, so that memory stays bounded: the target's, and an independent draft's.

B rows, T tokens of a chunk, E hidden size. Rows may differ in length. A row that has ended writes
behind its valid slots, where the next token will overwrite it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from magicdec.cache.draft_cache import DraftCache
from magicdec.models.kv_cache import KVCache
from magicdec.models.taps import Taps
from magicdec.models.transformer import Transformer

# It is called with what was done since the last call: tokens of a chunk, or 1 for a round.
Advance = Callable[[int], None]


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
    """Fill an empty cache with the first `lengths_B` <= `longest` tokens of each row. Keep the
    queries of the last ones, if the cache was asked to.

    Return the hidden state (B, E) of each row's last token. Call `progress` with the number of
    tokens of each chunk.

    `taps` take hidden states; call `hear` with the first token of each chunk, as soon as they have
    those of the chunk.
    """
    rows_B = torch.arange(tokens_BS.shape[0], device=tokens_BS.device)
    last_BE = None
    queries = cache.queries_for(model.attention, lengths_B)
    for start in range(0, longest, chunk):
        tokens_BT = tokens_BS[:, start : min(start + chunk, longest)]
        num_new = tokens_BT.shape[1]
        count_B = (lengths_B - start).clamp(0, num_new)
        cache.count_B = count_B
        if queries is not None:
            queries.open(start, num_new)
        hidden_BTE = model(tokens_BT, cache, taps)
        cache.count_B = None
        if queries is not None:
            queries.close()
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


def simulate(model: Transformer, cache: KVCache, lengths_B: Tensor) -> None:
    """Fill a cache with noise, and the queries that it keeps, instead of a prefill: for timing
    only. Entries of zeros would all be alike.
    """
    cache.simulate()
    queries = cache.queries_for(model.attention, lengths_B)
    if queries is not None:
        queries.simulate()
