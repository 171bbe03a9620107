"""Sampling on GPUs, in Triton: `probabilities` of sampling.py without sorting, and the numbers of
`uniform_BT`.

B rows, T tokens, V vocabulary, N = B x T rows of logits, P parts of a row. A distribution takes
three launches:

1. `collect` reads a part of a row. It copies the logits that may stay to the beginning of the part,
   without a gap.
2. `find_cut` searches a row's copied logits for the least one that top-k keeps, then for the least
   one that top-p keeps. It finds two bits at a time, by comparing the logits with three thresholds.
   Few logits are copied as a rule, and all of them at worst.
3. `write` computes the probabilities of a part.

The number of parts depends on the vocabulary alone, so that a row's sums do not depend on the
batch. A program of `draw_numbers` takes a block of the B x T numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PARTS = 8  # of a row, a program each
BLOCK = 1024  # tokens of a part at a time
TILE = 2048  # copied logits of a row at a time
NUMBERS = 128  # random numbers of a program
# First bits of fp32 in which logits may differ; others: 32.
SIGNIFICANT = {torch.bfloat16: 16, torch.float16: 20}
LEAST = tl.constexpr(-(1 << 31))
OF_MINUS_INFINITY = tl.constexpr(-0x7F800001)
SLACK = tl.constexpr(2.0**-16)  # of a row's mass: more than sums are rounded by


def truncated(
    logits: Tensor,
    temperature: float | Tensor,
    top_k: int | Tensor | None,
    top_p: float | Tensor | None,
) -> Tensor:
    """See sampling.probabilities. Settings are numbers, or tensors (B, 1, 1) for logits (B, T,
    V).
    """
    rows_NV = logits.reshape(-1, logits.shape[-1]).contiguous()
    out_NV = torch.empty_like(rows_NV, dtype=torch.float32)
    N, V = rows_NV.shape
    parts = min(PARTS, triton.next_power_of_2(triton.cdiv(V, BLOCK)))
    length = 16 * triton.cdiv(V, 16 * parts)

    def per_row(setting: float | Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if isinstance(setting, Tensor):
            return setting.expand(*logits.shape[:-1], 1).reshape(N)
        return (
            None
            if setting is None
            else torch.full((N,), setting, dtype=dtype, device=logits.device)
        )

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    temperature_N = per_row(temperature, torch.float32)
    settings = temperature_N, per_row(top_k, torch.int64), per_row(top_p, torch.float32)
    partial = empty(N, parts), empty(N, parts), empty(N, parts, dtype=torch.int32)
    cut = empty(N, 4), empty(N, dtype=torch.int32)
    # The same weight in every kernel.
    in_parts = {"num_warps": max(1, BLOCK // 256), "enable_fp_fusion": False}
    collect[(N, parts)](rows_NV, *settings, out_NV, *partial, V, length, BLOCK=BLOCK, **in_parts)
    find_cut[(N,)](
        rows_NV, *settings, out_NV, *partial, *cut, V, length,
        PARTS=parts, WIDTH=TILE // parts, BITS=SIGNIFICANT.get(logits.dtype, 32),
        num_warps=max(1, TILE // 256), enable_fp_fusion=False,
    )  # fmt: skip
    write[(N, parts)](rows_NV, temperature_N, *cut, out_NV, V, length, BLOCK=BLOCK, **in_parts)
    return out_NV.view(logits.shape)


@triton.jit
def number(ordered):
    """Return fp32 numbers by integers that are in their order, and need not be positive: -inf for
    those below its own.
    """
    ordered = tl.maximum(ordered, OF_MINUS_INFINITY)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def block_of(logits, start, end, BLOCK: tl.constexpr):
    """Return a block of the row's logits; -inf beyond the end."""
    token = start + tl.arange(0, BLOCK)
    return tl.load(logits + token, token < end, float("-inf")).to(tl.float32)


@triton.jit
def weight(x, most, scale):
    """Return the unnormalised probabilities of logits: 1 for the largest."""
    return tl.exp2((x - most) * scale)


@triton.jit
def scale_of(temperature, row):
    """Return the factor that turns differences of logits into powers of two."""
    return tl.div_rn(1.4426950408889634, tl.load(temperature + row))


@triton.jit
def kept_by_count(top_k, row, V):
    """Return how many tokens top-k keeps; V keeps everything."""
    k = V
    if top_k is not None:
        k = tl.minimum(tl.load(top_k + row), V).to(tl.int32)
    return k


@triton.jit
def kth_largest(x, k):
    """Return a number that at least k of x reach: the k-th largest, cut to 16 bits; -inf if x are
    fewer than k.
    """
    threshold = tl.full((), LEAST, tl.int32)
    for bit in tl.static_range(16):
        higher = threshold + (tl.full((), 1, tl.int32) << (31 - bit))
        threshold = tl.where(tl.sum((x >= number(higher)).to(tl.int32), 0) >= k, higher, threshold)
    return number(threshold)


