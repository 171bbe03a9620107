"""Sampling on GPUs, in Triton: `probabilities` of sampling.py without sorting, and the numbers of `uniform_BT`.

B rows, T tokens, V vocabulary. A program of `truncate` takes a row. It finds the least logit that top-k keeps, and the
least that top-p keeps, two bits at a time: a pass over the row, which stays in the L2 cache, compares it with three
thresholds. With several programs for a row, each of some 20 passes would be a launch, which takes as long as they save.
A program of `draw_numbers` takes a block of the B x T numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 8192  # tokens at a time: eight of a thread
NUMBERS = 128  # random numbers of a program
SIGNIFICANT = {torch.bfloat16: 16, torch.float16: 20}  # first bits of fp32 in which logits may differ; others: 32
LEAST = tl.constexpr(-(1 << 31))


def truncated(
    logits: Tensor, temperature: float | Tensor, top_k: int | Tensor | None, top_p: float | Tensor | None
) -> Tensor:
    """See sampling.probabilities. Settings are numbers, or tensors (B, 1, 1) for logits (B, T, V)."""
    rows_NV = logits.reshape(-1, logits.shape[-1]).contiguous()
    out_NV = torch.empty_like(rows_NV, dtype=torch.float32)
    N, V = rows_NV.shape

    def per_row(setting: float | Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if isinstance(setting, Tensor):
            return setting.expand(*logits.shape[:-1], 1).reshape(N)
        return None if setting is None else torch.full((N,), setting, dtype=dtype, device=logits.device)

    block = min(MAX_BLOCK, triton.next_power_of_2(V))
    truncate[(N,)](
        rows_NV,
        per_row(temperature, torch.float32),
        per_row(top_k, torch.int64),
        per_row(top_p, torch.float32),
        out_NV,
        V,
        BITS=SIGNIFICANT.get(logits.dtype, 32),
        BLOCK=block,
        num_warps=max(1, min(32, block // 256)),
        enable_fp_fusion=False,  # the same number in every pass
    )
    return out_NV.view(logits.shape)


@triton.jit
def number(ordered):
    """Return fp32 numbers by integers that are in their order, and need not be positive."""
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def block_of(logits, start, V, BLOCK: tl.constexpr):
    """Return a block of the row's logits; -inf beyond the vocabulary."""
    token = start + tl.arange(0, BLOCK)
    return tl.load(logits + token, token < V, float("-inf")).to(tl.float32)


@triton.jit
def weight(x, most, scale):
    """Return the unnormalised probabilities of logits: 1 for the largest."""
    return tl.exp2((x - most) * scale)


