"""The attention that slots received, in Triton: summed over query rows whose log-sum-exp is known.

`sum_scores` reads scores that attention has written, 2 R bytes a slot in half precision.
`score_keys` multiplies again, and reads keys alone: less than that where query rows are many. Where
there is no attention that has computed the log-sum-exp, `sum_keys` does, from keys alone, too.

B rows, T new tokens, H query heads over K KV heads, J = H / K, R = J x T query rows that share a KV
head, S slots, D head dim.
"""

import triton
import triton.language as tl

from magicdec.kernels.split_kv import capped, weigh


@triton.jit(do_not_specialize=["num_splits", "reach"])
def sum_keys(  # noqa: C901
    q,
    k,
    seqlens,
    positions,  # (B, K, S), as in attend_split
    lse,  # (B x K, splits, R), fp32: written
    T,
    S,
    num_splits,
    reach,  # tokens that one sees, itself included; None: all before it
    scale,  # of the scores, for powers of two
    softcap,  # that scores approach, in powers of two; None: none
    q_row,
    q_token,
    q_head,
    k_row,
    k_head,
    k_slot,
    K: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Write the log-sum-exp of one tile of query rows over one split of the slots of one KV head of
    one row. Tiles of a head come first in the grid: one of them reads the keys from memory.
    """
    split, head = tl.program_id(1), tl.program_id(2).to(tl.int64)
    b, kv = head // K, head % K
    r, d = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, PADDED_D)
    query = tl.load(seqlens + b) - T + r % T
    at_row = (r % T).to(tl.int64) * q_token + (kv * J + r // T) * q_head
    some = (r < J * T)[:, None] & (d < D)[None, :]
    q_tile = tl.load(q + b * q_row + at_row[:, None] + d[None, :], some, 0.0)
    if UPCAST:
        q_tile = q_tile.to(tl.float32)
    k += b * k_row + kv * k_head

    first, last = tl.zeros((), tl.int32), tl.max(query, 0) + 1
    if reach is not None and positions is None:
        first = tl.maximum(tl.min(query, 0) + 1 - reach, 0)
    length = tl.cdiv(tl.cdiv(last - first, num_splits), BLOCK) * BLOCK
    start = first + split * length
    end = tl.minimum(start + length, last)
    most = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    CAPPED: tl.constexpr = softcap is not None
    left = 1.0 if CAPPED else scale  # by which scores are yet to be multiplied
    until = start  # blocks that all query rows see come first, without masks
    if reach is None:
        visible = tl.minimum(end, tl.min(query, 0) + 1) - start
        until += tl.maximum(visible, 0) // BLOCK * BLOCK
    for masked in tl.static_range(2):
        for at in range(until if masked else start, end if masked else until, BLOCK):
            slot = at + tl.arange(0, BLOCK)
            inside = (d < D)[None, :]
            if masked:
                inside &= (slot < end)[:, None]
            at_k = k + slot.to(tl.int64)[:, None] * k_slot + d[None, :]
            k_tile = tl.load(at_k, inside, 0.0)
            if UPCAST:
                k_tile = k_tile.to(tl.float32)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
            if CAPPED:
                scores = capped(scores * scale, softcap)
            if masked:
                seen = (slot < end)[None, :] & (slot[None, :] <= query[:, None])
                if reach is not None:
                    position = slot
                    if positions is not None:
                        position = tl.load(positions + head * S + slot, mask=slot < end, other=0)
                    seen &= position[None, :] > query[:, None] - reach
                scores = tl.where(seen, scores, float("-inf"))
            most, total, _, _ = weigh(most, total, scores, left)
    at_lse = lse + (head * num_splits + split) * (J * T) + r
    tl.store(at_lse, most + tl.log2(tl.where(total > 0, total, 1.0)), mask=r < J * T)


@triton.jit(do_not_specialize=["num_splits", "reach"])
def score_keys(
    q,
    k,
    lse,  # (B x K, splits, R), fp32: the first split's, over all of them
    seqlens,
    positions,  # (B, K, S), as in attend_split
    counted,  # (B, T), contiguous: whose attention is summed; None: every token's
    out,  # (B, K, S), fp32, contiguous
    T,
    S,
    num_splits,
    reach,  # tokens that one sees, itself included; None: all before it
    scale,  # of the scores, for powers of two
    softcap,  # that scores approach, in powers of two; None: none
    q_row,
    q_token,
    q_head,
    k_row,
    k_head,
    k_slot,
    K: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Sum what BLOCK slots of one KV head of one row receive, a tile of tokens at a time."""
    head = tl.program_id(1).to(tl.int64)
    b, kv = head // K, head % K
    slot, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PADDED_D)
    seqlen, position = tl.load(seqlens + b), slot
    if positions is not None:
        position = tl.load(positions + head * S + slot, mask=slot < S, other=0)
    valid = slot < seqlen
    k += b * k_row + kv * k_head
    at_k = k + slot.to(tl.int64)[:, None] * k_slot + d[None, :]
    k_tile = tl.load(at_k, valid[:, None] & (d < D)[None, :], 0.0)
    if UPCAST:
        k_tile = k_tile.to(tl.float32)
    q += b * q_row + kv * J * q_head + d[None, :]
    lse += head * num_splits * (J * T)
    sums = tl.zeros([BLOCK], tl.float32)
    # Query heads one after another: rows need no division by T.
    last = tl.where(tl.program_id(0) * BLOCK < seqlen, J, 0)
    for j in range(last):
        for first in range(0, T, TILE):
            t = first + tl.arange(0, TILE)
            inside = (t < T)[:, None] & (d < D)[None, :]
            q_tile = tl.load(q + t.to(tl.int64)[:, None] * q_token, inside, 0.0)
            if UPCAST:
                q_tile = q_tile.to(tl.float32)
            scores = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
            scores *= scale
            if softcap is not None:
                scores = capped(scores, softcap)
            total = tl.load(lse + j * T + t, t < T, float("inf"))
            if counted is not None:
                takes = tl.load(counted + b * T + t, t < T, 0) != 0
                total = tl.where(takes, total, float("inf"))
            query = seqlen - T + t
            seen = slot[:, None] <= query[None, :]
            if reach is not None:
                seen &= position[:, None] > query[None, :] - reach
            sums += tl.sum(tl.where(seen, tl.exp2(scores - total[None, :]), 0.0), 1)
        q += q_head
    tl.store(out + head * S + slot, sums, mask=slot < S)


