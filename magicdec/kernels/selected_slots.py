"""Selection in Triton: what a draft step reads, without sorting. Two launches a layer.

1. `weigh_places` multiplies queries with keys, or with the bounds of pages, and writes the products
   and the log-sum-exp of each split.
2. `select_places` sums the softmax of a KV head's query rows and finds the largest sums. It also
   finds the largest of scores that are there already.

A program of `select_places` takes one KV head of one row, however long it is. It divides the places
into groups by their remainder, and keeps the largest number of each group in registers. At least k
places reach the k-th largest of these: few more do as a rule, which are copied. The k-th largest of
the copies is found bit by bit. Numbers that are not negative order as their bits do. Where too many
places would be copied, all are searched.

B rows, T new tokens, H query heads over K KV heads, J = H / K, R = J x T query rows that share a KV
head, D head dim, P places: slots, or pages of E slots; N selected slots.
"""

import triton
import triton.language as tl

from magicdec.kernels.split_kv import LARGEST, weigh


@triton.jit
def places_of(first, end, b, E: tl.constexpr, PAGED: tl.constexpr):
    """Return the first place of a row, and the place behind its last one, from its slots."""
    begin = tl.zeros((), tl.int32)
    if first is not None:
        begin = tl.maximum(tl.load(first + b), 0).to(tl.int32)
    stop = tl.load(end + b).to(tl.int32)
    if PAGED:
        begin, stop = begin // E, (stop + E - 1) // E
    return begin, stop


