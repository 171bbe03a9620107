"""Attention in Triton: the kernels of split-KV decoding and verification, which read K and V once.

B rows, T new tokens, H query heads over K KV heads, J = H / K, R = J x T query rows that share a KV
head, S slots, D head dim, N selected slots.

A program takes one KV head of one row, one split of its slots, and one tile of its R query rows. A
verification is a single tile. A prefill has many, each of which ends where its last token does; the
tiles of a head come first in the grid, so that they run at the same time and only one of them reads
K and V from memory, the others from the L2 cache. Blocks that all of a tile's query rows see are
attended without masks, in a loop of their own: with masks, issuing the instructions takes longer
than the matmuls. Lengths are read on the device, so that shapes are static and a pass can be
captured. Several splits are merged by a second kernel, by their log-sum-exp (in powers of two).
Scores of slots, where a pass returns them, are written out in half precision, 2 R bytes a slot in
addition to the 4 D of K and V, and summed by a third kernel (received_scores.py).
"""

import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret
LARGEST = tl.constexpr(60000.0)  # that fp16 holds: powers of two of scores


@triton.jit
def out_row(head, r, T, K: tl.constexpr, J: tl.constexpr):
    """Return where query row r of a KV head of a row lies among the rows of (B, T, H, D)."""
    token = (head // K).to(tl.int64) * T + r % T
    query_head = (head % K) * J + r // T
    return token * K * J + query_head


@triton.jit
def weigh(most, total, scores, scale):
    """Take a block's scores, which are yet to be scaled, into a running softmax: each row's highest
    score and sum of weights. Return them, what earlier sums are worth, and the block's weights.
    """
    highest = tl.maximum(most, tl.max(scores, 1) * scale)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    p = tl.exp2(scores * scale - base[:, None])
    decay = tl.exp2(most - base)
    return highest, total * decay + tl.sum(p, 1), decay, p


@triton.jit
def capped(scores, softcap):
    """Return c tanh(s / c) of scores s and a soft cap c, both in powers of two."""
    # e^(2 s / c), with s in its own unit: 2 log2(e) / c. A large one makes the share 1.
    power = tl.exp2(scores * (2 * 1.4426950408889634 / softcap))
    return softcap * (1 - 2 / (power + 1))


@triton.jit
def fold(most, total, sums, scores, scale, v_tile):
    """Take a block's scores and values into a running softmax and its sums."""
    most, total, decay, p = weigh(most, total, scores, scale)
    sums = sums * decay[:, None] + tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
    return most, total, sums


@triton.jit(do_not_specialize=["num_splits", "num_indices", "reach"])
def attend_split(  # noqa: C901, PLR0912, PLR0915
    q,
    k,
    v,
    seqlens,
    indices,
    positions,  # (B, K, S), contiguous: where the window finds each slot; None: in its place
    out,  # (B, T, H, D), contiguous: of the only split
    partial,  # (B x K, splits, R, D), fp32: of several
    lse,  # (B x K, splits, R), fp32: of several splits, or with scores
    raw,  # scores in powers of two, of the slots that a query row sees: (B x K, R, S), or with
    # ENDS_ALONE (B x K, 2 J, S), of two tokens of each query head
    sinks,  # (H), fp32: logits in powers of two that take weight and add nothing; None: none
    T,
    S,
    num_splits,
    num_indices,
    reach,  # tokens that one sees, itself included; None: all before it
    scale,  # of the scores, for powers of two
    softcap,  # that scores approach, in powers of two; None: none
    q_row,
    q_token,
    q_head,
    k_row,
    k_head,
    k_slot,
    v_row,
    v_head,
    v_slot,
    K: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SELECTED: tl.constexpr,
    SPLIT: tl.constexpr,
    SCORED: tl.constexpr,
    ENDS_ALONE: tl.constexpr,  # the first and the last of several tokens are scored
    SUMMED: tl.constexpr,  # the log-sum-exp is written
    UNMASKED: tl.constexpr,  # blocks that all query rows see are attended first, without masks
    UPCAST: tl.constexpr,
):
    """Attend from one tile of query rows to one split of one KV head of one row."""
    tile, split, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, kv = (head // K).to(tl.int64), (head % K).to(tl.int64)
    r = tile * TILE + tl.arange(0, TILE)
    d = tl.arange(0, PADDED_D)
    seqlen = tl.load(seqlens + b)
    query = seqlen - T + r % T

    at_q = (
        q
        + b * q_row
        + (r % T).to(tl.int64)[:, None] * q_token
        + (kv * J + r // T)[:, None] * q_head
        + d[None, :]
    )
    q_tile = tl.load(at_q, mask=(r < J * T)[:, None] & (d < D)[None, :], other=0.0)
    if UPCAST:
        q_tile = q_tile.to(tl.float32)
    k += b * k_row + kv * k_head
    v += b * v_row + kv * v_head
    if SCORED:
        raw += head.to(tl.int64) * (2 * J if ENDS_ALONE else J * T) * S
        scored, at_raw = r < J * T, r
        if ENDS_ALONE:
            scored &= (r % T == 0) | (r % T == T - 1)
            at_raw = r // T * 2 + (r % T == T - 1)

    # A tile divides what its tokens can see, in whole blocks.
    first, last = tl.zeros((), tl.int32), tl.max(query, 0) + 1
    if reach is not None and positions is None:
        first = tl.maximum(tl.min(query, 0) + 1 - reach, 0)
    if SELECTED:
        indices += head.to(tl.int64) * num_indices
        first, last = first * 0, num_indices
    length = tl.cdiv(tl.cdiv(last - first, num_splits), BLOCK) * BLOCK
    start = first + split * length
    end = tl.minimum(start + length, last)

    most = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    if sinks is not None:  # the first split counts them
        query_head = tl.minimum(kv * J + r // T, K * J - 1)
        most = tl.where(split == 0, tl.load(sinks + query_head), most)
        total += tl.where(split == 0, 1.0, 0.0)
    sums = tl.zeros([TILE, PADDED_D], tl.float32)
    CAPPED: tl.constexpr = softcap is not None
    # By which a block's scores are yet to be multiplied.
    left = scale if UNMASKED and not CAPPED else 1.0
    begin, until = start, start  # of the blocks that all query rows see
    if UNMASKED:
        if reach is not None:
            begin += tl.cdiv(tl.maximum(tl.max(query, 0) + 1 - reach - start, 0), BLOCK) * BLOCK
        until = (
            begin + tl.maximum(tl.minimum(end, tl.min(query, 0) + 1) - begin, 0) // BLOCK * BLOCK
        )
    for masked in tl.static_range(0 if UNMASKED else 1, 2):
        # The blocks on both sides of those are left for the second loop.
        for at in range(
            start if masked else begin, end - until + begin if masked else until, BLOCK
        ):
            slot = at + tl.arange(0, BLOCK)
            if UNMASKED and masked:
                slot += tl.where(at < begin, 0, until - begin)
            valid = slot < end
            if SELECTED:
                slot = tl.load(indices + slot, mask=valid, other=-1).to(tl.int32)
                valid = (slot >= 0) & (slot < seqlen)
            inside = (d < D)[None, :]
            if masked:
                inside &= valid[:, None]
            wide = slot.to(tl.int64)[:, None]
            k_tile = tl.load(k + wide * k_slot + d[None, :], mask=inside, other=0.0)
            v_tile = tl.load(v + wide * v_slot + d[None, :], mask=inside, other=0.0)
            if UPCAST:
                k_tile, v_tile = k_tile.to(tl.float32), v_tile.to(tl.float32)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
            # A verification: with both products in `fold`, it would need more registers.
            if not UNMASKED or CAPPED:
                scores *= scale
            if CAPPED:
                scores = capped(scores, softcap)
            if masked:
                seen = valid[None, :] & (slot[None, :] <= query[:, None])
                if reach is not None:
                    position = slot
                    if positions is not None:
                        position = tl.load(
                            positions + head.to(tl.int64) * S + slot, mask=valid, other=0
                        )
                    seen &= position[None, :] > query[:, None] - reach
                if SCORED:
                    kept = scores * left
                    if raw.dtype.element_ty == tl.float16:
                        kept = tl.minimum(kept, LARGEST)
                    kept = kept.to(raw.dtype.element_ty)
                    to = raw + (at_raw[:, None] * S + slot[None, :])
                    tl.store(to, kept, mask=seen & scored[:, None])
                scores = tl.where(seen, scores, float("-inf"))
            most, total, sums = fold(most, total, sums, scores, left, v_tile)

    total = tl.where(total > 0, total, 1.0)
    mean = sums / total[:, None]
    inside = (r < J * T)[:, None] & (d < D)[None, :]
    at = (head * num_splits + split).to(tl.int64) * (J * T) + r
    if SUMMED:
        tl.store(lse + at, most + tl.log2(total), mask=r < J * T)
    if SPLIT:
        tl.store(partial + at[:, None] * D + d[None, :], mean, mask=inside)
    else:
        at = out_row(head, r, T, K, J)
        at_mean = out + at[:, None] * D + d[None, :]
        tl.store(at_mean, mean.to(out.dtype.element_ty), mask=inside)


@triton.jit
def merge_splits(
    partial,
    lse,
    out,
    T,
    num_splits,
    K: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merge the splits of ROWS query rows of one KV head of one row. Write their log-sum-exp over
    the first split's.
    """
    head = tl.program_id(0)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split, d = tl.arange(0, PADDED_SPLITS), tl.arange(0, PADDED_D)
    at = (head * num_splits + split[None, :]).to(tl.int64) * (J * T) + r[:, None]
    there = (split < num_splits)[None, :] & (r < J * T)[:, None]
    lses = tl.load(lse + at, mask=there, other=float("-inf"))
    most = tl.max(lses, 1)
    weights = tl.exp2(lses - tl.where(most == float("-inf"), 0.0, most)[:, None])
    inside = there[:, :, None] & (d < D)[None, None, :]
    parts = tl.load(partial + at[:, :, None] * D + d[None, None, :], mask=inside, other=0.0)
    total = tl.sum(weights, 1)
    weighted = tl.sum(parts * weights[:, :, None], 1)
    merged = weighted / tl.where(total > 0, total, 1.0)[:, None]
    at_out = out + out_row(head, r, T, K, J)[:, None] * D + d[None, :]
    exists = (r < J * T)[:, None] & (d < D)[None, :]
    tl.store(at_out, merged.to(out.dtype.element_ty), mask=exists)
    tl.debug_barrier()  # all are read
    at_lse = lse + head.to(tl.int64) * num_splits * (J * T) + r
    tl.store(at_lse, most + tl.log2(tl.where(total > 0, total, 1.0)), mask=r < J * T)