@triton.jit
def collect(
    logits, temperature, top_k, top_p, out, peaks, masses, counts, V, length,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the logits of a part that may stay. Write how many these are, and the part's largest
    logit. Write the part's mass where top-k keeps everything.

    - Top-k: each of BLOCK groups of tokens has a largest logit. At least k tokens reach the k-th
      largest of these.
    - Top-p: V tokens of less than (1 - top_p) / V of the part's mass do not weigh enough to be
      needed.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * V
    out += row * V
    place = row * tl.num_programs(1) + part
    scale = scale_of(temperature, row)
    begin = part * length
    end = tl.minimum(begin + length, V)

    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(begin, end, BLOCK):
        largest = tl.maximum(largest, block_of(logits, start, end, BLOCK))
    most = tl.max(largest, 0)
    tl.store(peaks + place, most)

    floor = tl.full((), float("-inf"), tl.float32)
    k = kept_by_count(top_k, row, V)
    if k < V:
        floor = kth_largest(largest, k)
    elif most > float("-inf"):
        totals = tl.zeros((BLOCK,), tl.float32)
        for start in range(begin, end, BLOCK):
            totals += weight(block_of(logits, start, end, BLOCK), most, scale)
        mass = tl.sum(totals, 0)
        tl.store(masses + place, mass)
        if top_p is not None:
            spare = (1.0 - tl.load(top_p + row) - SLACK) * mass
            if spare > 0:
                # Half of it, as this is rounded.
                floor = most + tl.div_rn(tl.log2(spare / V) - 1.0, scale)
    else:
        tl.store(masses + place, 0.0)

    count = 0
    for start in range(begin, end, BLOCK):
        x = block_of(logits, start, end, BLOCK)
        stays = ((x >= floor) & (start + tl.arange(0, BLOCK) < end)).to(tl.int32)
        tl.store(out + begin + count + tl.cumsum(stays, 0) - 1, x, stays > 0)
        count += tl.sum(stays, 0)
    tl.store(counts + place, count)


@triton.jit
def copied(out, counts_P, start, length, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """Return some of the copied logits of each part, (PARTS, WIDTH); -inf where there are no
    more.
    """
    slot = start + tl.arange(0, WIDTH)[None, :]
    return tl.load(
        out + tl.arange(0, PARTS)[:, None] * length + slot, slot < counts_P[:, None], float("-inf")
    )


@triton.jit
def last_threshold(
    out, counts_P, length, most, scale, wanted,
    WEIGHED: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Return the last threshold, as in `number`, that at least `wanted` of the row reaches: by
    weights, or tokens.
    """
    threshold = tl.full((), LEAST, tl.int32)
    for digit in range(BITS // 2):
        step = tl.full((), 1, tl.int32) << (30 - 2 * digit)
        first = number(threshold + step)
        second = number(threshold + 2 * step)
        third = number(threshold + 3 * step)
        low = tl.zeros((PARTS, WIDTH), tl.float32)
        middle = tl.zeros((PARTS, WIDTH), tl.float32)
        high = tl.zeros((PARTS, WIDTH), tl.float32)
        for start in range(0, tl.max(counts_P, 0), WIDTH):
            x = copied(out, counts_P, start, length, PARTS, WIDTH)
            each = weight(x, most, scale) if WEIGHED else tl.full((PARTS, WIDTH), 1.0, tl.float32)
            low = tl.fma((x >= first).to(tl.float32), each, low)
            middle = tl.fma((x >= second).to(tl.float32), each, middle)
            high = tl.fma((x >= third).to(tl.float32), each, high)
        reached = (tl.sum(low) >= wanted).to(tl.int32)
        reached += (tl.sum(middle) >= wanted).to(tl.int32)
        threshold += step * (reached + (tl.sum(high) >= wanted).to(tl.int32))
    return threshold


@triton.jit
def ties_of(x, lowest, beyond):
    """Return 1 for the tokens that are as likely as the last one that stays."""
    return ((x >= lowest) & (x < beyond)).to(tl.int32)


@triton.jit
def token_of_tie(logits, V, lowest, beyond, rank, BLOCK: tl.constexpr):
    """Return the token of the row that is the tie of this rank, from 1."""
    start = 0
    ties = ties_of(block_of(logits, start, V, BLOCK), lowest, beyond)
    while tl.sum(ties, 0) < rank:
        rank -= tl.sum(ties, 0)
        start += BLOCK
        ties = ties_of(block_of(logits, start, V, BLOCK), lowest, beyond)
    return start + tl.sum((tl.cumsum(ties, 0) < rank).to(tl.int32), 0)


@triton.jit
def find_cut(
    logits, temperature, top_k, top_p, out, peaks, masses, counts, cut, last_token, V, length,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Find which tokens of a row stay, and their mass.

    Tokens that reach `beyond` stay, and of others that reach `lowest` those up to the last token.
    """
    UNIT: tl.constexpr = 1 << (32 - BITS)  # between thresholds
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    out += row * V
    places = row * PARTS + tl.arange(0, PARTS)
    scale = scale_of(temperature, row)
    counts_P, peaks_P = tl.load(counts + places), tl.load(peaks + places)
    most = tl.max(peaks_P, 0)

    least = tl.full((), LEAST, tl.int32)
    k = kept_by_count(top_k, row, V)
    if k < V:
        least = last_threshold(out, counts_P, length, most, scale, k, False, PARTS, WIDTH, BITS)
        lowest = number(least)
        totals = tl.zeros((PARTS, WIDTH), tl.float32)
        for start in range(0, tl.max(counts_P, 0), WIDTH):
            x = copied(out, counts_P, start, length, PARTS, WIDTH)
            totals += tl.where(x >= lowest, weight(x, most, scale), 0.0)
        mass = tl.sum(totals)
    else:
        lowest = number(least)
        mass = tl.sum(tl.load(masses + places) * weight(peaks_P, most, scale), 0)

    beyond, last = lowest, V
    if top_p is not None:
        part = tl.load(top_p + row)
        # 1 keeps everything, however sums are rounded.
        wanted = tl.where(part < 1.0, part * mass, float("inf"))
        floor = last_threshold(out, counts_P, length, most, scale, wanted, True, PARTS, WIDTH, BITS)
        floor = tl.maximum(least, floor)
        lowest = number(floor)
        beyond = number(floor + UNIT)
        totals = tl.zeros((PARTS, WIDTH), tl.float32)
        ties = tl.zeros((PARTS, WIDTH), tl.int32)
        for start in range(0, tl.max(counts_P, 0), WIDTH):
            x = copied(out, counts_P, start, length, PARTS, WIDTH)
            totals += tl.where(x >= beyond, weight(x, most, scale), 0.0)
            ties += ties_of(x, lowest, beyond)
        num_ties = tl.sum(ties)
        # Of a logit, whose last bits are 0.
        tie = weight(number(floor + ((floor >> 31) & (UNIT - 1))), most, scale)
        if wanted < float("inf"):
            mass = tl.sum(totals)
        if (wanted < float("inf")) & (tie > 0):
            needed = tl.maximum(1, tl.ceil(tl.div_rn(wanted - mass, tie)))
            if needed < num_ties:
                last = token_of_tie(logits, V, lowest, beyond, needed.to(tl.int32), PARTS * WIDTH)
            mass += tl.minimum(needed, num_ties) * tie

    cut += row * 4
    tl.store(cut, most)
    tl.store(cut + 1, lowest)
    tl.store(cut + 2, beyond)
    tl.store(cut + 3, tl.div_rn(1.0, mass))
    tl.store(last_token + row, last)


@triton.jit
def write(logits, temperature, cut, last_token, out, V, length, BLOCK: tl.constexpr):
    """Write the probabilities of a part of a row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * V
    out += row * V
    cut += row * 4
    scale, last = scale_of(temperature, row), tl.load(last_token + row)
    most, lowest = tl.load(cut), tl.load(cut + 1)
    beyond, share = tl.load(cut + 2), tl.load(cut + 3)
    end = tl.minimum((part + 1) * length, V)
    for start in range(part * length, end, BLOCK):
        x = block_of(logits, start, end, BLOCK)
        token = start + tl.arange(0, BLOCK)
        stays = (x >= beyond) | (x >= lowest) & (token <= last)
        tl.store(out + token, tl.where(stays, weight(x, most, scale) * share, 0.0), token < end)


def uniform(key: int | Tensor, positions_BT: Tensor, use: int) -> Tensor:
    """See sampling.uniform_BT, whose numbers these are, bit for bit. `key` is that of the first
    row, or (B, 1).
    """
    B, T = positions_BT.shape
    out_BT = torch.empty((B, T), dtype=torch.float64, device=positions_BT.device)
    draw_numbers[(triton.cdiv(B * T, NUMBERS),)](
        key,
        positions_BT,
        out_BT,
        B * T,
        T,
        *positions_BT.stride(),
        use,
        FOLLOWS=isinstance(key, int),
        BLOCK=NUMBERS,
    )
    return out_BT


@triton.jit
def mix(x):
    """Return the finaliser of SplitMix64: see `sampling._mix`."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@triton.jit(do_not_specialize=["key", "use"])
def draw_numbers(
    key, positions, out, N, T, row, column, use, FOLLOWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write BLOCK numbers."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b, t = i // T, i % T
    sequence = b.to(tl.int64) + key if FOLLOWS else tl.load(key + b, i < N, 0)
    position = tl.load(positions + b * row + t * column, i < N, 0)
    mixed = mix(mix(mix(sequence) + position * 8 + use))
    bits = (mixed >> 11) & ((1 << 53) - 1)
    tl.store(out + i, bits.to(tl.float64) * (2.0**-53), i < N)
