"""Cases for kernels of few new tokens, and SDPA's answer to each in fp32: the twin that every
backend is to meet.
"""

import math

import torch

from magicdec.attention.base import PLAIN, Attention, Shape, Weighting
from magicdec.attention.codes import FEATURES, TOKENS, Coded, Codes
from magicdec.attention.sdpa import SdpaAttention

ROWS, KV_HEADS = 3, 2


def case(num_new, group, dim, longest, dtype=torch.float32):
    """Rows from no longer than their new tokens to `longest`; the cache has slots to spare, filled
    with noise.
    """
    generator = torch.Generator().manual_seed(num_new + group)
    q = torch.randn(ROWS, num_new, KV_HEADS * group, dim, generator=generator).to(dtype)
    k, v = torch.randn(2, ROWS, KV_HEADS, longest + 7, dim, generator=generator).to(dtype)
    seqlens = torch.tensor([num_new, (num_new + longest) // 2, longest], dtype=torch.int32)
    return q, k, v, seqlens


def selection(seqlens, num_new, capacity, count):
    """Distinct slots in any order, the new tokens among them, some negative, some behind the valid
    ones.
    """
    generator = torch.Generator().manual_seed(count)
    orders = [torch.randperm(capacity, generator=generator)[:count] for _ in range(ROWS * KV_HEADS)]
    chosen = torch.stack(orders).view(ROWS, KV_HEADS, -1)
    new = seqlens[:, None] - num_new + torch.arange(num_new)
    chosen[(chosen[..., None] == new[:, None, None]).any(-1)] = -1
    return torch.cat((chosen, new[:, None].expand(-1, KV_HEADS, -1)), dim=-1)


def at(slots, scores):
    """The scores of slots; 0 of negative ones."""
    return scores.gather(-1, slots.clamp(min=0)).masked_fill(slots < 0, 0.0)


def compacted(k, v, seqlens, num_new, count):
    """At most `count` of each head's old entries in any order, the new ones behind them: keys,
    values, lengths, the positions by which a window finds them, and the slots that they come from
    (-1: none).
    """
    generator = torch.Generator().manual_seed(count)
    slots = torch.full((ROWS, KV_HEADS, count + num_new), -1)
    positions, lengths = torch.zeros(slots.shape, dtype=torch.int32), torch.zeros_like(seqlens)
    for row, length in enumerate(seqlens.tolist()):
        old = length - num_new
        kept = min(count, old)
        lengths[row] = kept + num_new
        for head in range(KV_HEADS):
            chosen = torch.randperm(old, generator=generator)[:kept]
            slots[row, head, : kept + num_new] = torch.cat((chosen, torch.arange(old, length)))
        positions[row] = slots[row] - (old - kept)
    from_slots = slots.clamp(min=0)[..., None].expand(-1, -1, -1, k.shape[-1])
    return k.gather(2, from_slots), v.gather(2, from_slots), lengths, positions, slots


def weightings(heads):
    """Sinks, a soft cap that bends most scores, and both."""
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(heads))
    return [Weighting(sinks), Weighting(softcap=1.5), Weighting(sinks, 1.5)]


def definition(
    q, k, v, seqlens, window=None, indices=None, positions=None, counted=None, weighting=PLAIN
):
    """Attention and the slots' scores, in fp64, of the slots that each token sees."""
    (T, H, D), (K, S) = q.shape[1:], k.shape[1:3]
    q_BKJTD = q.double().unflatten(2, (K, -1)).permute(0, 2, 3, 1, 4)
    own_B1T1, slot_S = (seqlens[:, None] - T + torch.arange(T))[:, None, :, None], torch.arange(S)
    seen_BKTS = (slot_S <= own_B1T1).repeat(1, K, 1, 1)
    if window is not None:
        seen_BKTS &= (slot_S if positions is None else positions[:, :, None]) > own_B1T1 - window
    if indices is not None:
        seen_BKTS &= (indices[..., None] == slot_S).any(2)[:, :, None]
    logits_BKJTS = torch.einsum("bkjtd,bksd->bkjts", q_BKJTD, k.double()) / math.sqrt(D)
    if cap := weighting.softcap:
        logits_BKJTS = cap * torch.tanh(logits_BKJTS / cap)
    e_BKJTS = logits_BKJTS.masked_fill(~seen_BKTS[:, :, None], -math.inf).exp()
    total_BKJT1 = e_BKJTS.sum(-1, keepdim=True)
    if weighting.sinks_H is not None:
        total_BKJT1 = total_BKJT1 + weighting.sinks_H.double().exp().view(K, -1, 1, 1)
    p_BKJTS = e_BKJTS / total_BKJT1
    bad_BKSD = ~v.isfinite()  # of which 0 times is NaN, also where nobody sees it
    out_BKJTD = torch.einsum("bkjts,bksd->bkjtd", p_BKJTS, v.double().masked_fill(bad_BKSD, 0.0))
    out_BKJTD += torch.where((seen_BKTS.float() @ bad_BKSD.float()) > 0, math.nan, 0.0)[:, :, None]
    out = out_BKJTD.permute(0, 3, 1, 2, 4).reshape(-1, T, H, D)
    return out, (p_BKJTS if counted is None else p_BKJTS * counted[:, None, None, :, None]).sum(
        (2, 3)
    )


def plan_of(backend: Attention, q, k, seqlens, window, positions=None):
    return backend.plan(
        seqlens, Shape(q.shape[1], k.shape[2], q.shape[2] // k.shape[1], q.dtype), window, positions
    )


def attend(backend: Attention, q, k, v, seqlens, window=None, indices=None, positions=None):
    return backend.attend(q, k, v, plan_of(backend, q, k, seqlens, window, positions), indices)


def attend_scored(backend: Attention, q, k, v, seqlens, window=None, counted=None, positions=None):
    """One call of a backend that returns scores, with a score for every slot."""
    out, scores = backend.attend_scored(
        q, k, v, plan_of(backend, q, k, seqlens, window, positions), counted
    )
    return out, torch.nn.functional.pad(scores, (0, k.shape[2] - scores.shape[-1]))


def score_keys(backend: Attention, q, k, seqlens, window=None, counted=None):
    """Return a score for every slot by queries and keys alone."""
    scores = backend.score_keys(q, k, plan_of(backend, q, k, seqlens, window), counted)
    return torch.nn.functional.pad(scores, (0, k.shape[2] - scores.shape[-1]))


def observed(backend: Attention, q, k, v, seqlens, window=None):
    """Return attention, and a score for every slot by the first and the last new token."""
    scores = torch.full(k.shape[:3], 7.0, device=k.device)
    plan = plan_of(backend, q, k, seqlens, window)
    return backend.attend_observed(q, k, v, plan, scores), scores


def ends(num_new):
    """Return the first and the last of the new tokens, of three rows."""
    index = torch.arange(num_new)
    return ((index == 0) | (index == num_new - 1)).expand(3, -1)


def coded_case(num_new, group, dim, longest, bits, dtype=torch.float32):
    """A case and its entries as codes: all but the last, some, and none of a row's; what they
    replace is spoilt.
    """
    q, k, v, seqlens = case(num_new, group, dim, longest, dtype)
    codes = [
        Codes((2, *x.shape), bits, 32, along, "cpu") for x, along in ((k, TOKENS), (v, FEATURES))
    ]
    for one, x in zip(codes, (k, v), strict=True):
        one.load(torch.stack((x.flip(0), x)))
    old = seqlens - num_new
    coded = Coded(*codes, 1, torch.stack((old[0] * 0, old[1] // 64 * 32, old[2] // 32 * 32)).int())
    for b, first_exact in enumerate(coded.first_exact_B.tolist()):
        k[b, :, :first_exact], v[b, :, :first_exact] = math.nan, math.nan
    return q, k, v, seqlens, coded


def attend_coded(backend: Attention, q, k, v, seqlens, coded, window=None):
    return backend.attend_coded(q, k, v, plan_of(backend, q, k, seqlens, window), coded)


def expected_coded(q, k, v, seqlens, coded, window=None):
    """SDPA over what the codes mean, in fp32."""
    return attend_coded(SdpaAttention(), q.float(), k.float(), v.float(), seqlens, coded, window)


def some_tokens(num_new):
    """Return which new tokens count: in one row all, in one none, in one the last; contiguous only
    when transposed.
    """
    return (
        torch.stack(
            (torch.ones(num_new), torch.zeros(num_new), torch.arange(num_new) == num_new - 1), 1
        )
        .bool()
        .T
    )


def expected(q, k, v, seqlens, window=None, indices=None):
    """SDPA on the same numbers, in fp32."""
    return attend(SdpaAttention(), q.float(), k.float(), v.float(), seqlens, window, indices)


def check(
    backend: Attention,
    num_new,
    group,
    dim,
    longest,
    window=None,
    dtype=torch.float32,
    chosen=0,
    tolerance=1e-5,
):
    """Compare a backend with SDPA, over all slots or over a selection of so many."""
    q, k, v, seqlens = case(num_new, group, dim, longest, dtype)
    indices = selection(seqlens, num_new, k.shape[2], chosen) if chosen else None
    out = attend(backend, q, k, v, seqlens, window, indices)
    assert out.dtype == dtype
    right = expected(q, k, v, seqlens, window, indices)
    torch.testing.assert_close(out.float(), right, atol=tolerance, rtol=tolerance)


def check_weightings(
    backend: Attention, num_new, group, dim, dtype=torch.float32, tolerance=1e-5, only_both=False
):
    """Compare a backend for layers with sinks and soft caps with the definition: over all slots,
    within a window, over selected slots and over slots in no order, with scores.
    """
    q, k, v, seqlens = case(num_new, group, dim, num_new + 600, dtype)
    counted = some_tokens(num_new)
    selected = selection(seqlens, num_new, k.shape[2], 90)
    compact = compacted(k, v, seqlens, num_new, 50)
    for weighting in weightings(q.shape[2])[2 if only_both else 0 :]:
        ours = backend.weighted(weighting)
        right, scores = definition(q, k, v, seqlens, counted=counted, weighting=weighting)
        out, received = attend_scored(ours, q, k, v, seqlens, counted=counted)
        near, windowed = definition(q, k, v, seqlens, 130, weighting=weighting)
        few, _ = definition(q, k, v, seqlens, indices=selected, weighting=weighting)
        some_k, some_v, lengths, positions, _ = compact
        by_position, _ = definition(
            q, some_k, some_v, lengths, 40, positions=positions, weighting=weighting
        )
        pairs = [
            (attend(ours, q, k, v, seqlens), right),
            (out, right),
            (received, scores),
            (attend(ours, q, k, v, seqlens, 130), near),
            (attend_scored(ours, q, k, v, seqlens, 130)[1], windowed),
            (attend(ours, q, k, v, seqlens, indices=selected), few),
            (attend(ours, q, some_k, some_v, lengths, 40, positions=positions), by_position),
        ]
        for got, expected in pairs:
            torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)
    assert backend.weighting.is_plain


def check_positions(
    backend: Attention, num_new, group, dim, longest, count, window, tolerance=1e-5
):
    """Compare a window over slots in no order with the same entries selected from a cache in
    order.
    """
    q, k, v, seqlens = case(num_new, group, dim, longest)
    few_k, few_v, lengths, positions, slots = compacted(k, v, seqlens, num_new, count)
    out = attend(backend, q, few_k, few_v, lengths, window, positions=positions)
    right = expected(q, k, v, seqlens, window, slots)
    torch.testing.assert_close(out, right, atol=tolerance, rtol=tolerance)


def check_scores_at_positions(backend: Attention, num_new, group, dim, longest, window):
    """Compare the scores of a cache in no order with those of the same cache in order."""
    q, k, v, seqlens = case(num_new, group, dim, longest)
    other_k, other_v, lengths, positions, slots = compacted(k, v, seqlens, num_new, longest)
    ours = attend_scored(backend, q, other_k, other_v, lengths, window, positions=positions)
    out, scores = expected_scored(q, k, v, seqlens, window)
    right = scores.gather(2, slots.clamp(min=0)).masked_fill(slots < 0, 0.0)
    torch.testing.assert_close(ours, (out, right), atol=1e-5, rtol=1e-4)


def with_nan_behind(x, seqlens):
    """Keys or values, of which those behind each row's valid ones are not numbers."""
    behind = torch.arange(x.shape[2]) >= seqlens[:, None]
    return x.masked_fill(behind[:, None, :, None], float("nan"))


def expected_scored(q, k, v, seqlens, window=None, counted=None):
    """The same with scores."""
    return attend_scored(SdpaAttention(), q.float(), k.float(), v.float(), seqlens, window, counted)