@triton.jit
def sum_scores(
    raw,  # (B x K, R or 2 J, S), as in attend_split
    lse,  # (B x K, splits, R), fp32: the first split's, over all of them
    seqlens,
    positions,  # (B, K, S), as in attend_split
    counted,  # (B, T), contiguous: whose attention is summed; None: every token's
    out,  # (B, K, S), fp32, contiguous
    T,
    S,
    num_splits,
    reach,  # tokens that one sees, itself included; None: all before it
    K: tl.constexpr,
    J: tl.constexpr,
    BLOCK: tl.constexpr,
    ENDS_ALONE: tl.constexpr,  # as in attend_split
):
    """Sum the attention that BLOCK slots of one KV head of one row received from its query rows."""
    head = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seqlen, position = tl.load(seqlens + head // K), slot
    if positions is not None:
        position = tl.load(positions + head * S + slot, mask=slot < S, other=0)
    sums = tl.zeros([BLOCK], tl.float32)
    num_rows = 2 * J if ENDS_ALONE else J * T
    for i in range(num_rows):
        r = i
        if ENDS_ALONE:
            r = i // 2 * T + i % 2 * (T - 1)
        query = seqlen - T + r % T
        seen = (slot < S) & (slot <= query)
        if reach is not None:
            seen &= position > query - reach
        total = tl.load(lse + head * num_splits * (J * T) + r)
        at_raw = raw + (head * num_rows + i) * S + slot
        scores = tl.load(at_raw, mask=seen, other=float("-inf")).to(tl.float32)
        # A row that sees nothing has no sum.
        weights = tl.where(seen, tl.exp2(scores - total), 0.0)
        if counted is not None:
            counts = tl.load(counted + head // K * T + r % T)
            weights = tl.where(counts != 0, weights, 0.0)
        sums += weights
    tl.store(out + head * S + slot, sums, mask=slot < S)
