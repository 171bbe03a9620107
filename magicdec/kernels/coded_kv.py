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

# Four codes of 4 or 8 bits to the last bits of 1,024 in fp16: without asking which thread holds
# them, so that they stay in the registers where a dot wants them.
NIBBLES = tl.constexpr("""{
    .reg .b32 high, low;
    shr.u32 high, $4, 4;
    and.b32 high, high, 0x0f0f0f0f;
    and.b32 low, $4, 0x0f0f0f0f;
    prmt.b32 $0, high, 0x64646464, 0x4140;
    prmt.b32 $1, high, 0x64646464, 0x4342;
    prmt.b32 $2, low, 0x64646464, 0x4140;
    prmt.b32 $3, low, 0x64646464, 0x4342;
}""")
BYTES = tl.constexpr("""{
    prmt.b32 $0, $2, 0x64646464, 0x4140;
    prmt.b32 $1, $2, 0x64646464, 0x4342;
}""")


@triton.jit
def behind_1024(codes):
    """Return whole numbers below 1,024 in fp16, as the last bits of 1,024."""
    return (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)


@triton.jit
def load_codes(at, apart, there, BITS: tl.constexpr, NUMBER: tl.constexpr, PLAIN: tl.constexpr):
    """Return codes as numbers: of the first half of the features and of the second, whose bytes are
    `apart` behind if a code is a byte.
    """
    first = tl.load(at, there, 0)
    if BITS == 8:
        second = tl.load(at + apart, there, 0)
        if PLAIN:
            first, second = behind_1024(first), behind_1024(second)
        else:
            first = tl.inline_asm_elementwise(BYTES, "=r,=r,r", [first], tl.float16, True, 4)
            second = tl.inline_asm_elementwise(BYTES, "=r,=r,r", [second], tl.float16, True, 4)
    elif PLAIN:
        first, second = behind_1024(first >> 4), behind_1024(first & 15)
    else:
        first, second = tl.inline_asm_elementwise(
            NIBBLES, "=r,=r,=r,=r,r", [first], (tl.float16, tl.float16), True, 4
        )
    return (first - 1024.0).to(NUMBER), (second - 1024.0).to(NUMBER)


@triton.jit
def repeated(numbers, TIMES: tl.constexpr):
    """Return (X, Y) as (X, Y x TIMES): each number so many times in a row."""
    X: tl.constexpr = numbers.shape[0]
    Y: tl.constexpr = numbers.shape[1]
    if Y == 1:
        return tl.broadcast_to(numbers, [X, TIMES])
    return tl.reshape(tl.broadcast_to(numbers[:, :, None], [X, Y, TIMES]), [X, Y * TIMES])


@triton.jit
def scaled(codes, at, least, there, TIMES: tl.constexpr):
    """Return codes by their scales, above their least values, which lie `least` behind; each is of
    TIMES codes in a row.
    """
    scale = tl.load(at, there, 0.0).to(codes.dtype)
    above = tl.load(at + least, there, 0.0).to(codes.dtype)
    return codes * repeated(scale, TIMES) + repeated(above, TIMES)


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
    k_codes,  # (B x K, N, C / 4, 16, 4), uint8: four bytes of a slot lie together
    v_codes,  # (B x K, N, 4, C, 4), uint8: a byte of each of four slots lie together
    k_scales,  # (B x K, S / G, 2, D), fp16: scales and least values
    v_scales,  # (B x K, N, D / F, 2, 16), fp16, likewise
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
    BLOCK: tl.constexpr,  # slots that are read at a time as codes
    EXACT: tl.constexpr,  # and exactly
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend from one tile of query rows to one split of one KV head of one row."""
    HALF: tl.constexpr = D // 2
    C: tl.constexpr = D * BITS // 8
    GROUPS: tl.constexpr = HALF // F
    K_GROUPS: tl.constexpr = max(1, BLOCK // G)
    tile, split, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, kv = (head // K).to(tl.int64), (head % K).to(tl.int64)
    r = tile * TILE + tl.arange(0, TILE)
    d, s = tl.arange(0, HALF), tl.arange(0, BLOCK)
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
    # Offsets from a block's first codes and scales.
    first_code = wide * num_tiles * (16 * C)
    k_codes += first_code + (d // 4 * 64 + d % 4)[:, None]
    k_codes += (s // 16 * (16 * C) + s % 16 * 4)[None, :]
    v_codes += first_code + (s // 4 * (4 * C) + s % 4)[:, None]
    v_codes += 4 * d[None, :]
    k_scales += wide * (num_tiles * 16 // G) * (2 * D) + d[:, None]
    v_group = tl.arange(0, GROUPS)[None, :]
    v_scales += wide * num_tiles * (D // F * 32) + 32 * v_group
    v_scales += (s // 16 * (D // F * 32) + s % 16)[:, None]
    k_group = tl.arange(0, K_GROUPS)[None, :]

    last = tl.max(query, 0) + 1
    length = tl.cdiv(tl.cdiv(last, num_splits), BLOCK) * BLOCK
    start = split * length
    end = tl.minimum(start + length, last)
    most = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    sums1 = tl.zeros([TILE, HALF], tl.float32)
    sums2 = tl.zeros([TILE, HALF], tl.float32)

    until = tl.minimum(start + length, coded // 16 * 16)
    for at in range(start, until, BLOCK):
        slot = at + s
        there = slot < until
        k1, k2 = load_codes(k_codes + at * C, 16 * HALF, there[None, :], BITS, NUMBER, UPCAST)
        at_scale = k_scales + (at // G + k_group) * (2 * D)
        whole = at + k_group * G < until
        k1 = scaled(k1, at_scale, D, whole, BLOCK // K_GROUPS)
        k2 = scaled(k2, at_scale + HALF, D, whole, BLOCK // K_GROUPS)
        v1, v2 = load_codes(v_codes + at * C, 4 * HALF, there[:, None], BITS, NUMBER, UPCAST)
        at_scale = v_scales + at * (D // F * 2)
        v1 = scaled(v1, at_scale, 16, there[:, None], F)
        v2 = scaled(v2, at_scale + 32 * GROUPS, 16, there[:, None], F)
        scores = tl.dot(coded_q1, k1, input_precision="ieee")
        scores = tl.dot(coded_q2, k2, scores, input_precision="ieee") * scale
        seen = there[None, :] & (slot[None, :] <= query[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        most, total, sums1, sums2 = fold_halves(most, total, sums1, sums2, scores, v1, v2)

    for at in range(tl.maximum(start, coded), end, EXACT):
        slot = at + tl.arange(0, EXACT)
        valid = slot < end
        at_k = k + slot.to(tl.int64)[:, None] * k_slot + d[None, :]
        at_v = v + slot.to(tl.int64)[:, None] * v_slot + d[None, :]
        k1 = tl.load(at_k, mask=valid[:, None], other=0.0)
        k2 = tl.load(at_k + HALF, mask=valid[:, None], other=0.0)
        v1 = tl.load(at_v, mask=valid[:, None], other=0.0)
        v2 = tl.load(at_v + HALF, mask=valid[:, None], other=0.0)
        if UPCAST:
            k1, k2 = k1.to(tl.float32), k2.to(tl.float32)
            v1, v2 = v1.to(tl.float32), v2.to(tl.float32)
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
        row = out_row(head, r, T, K, J)
        at_out = out + row[:, None] * D + d[None, :]
    tl.store(at_out, mean1.to(at_out.dtype.element_ty), mask=some)
    tl.store(at_out + HALF, mean2.to(at_out.dtype.element_ty), mask=some)