@triton.jit
def last_threshold(logits, V, most, scale, wanted, WEIGHED: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the last threshold, as in `number`, that at least `wanted` of the row reaches: by weights, or tokens."""
    threshold = tl.full((), LEAST, tl.int32)
    for digit in range(BITS // 2):
        step = tl.full((), 1, tl.int32) << (30 - 2 * digit)
        first, second, third = number(threshold + step), number(threshold + 2 * step), number(threshold + 3 * step)
        low = tl.zeros((BLOCK,), tl.float32)
        middle = tl.zeros((BLOCK,), tl.float32)
        high = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, V, BLOCK):
            x = block_of(logits, start, V, BLOCK)
            each = weight(x, most, scale) if WEIGHED else tl.full((BLOCK,), 1.0, tl.float32)
            low = tl.fma((x >= first).to(tl.float32), each, low)
            middle = tl.fma((x >= second).to(tl.float32), each, middle)
            high = tl.fma((x >= third).to(tl.float32), each, high)
        reached = (tl.sum(low, 0) >= wanted).to(tl.int32) + (tl.sum(middle, 0) >= wanted).to(tl.int32)
        threshold += step * (reached + (tl.sum(high, 0) >= wanted).to(tl.int32))
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
def truncate(logits, temperature, top_k, top_p, out, V, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Write a row of probabilities."""
    UNIT: tl.constexpr = 1 << (32 - BITS)  # between thresholds
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    out += row * V
    scale = tl.div_rn(1.4426950408889634, tl.load(temperature + row))  # of powers of two

    peaks = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        peaks = tl.maximum(peaks, block_of(logits, start, V, BLOCK))
    most = tl.max(peaks, 0)

    least = tl.full((), LEAST, tl.int32)
    if top_k is not None:  # none is kept by a k beyond the vocabulary, which keeps everything
        k = tl.load(top_k + row).to(tl.float32)
        least = last_threshold(logits, V, most, scale, k, False, BITS, BLOCK)
    lowest = tl.where(least == LEAST, float("-inf"), number(least))

    totals = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        x = block_of(logits, start, V, BLOCK)
        totals += tl.where(x >= lowest, weight(x, most, scale), 0.0)
    mass = tl.sum(totals, 0)

    beyond, last = lowest, V  # tokens that reach `beyond` stay, and of others that reach `lowest` the first ones
    if top_p is not None:
        part = tl.load(top_p + row)
        wanted = tl.where(part < 1.0, part * mass, float("inf"))  # 1 keeps everything, however sums are rounded
        floor = tl.maximum(least, last_threshold(logits, V, most, scale, wanted, True, BITS, BLOCK))
        lowest = tl.where(floor == LEAST, float("-inf"), number(floor))
        beyond = tl.where(floor == LEAST, float("-inf"), number(floor + UNIT))
        masses = tl.zeros((BLOCK,), tl.float32)
        counts = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, V, BLOCK):
            x = block_of(logits, start, V, BLOCK)
            masses += tl.where(x >= beyond, weight(x, most, scale), 0.0)
            counts += ties_of(x, lowest, beyond)
        mass = tl.sum(masses, 0)
        num_ties = tl.sum(counts, 0)
        tie = weight(number(floor + ((floor >> 31) & (UNIT - 1))), most, scale)  # of a logit, whose last bits are 0
        if tie > 0:
            needed = tl.maximum(1, tl.ceil(tl.div_rn(wanted - mass, tie)))
            if needed < num_ties:
                last = token_of_tie(logits, V, lowest, beyond, needed.to(tl.int32), BLOCK)
            mass += tl.minimum(needed, num_ties) * tie

    share = tl.div_rn(1.0, mass)
    for start in range(0, V, BLOCK):
        x = block_of(logits, start, V, BLOCK)
        token = start + tl.arange(0, BLOCK)
        stays = (x >= beyond) | (x >= lowest) & (token <= last)
        tl.store(out + token, tl.where(stays, weight(x, most, scale) * share, 0.0), token < V)


def uniform(key: int | Tensor, positions_BT: Tensor, use: int) -> Tensor:
    """See sampling.uniform_BT, whose numbers these are, bit for bit. `key` is that of the first row, or (B, 1)."""
    B, T = positions_BT.shape
    out_BT = torch.empty((B, T), dtype=torch.float64, device=positions_BT.device)
    draw_numbers[(triton.cdiv(B * T, NUMBERS),)](
        key, positions_BT, out_BT, B * T, T, *positions_BT.stride(), use, FOLLOWS=isinstance(key, int), BLOCK=NUMBERS
    )
    return out_BT


@triton.jit
def mix(x):
    """Return the finaliser of SplitMix64: see `sampling._mix`."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@triton.jit(do_not_specialize=["key", "use"])
def draw_numbers(key, positions, out, N, T, row, column, use, FOLLOWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write BLOCK numbers."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b, t = i // T, i % T
    sequence = b.to(tl.int64) + key if FOLLOWS else tl.load(key + b, i < N, 0)
    position = tl.load(positions + b * row + t * column, i < N, 0)
    bits = (mix(mix(mix(sequence) + position * 8 + use)) >> 11) & ((1 << 53) - 1)
    tl.store(out + i, bits.to(tl.float64) * (2.0**-53), i < N)
