"""Attention in Triton over a KV cache in 4 or 8 bits (attention/codes.py): codes first, then exact
entries.

B rows, T new tokens, H query heads over K KV heads, J = H / K, R = J x T query rows that share a KV
head, S slots, N tiles of 16 slots, D head dim, C bytes of codes per entry, G tokens of a group of
keys, F features of a group of values.

A program takes what one of split_kv.py takes. Features are read in two halves, because a byte of
4-bit codes has one of each. A block of slots lies within one group of keys, so that their scales
are read once for all of its slots.
"""

import triton
import triton.language as tl

from magicdec.kernels.split_kv import out_row, weigh


@triton.jit
def to_half(codes):
    """Return whole numbers below 1,024 in fp16: as the last bits of 1,024, which is then taken
    away.
    """
    return (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0


@triton.jit
def split_codes(at, apart, BITS: tl.constexpr, NUMBER: tl.constexpr):
    """Load words (X, Y) of four codes each. Return the codes (4 X, Y) as numbers: of the first half
    of the features and of the second, whose words are `apart` behind if a code is a byte.
    """
    X: tl.constexpr = at.shape[0]
    Y: tl.constexpr = at.shape[1]
    shift = (8 * tl.arange(0, 4))[None, :, None]
    first = tl.load(at)[:, None, :] >> shift
    if BITS == 4:
        second = first & 15
        first = first >> 4 & 15
    else:
        first = first & 255
        second = tl.load(at + apart)[:, None, :] >> shift & 255
    return to_half(tl.reshape(first, [4 * X, Y])).to(NUMBER), to_half(
        tl.reshape(second, [4 * X, Y])
    ).to(NUMBER)


@triton.jit
def load_pairs(at, NUMBER: tl.constexpr):
    """Load words (X, Y) of two numbers in half precision each, and return the numbers (2 X, Y)."""
    X: tl.constexpr = at.shape[0]
    Y: tl.constexpr = at.shape[1]
    pairs = tl.load(at)[:, None, :] >> (16 * tl.arange(0, 2))[None, :, None]
    return tl.reshape(pairs, [2 * X, Y]).to(tl.int16).to(tl.float16, bitcast=True).to(NUMBER)


@triton.jit
def decode_values(codes, at_scale, BLOCK: tl.constexpr, GROUPS: tl.constexpr, F: tl.constexpr):
    """Return half of the features of BLOCK values: codes by their scale, above the least value of
    their group.
    """
    codes = tl.reshape(codes, [BLOCK, GROUPS, F])
    scale, least = load_pairs(at_scale, codes.dtype), load_pairs(at_scale + 8, codes.dtype)
    return tl.reshape(codes * scale[:, :, None] + least[:, :, None], [BLOCK, GROUPS * F])


@triton.jit
def fold_halves(most, total, sums1, sums2, scores, v1, v2):
    """Take a block's scores and both halves of its values into a running softmax and its sums."""
    most, total, decay, p = weigh(most, total, scores, 1.0)
    p = p.to(v1.dtype)
    sums1 = sums1 * decay[:, None] + tl.dot(p, v1, input_precision="ieee")
    sums2 = sums2 * decay[:, None] + tl.dot(p, v2, input_precision="ieee")
    return most, total, sums1, sums2


@triton.jit(do_not_specialize=["num_splits"])
def attend_coded(  # noqa: PLR0915
    q,
    k,
    v,
    k_codes,  # (B x K, N, C / 4, 16), int32: four bytes of a slot are a word
    v_codes,  # (B x K, N, 4, C), int32: a byte of each of four slots is a word
    k_scales,  # (B x K, S / G, 2, D / 2), int32: scales and least values in fp16, two to a word
    v_scales,  # (B x K, N, D / F, 2, 8), int32, likewise
    seqlens,
    first_exact,  # (B,): slots before it are read as codes
    out,  # (B, T, H, D), contiguous: of the only split
    partial,  # (B x K, splits, R, D), fp32: of several
    lse,  # (B x K, splits, R), fp32: of several splits
    T,
    num_tiles,
    num_splits,
    scale,  # of the scores, for powers of two
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
    BITS: tl.constexpr,
    G: tl.constexpr,
    F: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend from one tile of query rows to one split of one KV head of one row."""
    HALF: tl.constexpr = D // 2
    BYTES: tl.constexpr = D * BITS // 8
    GROUPS: tl.constexpr = HALF // F
    tile, split, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, kv = (head // K).to(tl.int64), (head % K).to(tl.int64)
    r = tile * TILE + tl.arange(0, TILE)
    d, group = tl.arange(0, HALF), tl.arange(0, GROUPS)
    seqlen, coded = tl.load(seqlens + b), tl.load(first_exact + b)
    query = seqlen - T + r % T

    at_q = (
        q
        + b * q_row
        + (r % T)[:, None] * q_token
        + (kv * J + r // T)[:, None] * q_head
        + d[None, :]
    )
    some = (r < J * T)[:, None] & (d < HALF)[None, :]
    q1, q2 = tl.load(at_q, mask=some, other=0.0), tl.load(at_q + HALF, mask=some, other=0.0)
    if UPCAST:
        q1, q2 = q1.to(tl.float32), q2.to(tl.float32)
    # Scales are in fp16, so that keys and values of codes fit into it: two are computed at a time.
    NUMBER: tl.constexpr = tl.float32 if q1.dtype == tl.float32 else tl.float16
    coded_q1, coded_q2 = q1.to(NUMBER), q2.to(NUMBER)
    k += b * k_row + kv * k_head
    v += b * v_row + kv * v_head
    wide = head.to(tl.int64)
    k_codes += wide * num_tiles * 4 * BYTES
    v_codes += wide * num_tiles * 4 * BYTES
    k_scales += wide * (num_tiles * 16 // G) * D
    v_scales += wide * num_tiles * (D // F) * 16

    last = tl.max(query, 0) + 1
    length = tl.cdiv(tl.cdiv(last, num_splits), BLOCK) * BLOCK
    start = split * length
    end = tl.minimum(start + length, last)
    most = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    sums1 = tl.zeros([TILE, HALF], tl.float32)
    sums2 = tl.zeros([TILE, HALF], tl.float32)

    for at in range(start, tl.minimum(end, coded), BLOCK):
        slot = at + tl.arange(0, BLOCK)
        at_k = (
            k_codes
            + (slot // 16 * (4 * BYTES) + slot % 16)[None, :]
            + 16 * tl.arange(0, HALF // 4)[:, None]
        )
        k1, k2 = split_codes(at_k, 4 * HALF, BITS, NUMBER)
        at_scale = k_scales + at // G * D + tl.arange(0, HALF // 2)[:, None]
        k1 = k1 * load_pairs(at_scale, NUMBER) + load_pairs(at_scale + HALF, NUMBER)
        at_scale += HALF // 2
        k2 = k2 * load_pairs(at_scale, NUMBER) + load_pairs(at_scale + HALF, NUMBER)
        rows = at // 4 + tl.arange(0, BLOCK // 4)
        at_v = v_codes + rows[:, None] * BYTES + d[None, :]
        v1, v2 = split_codes(at_v, HALF, BITS, NUMBER)
        pair = at // 2 + tl.arange(0, BLOCK // 2)
        of_pair = pair // 8 * (D // F * 16) + pair % 8
        at_scale = v_scales + of_pair[:, None] + group[None, :] * 16
        v1 = decode_values(v1, at_scale, BLOCK, GROUPS, F)
        v2 = decode_values(v2, at_scale + GROUPS * 16, BLOCK, GROUPS, F)
        scores = tl.dot(coded_q1, k1, input_precision="ieee")
        scores = tl.dot(coded_q2, k2, scores, input_precision="ieee") * scale
        scores = tl.where(slot[None, :] <= query[:, None], scores, float("-inf"))
        most, total, sums1, sums2 = fold_halves(most, total, sums1, sums2, scores, v1, v2)

    for at in range(tl.maximum(start, coded), end, BLOCK):
        slot = at + tl.arange(0, BLOCK)
        valid = slot < end
        at_k = k + slot.to(tl.int64)[:, None] * k_slot + d[None, :]
        at_v = v + slot.to(tl.int64)[:, None] * v_slot + d[None, :]
        k1, k2 = (
            tl.load(at_k, mask=valid[:, None], other=0.0),
            tl.load(at_k + HALF, mask=valid[:, None], other=0.0),
        )
        v1, v2 = (
            tl.load(at_v, mask=valid[:, None], other=0.0),
            tl.load(at_v + HALF, mask=valid[:, None], other=0.0),
        )
        if UPCAST:
            k1, k2, v1, v2 = (
                k1.to(tl.float32),
                k2.to(tl.float32),
                v1.to(tl.float32),
                v2.to(tl.float32),
            )
        scores = tl.dot(q1, tl.trans(k1), input_precision="ieee")
        scores = tl.dot(q2, tl.trans(k2), scores, input_precision="ieee") * scale
        seen = valid[None, :] & (slot[None, :] <= query[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        most, total, sums1, sums2 = fold_halves(most, total, sums1, sums2, scores, v1, v2)

    total = tl.where(total > 0, total, 1.0)
    mean1, mean2 = sums1 / total[:, None], sums2 / total[:, None]
    if SPLIT:
        at = (head * num_splits + split).to(tl.int64) * (J * T) + r
        tl.store(lse + at, most + tl.log2(total), mask=r < J * T)
        at_out = partial + at[:, None] * D + d[None, :]
    else:
        at_out = out + out_row(head, r, T, K, J)[:, None] * D + d[None, :]
    tl.store(at_out, mean1.to(at_out.dtype.element_ty), mask=some)
    tl.store(at_out + HALF, mean2.to(at_out.dtype.element_ty), mask=some)