@triton.jit(do_not_specialize=["num_splits", "reach"])
def weigh_places(  # noqa: PLR0915
    q,
    keys,  # (B, K, P, D): keys, or the largest value of each feature of a page
    least,  # (B, K, P, D), likewise the least value of each feature; None: these are keys
    first,  # (B,): the first slot that is weighed; None: 0
    end,  # (B,): behind the last slot: of keys, which are causal, behind the last new token
    raw,  # (B x K, R, P): products in powers of two; -inf where a query row does not see a place
    lse,  # (B x K, splits, R), fp32
    T,
    P,
    num_splits,
    reach,  # tokens that one sees, itself included; None: all before it
    scale,  # of the products, for powers of two
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
    E: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Weigh one split of the places of one KV head of one row, for all of its query rows."""
    split, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, kv = head // K, head % K
    r, d = tl.arange(0, TILE), tl.arange(0, PADDED_D)
    begin, stop = places_of(first, end, b, E, least is not None)
    limit = stop - T + r % T if least is None else stop - 1 + 0 * r
    query_head = kv * J + r // T
    at_row = (r % T) * q_token + query_head * q_head
    at_q = q + b * q_row + at_row[:, None] + d[None, :]
    some = (r < J * T)[:, None] & (d < D)[None, :]
    q_tile = tl.load(at_q, some, 0.0)
    if UPCAST:
        q_tile = q_tile.to(tl.float32)
    up = q_tile
    if least is not None:
        zero = tl.zeros_like(q_tile)
        up = tl.where(q_tile > zero, q_tile, zero)
        down = tl.where(q_tile < zero, q_tile, zero)
        least += b * k_row + kv * k_head
    keys += b * k_row + kv * k_head
    raw += (head * (J * T) + r[:, None]) * P

    length = tl.cdiv(tl.cdiv(stop - begin, num_splits), BLOCK) * BLOCK
    start = begin + split * length
    until = tl.minimum(start + length, stop)
    most = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    for at in range(start, until, BLOCK):
        place = at + tl.arange(0, BLOCK)
        inside = (place < until)[:, None] & (d < D)[None, :]
        offset = place.to(tl.int64)[:, None] * k_slot + d[None, :]
        tile = tl.load(keys + offset, inside, 0.0)
        if UPCAST:
            tile = tile.to(tl.float32)
        products = tl.dot(up, tl.trans(tile), input_precision="ieee")
        if least is not None:
            tile = tl.load(least + offset, inside, 0.0)
            if UPCAST:
                tile = tile.to(tl.float32)
            products = tl.dot(down, tl.trans(tile), products, input_precision="ieee")
        products *= scale
        seen = (place < until)[None, :] & (place[None, :] <= limit[:, None])
        if reach is not None:
            seen &= place[None, :] > limit[:, None] - reach
        products = tl.where(seen, products, float("-inf"))
        kept = products
        if raw.dtype.element_ty == tl.float16:
            kept = tl.minimum(products, LARGEST)
        at_raw = raw + place[None, :]
        inside = (r < J * T)[:, None] & (place < until)[None, :]
        tl.store(at_raw, kept.to(raw.dtype.element_ty), inside)
        most, total, _, _ = weigh(most, total, products, 1.0)
    at = (head * num_splits + split) * (J * T) + r
    total = tl.where(total > 0, total, 1.0)
    # Of a query row that sees nothing here, -inf.
    tl.store(lse + at, most + tl.log2(total), mask=r < J * T)


@triton.jit
def merge_sums(lse, num_splits, R: tl.constexpr, PADDED_SPLITS: tl.constexpr):
    """Write the log-sum-exp of a head's query rows over all splits to the first split's. That of a
    row that sees nothing is inf, so that nothing weighs.
    """
    PADDED_R: tl.constexpr = triton.next_power_of_2(R)
    split, r = tl.arange(0, PADDED_SPLITS)[:, None], tl.arange(0, PADDED_R)
    there = (split < num_splits) & (r < R)[None, :]
    parts = tl.load(lse + split * R + r[None, :], there, float("-inf"))
    most = tl.max(parts, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    total = tl.sum(tl.exp2(parts - base[None, :]), 0)
    tl.debug_barrier()  # all parts are read
    whole = tl.where(total > 0, base + tl.log2(total), float("inf"))
    tl.store(lse + r, whole, mask=r < R)
    tl.debug_barrier()


@triton.jit
def number_of(bits, threshold):
    """Return how many of these numbers reach a threshold."""
    return tl.sum((bits >= threshold).to(tl.int32), 0)


@triton.jit
def leading_bits(bits, k):
    """Return the first 16 bits of the k-th largest number; 0 if there are fewer than k."""
    threshold = tl.zeros((), tl.int32)
    for bit in tl.static_range(1, 16):
        higher = threshold | (1 << (31 - bit))
        threshold = tl.where(number_of(bits, higher) >= k, higher, threshold)
    return threshold


@triton.jit
def kth_largest(some, rest, size, k, GROUPS: tl.constexpr):
    """Return the bits of the k-th largest of `size` numbers. The first of them are `some`."""
    threshold = tl.zeros((), tl.int32)
    for bit in range(31):
        higher = threshold | (1 << (30 - bit))
        count = number_of(some, higher)
        for at in range(GROUPS, size, GROUPS):
            count += number_of(block_of(rest, at, size, GROUPS), higher)
        threshold = tl.where(count >= k, higher, threshold)
    return threshold


@triton.jit
def block_of(bits, at, size, GROUPS: tl.constexpr):
    """Return a block of numbers; behind the end, what is less than any of them."""
    i = at + tl.max_contiguous(tl.arange(0, GROUPS), 1)
    return tl.load(bits + i, i < size, -1)


@triton.jit
def largest_of_groups(scores, raw, lse, size, P, R: tl.constexpr, GROUPS: tl.constexpr):
    """Return the bits of the largest number of each group. Where scores are yet to be summed, write
    them.
    """
    g = tl.max_contiguous(tl.arange(0, GROUPS), 1)
    largest = tl.full([GROUPS], -1, tl.int32)
    for at in range(0, size, GROUPS):
        inside = at + g < size
        if lse is None:
            weights = tl.load(scores + at + g, inside, 0.0)
        else:
            weights = tl.zeros([GROUPS], tl.float32)
            for r in tl.range(R, loop_unroll_factor=4):
                product = tl.load(raw + r * P + at + g, inside, float("-inf")).to(tl.float32)
                weights += tl.exp2(product - tl.load(lse + r))
            tl.store(scores + at + g, weights, inside)
        largest = tl.maximum(largest, tl.where(inside, weights.to(tl.int32, bitcast=True), -1))
    return largest


@triton.jit
def copy_reaching(bits, floor, size, copied, GROUPS: tl.constexpr, COPIED: tl.constexpr):
    """Copy the numbers that reach a floor, and their places, unless they are too many. Return how
    many they are.
    """
    number = tl.zeros([GROUPS], tl.int32)
    for at in range(0, size, GROUPS):
        number += (block_of(bits, at, size, GROUPS) >= floor).to(tl.int32)
    total = tl.sum(number, 0)
    if total <= COPIED:
        # Those of a group lie behind those of the groups before it.
        to = tl.cumsum(number, 0) - number
        for at in range(0, size, GROUPS):
            x = block_of(bits, at, size, GROUPS)
            place = at + tl.max_contiguous(tl.arange(0, GROUPS), 1)
            tl.store(copied + to, x, x >= floor)
            tl.store(copied + COPIED + to, place, x >= floor)
            to += (x >= floor).to(tl.int32)
    return total


@triton.jit
def choose_largest(bits, places, placed, size, k, chosen, GROUPS: tl.constexpr):
    """Write the places of the k largest of `size` numbers, which are their indices unless they are
    `placed`. Of equal numbers, some are taken.
    """
    some = block_of(bits, 0, size, GROUPS)
    threshold = kth_largest(some, bits, size, k, GROUPS)
    above, ties = (some > threshold).to(tl.int32), (some == threshold).to(tl.int32)
    for at in range(GROUPS, size, GROUPS):
        x = block_of(bits, at, size, GROUPS)
        above += (x > threshold).to(tl.int32)
        ties += (x == threshold).to(tl.int32)
    rank = tl.cumsum(above, 0) - above
    rank_of_tie = tl.sum(above, 0) + tl.cumsum(ties, 0) - ties
    for at in range(0, size, GROUPS):
        x = block_of(bits, at, size, GROUPS)
        place = at + tl.max_contiguous(tl.arange(0, GROUPS), 1)
        place = tl.where(placed, tl.load(places + place, placed & (place < size), 0), place)
        tl.store(chosen + rank, place, x > threshold)
        tl.store(chosen + rank_of_tie, place, (x == threshold) & (rank_of_tie < k))
        rank += (x > threshold).to(tl.int32)
        rank_of_tie += (x == threshold).to(tl.int32)


@triton.jit(do_not_specialize=["count", "num_splits", "num_out"])
def select_places(
    scores,  # (B x K, P), fp32, not negative; with `lse`, written: the sum of each place's weights
    raw,  # (B x K, R, P), as in weigh_places; None: the scores are there
    lse,  # (B x K, splits, R), fp32, of which the first split's are overwritten; None likewise
    first,  # (B,) or (B x K,): the first slot that may be selected; None: 0
    end,  # as `first`: behind the last one
    copied,  # (B x K, 2, COPIED), int32: numbers and places
    chosen,  # (B x K, count), int32: places
    out,  # (B x K, N), int64
    P,
    count,  # places to select
    num_splits,
    num_out,  # N
    PER: tl.constexpr,  # KV heads that share `first` and `end`
    R: tl.constexpr,
    E: tl.constexpr,
    PAGED: tl.constexpr,  # the last page is read in any case, and is none of `count`
    PADDED_SPLITS: tl.constexpr,
    GROUPS: tl.constexpr,
    COPIED: tl.constexpr,
):
    """Select the places with the largest scores of one KV head of one row, in any order."""
    head = tl.program_id(0).to(tl.int64)
    b = head // PER
    begin, stop = places_of(first, end, b, E, PAGED)
    if PAGED:
        stop = tl.maximum(stop - 1, 0)
    size = tl.maximum(stop - begin, 0)
    k = tl.minimum(count, size)
    scores += head * P + begin
    copied += head * (2 * COPIED)
    chosen += head * count
    if lse is not None:
        raw += head * R * P + begin
        lse += head * num_splits * R
        merge_sums(lse, num_splits, R, PADDED_SPLITS)

    # Other threads read what some have written.
    floor = leading_bits(largest_of_groups(scores, raw, lse, size, P, R, GROUPS), k)
    tl.debug_barrier()
    bits = scores.to(tl.pointer_type(tl.int32), bitcast=True)
    total = copy_reaching(bits, floor, size, copied, GROUPS, COPIED)
    tl.debug_barrier()
    fits = total <= COPIED
    if fits:
        bits, size = copied, total
    choose_largest(bits, copied + COPIED, fits, size, k, chosen, GROUPS)
    tl.debug_barrier()
    out += head * num_out
    write_slots(chosen, first, end, b, out, begin, k, stop, num_out, E, PAGED, GROUPS)


@triton.jit
def write_slots(
    chosen, first, end, b, out, begin, k, last, num_out,
    E: tl.constexpr, PAGED: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Write the slots of the k chosen places, and of the last page; -1 where there are no more."""
    for at in range(0, num_out, GROUPS):
        i = at + tl.max_contiguous(tl.arange(0, GROUPS), 1)
        place = tl.load(chosen + i // E, i // E < k, 0)
        place = tl.where(i // E < k, place + begin, -1)
        slot = place
        if PAGED:
            place = tl.where(i // E == k, last, place)
            slot = place * E + i % E
            read = (place >= 0) & (slot < tl.load(end + b))
            if first is not None:
                read &= slot >= tl.load(first + b)
            slot = tl.where(read, slot, -1)
        tl.store(out + i, slot.to(tl.int64), i < num_out)
