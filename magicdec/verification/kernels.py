"""Sampling on GPUs, in Triton: `probabilities` of sampling.py without sorting, and the numbers of `uniform_BT`.

B rows, T tokens, V vocabulary. A program of `truncate` takes a row. It finds the least logit that top-k keeps, and the
least probability that top-p keeps, two bits at a time: a pass over the row, which stays in the L2 cache, compares it
with three thresholds. A program of `draw_numbers` takes a block of the B x T numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 8192  # tokens at a time
NUMBERS = 128  # random numbers of a program
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
        BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
        enable_fp_fusion=False,  # the same number in every pass
    )
    return out_NV.view(logits.shape)


@triton.jit
def scaled(logits, start, V, temperature, BLOCK: tl.constexpr):
    """Return a block of the row's logits over the temperature; -inf beyond the vocabulary."""
    token = start + tl.arange(0, BLOCK)
    x = tl.load(logits + token, token < V, float("-inf"))
    return tl.div_rn(x.to(tl.float32), temperature)


@triton.jit
def ordered(x):
    """Return integers that are in the order of the numbers, which need not be positive."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == 0.0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))  # -0.0 is 0.0


@triton.jit
def weight(x, most, least):
    """Return the unnormalised probabilities of a block: 0 where top-k drops a token."""
    return tl.where(ordered(x) >= least, tl.exp(x - most), 0.0)


@triton.jit
def truncate(logits, temperature, top_k, top_p, out, V, BLOCK: tl.constexpr):
    """Write a row of probabilities."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    out += row * V
    temperature = tl.load(temperature + row)

    peaks = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        peaks = tl.maximum(peaks, scaled(logits, start, V, temperature, BLOCK))
    most = tl.max(peaks, 0)

    # The largest number that at least k logits reach; none does with a k beyond the vocabulary.
    least = tl.full((), LEAST, tl.int32)
    if top_k is not None:
        k = tl.load(top_k + row)
        for digit in range(16):
            step = tl.full((), 1, tl.int32) << (30 - 2 * digit)
            first = tl.zeros((BLOCK,), tl.int32)
            second = tl.zeros((BLOCK,), tl.int32)
            third = tl.zeros((BLOCK,), tl.int32)
            for start in range(0, V, BLOCK):
                x = ordered(scaled(logits, start, V, temperature, BLOCK))
                first += (x >= least + step).to(tl.int32)
                second += (x >= least + 2 * step).to(tl.int32)
                third += (x >= least + 3 * step).to(tl.int32)
            reached = (tl.sum(first, 0) >= k).to(tl.int32) + (tl.sum(second, 0) >= k).to(tl.int32)
            least += step * (reached + (tl.sum(third, 0) >= k).to(tl.int32))

    totals = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        totals += weight(scaled(logits, start, V, temperature, BLOCK), most, least)
    total = tl.sum(totals, 0)

    # The largest number such that what reaches it weighs at least top_p. Bits of positive numbers are in their order.
    floor = tl.zeros((), tl.int32)
    wanted = 0.0
    if top_p is not None:
        wanted = tl.load(top_p + row)
        for digit in range(15):
            step = tl.full((), 1, tl.int32) << (28 - 2 * digit)
            above = tl.zeros((BLOCK,), tl.float32)
            higher = tl.zeros((BLOCK,), tl.float32)
            highest = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, V, BLOCK):
                p = tl.div_rn(weight(scaled(logits, start, V, temperature, BLOCK), most, least), total)
                bits = p.to(tl.int32, bitcast=True)
                above += tl.where(bits >= floor + step, p, 0.0)
                higher += tl.where(bits >= floor + 2 * step, p, 0.0)
                highest += tl.where(bits >= floor + 3 * step, p, 0.0)
            reached = (tl.sum(above, 0) >= wanted).to(tl.int32) + (tl.sum(higher, 0) >= wanted).to(tl.int32)
            floor += step * (reached + (tl.sum(highest, 0) >= wanted).to(tl.int32))

    # Of the tokens that are as likely as the last one, the first stay, until they reach top_p.
    masses = tl.zeros((BLOCK,), tl.float32)
    counts = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, V, BLOCK):
        p = tl.div_rn(weight(scaled(logits, start, V, temperature, BLOCK), most, least), total)
        bits = p.to(tl.int32, bitcast=True)
        masses += tl.where(bits > floor, p, 0.0)
        counts += (bits == floor).to(tl.int32)
    mass = tl.sum(masses, 0)
    tie = floor.to(tl.float32, bitcast=True)
    num_ties = tl.sum(counts, 0)
    if floor > 0:
        num_ties = tl.minimum(num_ties, tl.maximum(1, tl.ceil(tl.div_rn(wanted - mass, tie)).to(tl.int32)))
    mass += num_ties * tie

    before = 0
    for start in range(0, V, BLOCK):
        p = tl.div_rn(weight(scaled(logits, start, V, temperature, BLOCK), most, least), total)
        bits = p.to(tl.int32, bitcast=True)
        ties = (bits == floor).to(tl.int32)
        rank = before + tl.cumsum(ties, 0)
        p = tl.where((bits > floor) | ((ties == 1) & (rank <= num_ties)), tl.div_rn(p, mass), 0.0)
        token = start + tl.arange(0, BLOCK)
        tl.store(out + token, p, token < V)
        before += tl.sum(ties, 0)


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
