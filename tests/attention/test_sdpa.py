"""The SDPA backend against the definition of attention."""

import pytest
import torch

from magicdec.attention.base import Shape
from magicdec.attention.sdpa import ALIGNMENT, MAX_FOLDED_TOKENS, SdpaAttention, attend_by_turns
from tests.attention import twins

D, SDPA = 8, SdpaAttention()
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def case(num_new, group, ragged):
    q, k, v, seqlens = twins.case(num_new, group, D, num_new + 30)
    return q, k, v, seqlens if ragged else torch.full_like(seqlens, num_new + 20)


@pytest.mark.parametrize("num_new", [1, 2, 5, 9, MAX_FOLDED_TOKENS + 3])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("window", [None, 3, 40])
def test_against_the_definition(num_new, group, ragged, window):
    """Attention, and the scores of all new tokens and of some."""
    q, k, v, seqlens = case(num_new, group, ragged)
    out = twins.attend(SDPA, q, k, v, seqlens, window)
    for counted in (None, torch.arange(num_new) % 3 != torch.arange(len(q))[:, None]):
        right = [x.float() for x in twins.definition(q, k, v, seqlens, window, counted=counted)]
        torch.testing.assert_close(out, right[0], **CLOSE)
        torch.testing.assert_close(
            [*twins.attend_scored(SDPA, q, k, v, seqlens, window, counted)], right, **CLOSE
        )


def test_what_cuda_is_given_is_the_same():
    """Query heads by turns, under a mask whose rows are aligned."""
    q, k, v, seqlens = case(MAX_FOLDED_TOKENS + 3, 4, True)
    plan = SDPA.plan(seqlens, Shape(q.shape[1], k.shape[2], 4, q.dtype), 40)
    assert plan.mask.shape[-1] % ALIGNMENT
    assert all(stride % ALIGNMENT == 0 for stride in plan.mask.stride()[:-1])
    out = attend_by_turns(q, k[:, :, : plan.length], v[:, :, : plan.length], plan.mask)
    torch.testing.assert_close(out, SDPA.attend(q, k, v, plan), atol=1e-6, rtol=1e-6)


def test_what_lies_behind_the_valid_entries_does_not_matter():
    q, k, v, seqlens = case(2, 2, True)
    before = twins.attend(SDPA, q, k, v, seqlens)
    for row, length in enumerate(seqlens):
        k[row, :, length:], v[row, :, length:] = 1e4, -1e4
    assert torch.equal(before, twins.attend(SDPA, q, k, v, seqlens))


@pytest.mark.parametrize("num_new", [1, 4])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("window", [None, 6])
def test_selected_slots_against_the_definition(num_new, group, ragged, window):
    """Each KV head reads slots of its own; one behind the valid ones counts for nothing."""
    q, k, v, seqlens = case(num_new, group, ragged)
    selected = twins.selection(seqlens, num_new, k.shape[2], 9)
    right, _ = twins.definition(q, k, v, seqlens, window, selected)
    torch.testing.assert_close(
        twins.attend(SDPA, q, k, v, seqlens, window, selected), right.float(), **CLOSE
    )


@pytest.mark.parametrize("num_new", [1, 5, MAX_FOLDED_TOKENS + 3])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("window", [1, 6, 40])
def test_a_window_over_slots_in_no_order(num_new, group, window):
    """Some of the entries, and all of them; the tested twin selects slots of a cache in order."""
    for count in (20, 200):
        twins.check_positions(SDPA, num_new, group, D, num_new + 90, count, window)
    twins.check_scores_at_positions(SDPA, num_new, group, D, num_new + 90, window)


@pytest.mark.parametrize(("num_new", "group"), [(1, 4), (5, 1), (70, 2)])
def test_sinks_and_soft_caps(num_new, group, monkeypatch):
    """Prefills write out the scores of some tokens at a time."""
    monkeypatch.setattr("magicdec.attention.sdpa.SCORES_AT_ONCE", 3 * 2 * group * 800 * 9)
    twins.check_weightings(SdpaAttention(), num_new, group, 16)
