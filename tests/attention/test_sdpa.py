"""The SDPA backend against attention written out row by row."""

import pytest
import torch

from magicdec.attention.base import Shape
from magicdec.attention.sdpa import ALIGNMENT, MAX_FOLDED_TOKENS, SdpaAttention, attend_by_turns
from tests.attention.twins import check_positions, check_scores_at_positions

D = 8


def naive(q_BTHD, k_BKSD, v_BKSD, seqlens, window):
    """Each query on its own, over the entries that it may see."""
    B, T, H, _ = q_BTHD.shape
    out, group = torch.zeros_like(q_BTHD), H // k_BKSD.shape[1]
    for b in range(B):
        for t in range(T):
            end = int(seqlens[b]) - T + t + 1
            start = 0 if window is None else max(0, end - window)
            for h in range(H):
                k, v = k_BKSD[b, h // group, start:end], v_BKSD[b, h // group, start:end]
                out[b, t, h] = (k @ q_BTHD[b, t, h] / D**0.5).softmax(0) @ v
    return out


@pytest.mark.parametrize("num_new", [1, 2, 5, 9, MAX_FOLDED_TOKENS + 3])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("window", [None, 3, 40])
def test_against_the_naive_twin(num_new, group, ragged, window):
    generator = torch.Generator().manual_seed(num_new)
    rows, kv_heads, capacity = 3, 2, num_new + 30
    q = torch.randn(rows, num_new, kv_heads * group, D, generator=generator)
    k, v = torch.randn(2, rows, kv_heads, capacity, D, generator=generator)
    lengths = [num_new, num_new + 11, num_new + 30] if ragged else [num_new + 20] * rows
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    attention = SdpaAttention()
    out = attention.attend(q, k, v, attention.plan(seqlens, Shape(num_new, capacity, group, q.dtype), window))
    torch.testing.assert_close(out, naive(q, k, v, seqlens, window), atol=1e-5, rtol=1e-5)


def test_what_cuda_is_given_is_the_same():
    """Query heads by turns, under a mask whose rows are aligned."""
    q, k, v, seqlens = case(MAX_FOLDED_TOKENS + 3, 4, True)
    plan = SdpaAttention().plan(seqlens, Shape(q.shape[1], k.shape[2], 4, q.dtype), 40)
    assert plan.mask.shape[-1] % ALIGNMENT
    assert all(stride % ALIGNMENT == 0 for stride in plan.mask.stride()[:-1])
    out = attend_by_turns(q, k[:, :, : plan.length], v[:, :, : plan.length], plan.mask)
    torch.testing.assert_close(out, SdpaAttention().attend(q, k, v, plan), atol=1e-6, rtol=1e-6)


def test_what_lies_behind_the_valid_entries_does_not_matter():
    attention = SdpaAttention()
    q, k, v = torch.randn(2, 2, 2, D), torch.randn(2, 1, 20, D), torch.randn(2, 1, 20, D)
    seqlens = torch.tensor([7, 12], dtype=torch.int32)
    before = attention.attend(q, k, v, attention.plan(seqlens, Shape(2, 20, 2, q.dtype), None))
    k[0, :, 7:], v[0, :, 7:], k[1, :, 12:], v[1, :, 12:] = 1e4, 1e4, -1e4, 1e4
    after = attention.attend(q, k, v, attention.plan(seqlens, Shape(2, 20, 2, q.dtype), None))
    assert torch.equal(before, after)


def naive_scores(q_BTHD, k_BKSD, seqlens, window, counted):
    """The attention that each slot receives, over the query heads of a KV head and the tokens that count."""
    B, T, H, _ = q_BTHD.shape
    _, K, S, _ = k_BKSD.shape
    scores = torch.zeros(B, K, S)
    for b in range(B):
        for t in counted[b].nonzero().flatten().tolist():
            end = int(seqlens[b]) - T + t + 1
            start = 0 if window is None else max(0, end - window)
            for h in range(H):
                kv = h // (H // K)
                scores[b, kv, start:end] += (k_BKSD[b, kv, start:end] @ q_BTHD[b, t, h] / D**0.5).softmax(0)
    return scores


def case(num_new, group, ragged):
    generator = torch.Generator().manual_seed(num_new)
    rows, kv_heads, capacity = 3, 2, num_new + 30
    q = torch.randn(rows, num_new, kv_heads * group, D, generator=generator)
    k, v = torch.randn(2, rows, kv_heads, capacity, D, generator=generator)
    lengths = [num_new, num_new + 11, num_new + 30] if ragged else [num_new + 20] * rows
    return q, k, v, torch.tensor(lengths, dtype=torch.int32)


@pytest.mark.parametrize("num_new", [1, 5, MAX_FOLDED_TOKENS + 3])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_scores_against_the_naive_twin(num_new, group, ragged, window):
    q, k, v, seqlens = case(num_new, group, ragged)
    attention = SdpaAttention()
    plan = attention.plan(seqlens, Shape(num_new, k.shape[2], group, q.dtype), window)
    some = torch.arange(num_new) % 3 != torch.arange(len(q))[:, None]
    for counted, named in ((torch.ones_like(some), None), (some, some)):
        out, scores = attention.attend_scored(q, k, v, plan, named)
        torch.testing.assert_close(out, naive(q, k, v, seqlens, window), atol=1e-5, rtol=1e-5)
        expected = naive_scores(q, k, seqlens, window, counted)
        torch.testing.assert_close(scores, expected[..., : scores.shape[-1]], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(scores.sum(-1), group * counted.sum(1, keepdim=True).expand(-1, 2).float())


@pytest.mark.parametrize("num_new", [1, 4])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("window", [None, 6])
def test_selected_slots_against_the_naive_twin(num_new, group, ragged, window):
    """Each KV head reads slots of its own; the twin sees only these, the new tokens causal among themselves."""
    q, k, v, seqlens = case(num_new, group, ragged)
    rows, kv_heads, capacity, _ = k.shape
    generator = torch.Generator().manual_seed(7)
    selected = torch.full((rows, kv_heads, 9 + num_new), -1)
    expected = torch.zeros_like(q)
    for b in range(rows):
        before = int(seqlens[b]) - num_new
        for h in range(kv_heads):
            chosen = torch.randperm(before, generator=generator)[: 7 + h] if before else torch.zeros(0, dtype=int)
            slots = torch.cat((torch.arange(before, before + num_new), chosen))
            selected[b, h, : len(slots)] = slots
            for t in range(num_new):
                own = before + t
                seen = [s for s in slots.tolist() if s <= own and (window is None or s > own - window)]
                for g in range(group):
                    p = (k[b, h, seen] @ q[b, t, h * group + g] / D**0.5).softmax(0)
                    expected[b, t, h * group + g] = p @ v[b, h, seen]
    selected[:, :, -1] = capacity - 1 if not ragged else -1  # a slot behind the valid ones counts for nothing
    attention = SdpaAttention()
    plan = attention.plan(seqlens, Shape(num_new, capacity, group, q.dtype), window)
    out = attention.attend(q, k, v, plan, selected)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_new", [1, 5, MAX_FOLDED_TOKENS + 3])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("window", [1, 6, 40])
def test_a_window_over_slots_in_no_order(num_new, group, window):
    """Some of the entries, and all of them; the tested twin selects slots of a cache in order."""
    for count in (20, 200):
        check_positions(SdpaAttention(), num_new, group, D, num_new + 90, count, window)
    check_scores_at_positions(SdpaAttention(), num_new, group, D, num_new + 90, window)
