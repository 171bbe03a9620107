"""The Triton kernels under Triton's interpreter, against SDPA; test_interpreted.py runs this
file.
"""

import itertools

import pytest
import torch

from magicdec.attention.base import Shape
from magicdec.attention.cuda.triton import TritonAttention, Variant
from magicdec.attention.cuda.triton_codes import attend
from magicdec.kernels.split_kv import INTERPRETED
from magicdec.measure.footprint import Allocations
from tests.attention import twins
from tests.measure.test_footprint import counted_peak

# Of the largest output, about 1: fp32 as exact as it gets, else the rounding of the output and of
# the weights.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
assert INTERPRETED


# One row of a tile, some, all, and more than a tile. Dtypes, head dims and windows change along: a
# call takes a second.
ROWS = [(1, 1), (1, 8), (2, 4), (2, 8), (5, 4), (5, 8), (9, 3), (9, 8)]
CASES = [
    (*rows, *rest)
    for *rest, rows in zip(
        itertools.cycle(TOLERANCE), itertools.cycle([None, 150, None, None]), ROWS
    )
]


@pytest.mark.parametrize(("num_new", "group", "dtype", "window"), CASES)
def test_against_sdpa(num_new, group, dtype, window):
    dim = {1: 64, 2: 80, 5: 96, 9: 128}[num_new]
    twins.check(
        TritonAttention(), num_new, group, dim, 300, window, dtype, tolerance=TOLERANCE[dtype]
    )


@pytest.mark.parametrize(("num_new", "group", "splits"), [(5, 2, 3), (70, 2, 1)])
def test_sinks_and_soft_caps(num_new, group, splits, monkeypatch):
    monkeypatch.setattr("magicdec.attention.cuda.triton_grid.split_count", lambda *_: splits)
    twins.check_weightings(TritonAttention(), num_new, group, 64, only_both=True)


def test_tokens_of_queries_may_be_far_apart():
    """Their distances exceed 32 bits; pages that nobody writes take no memory."""
    q, k, v, seqlens = twins.case(3, 2, 64, 50, torch.float16)
    heads = q.shape[2]
    far = torch.empty(2**31 + 3 * heads * 64, dtype=torch.float16)
    far = far.as_strided(q.shape, (heads * 64, 2**30, 64, 1)).copy_(q)
    for call, others in ((twins.attend, (k, v, seqlens)), (twins.score_keys, (k, seqlens))):
        near_out, far_out = (call(TritonAttention(), queries, *others) for queries in (q, far))
        assert torch.equal(far_out, near_out)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("num_new", "group", "window"), [(40, 2, None), (70, 2, None), (70, 1, 40), (140, 1, 95)]
)
def test_more_query_rows_than_a_tile(num_new, group, window, splits, monkeypatch):
    """A prefill: tiles of one head's tokens, tiles in which one head ends and the next begins, and
    blocks that all query rows see, between others that some see.
    """
    assert num_new * group > 64
    monkeypatch.setattr("magicdec.attention.cuda.triton_grid.split_count", lambda *_: splits)
    twins.check(TritonAttention(), num_new, group, 64, num_new + 100, window)


SCORED = [(1, 1, None, torch.float32, 1, True), (2, 4, 60, torch.bfloat16, 3, True)]
SCORED += [(9, 2, 40, torch.float32, 1, False), (6, 3, None, torch.float32, 3, True)]


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize(("num_new", "group", "window", "dtype", "splits", "some"), SCORED)
def test_scores_against_sdpa(num_new, group, window, dtype, splits, some, written, monkeypatch):
    """Score all tokens or some, over more slots than one program sums, for more query rows than a
    tile holds.
    """
    monkeypatch.setattr("magicdec.attention.cuda.triton_grid.split_count", lambda *_: splits)
    monkeypatch.setattr(Variant, "tile", 16)
    monkeypatch.setattr("magicdec.attention.cuda.triton_scores.SUMMED", 128)
    if not written:
        monkeypatch.setattr("magicdec.attention.cuda.triton_scores.MOST_WRITTEN", 0)
    q, k, v, seqlens = twins.case(num_new, group, 64, 150, dtype)
    counted = twins.some_tokens(num_new) if some else None
    out, scores = twins.attend_scored(TritonAttention(), q, k, v, seqlens, window, counted)
    right_out, right_scores = twins.expected_scored(q, k, v, seqlens, window, counted)
    torch.testing.assert_close(out.float(), right_out, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    # Scores that are written in half precision, or of queries in it.
    rough = dtype != torch.float32
    tolerance = {"atol": 1e-4, "rtol": 1e-2} if rough else {"atol": 1e-5, "rtol": 1e-4}
    torch.testing.assert_close(scores, right_scores, **tolerance)
    ours = twins.score_keys(TritonAttention(), q, k, seqlens, window, counted)
    torch.testing.assert_close(ours, right_scores, **tolerance)
    again, scores = twins.observed(TritonAttention(), q, k, v, seqlens, window)
    assert torch.equal(again, out)
    _, right_scores = twins.expected_scored(q, k, v, seqlens, window, twins.ends(num_new))
    torch.testing.assert_close(scores, right_scores, **tolerance)


@pytest.mark.parametrize(
    ("num_new", "group", "dtype", "splits"),
    [(40, 4, torch.float32, 1), (70, 2, torch.bfloat16, 3)],
)
def test_keys_are_scored_by_more_rows_than_a_tile(num_new, group, dtype, splits, monkeypatch):
    """What lies behind the valid entries is never read."""
    monkeypatch.setattr("magicdec.attention.cuda.triton_grid.split_count", lambda *_: splits)
    q, k, v, seqlens = twins.case(num_new, group, 80, 200, dtype)
    counted = twins.some_tokens(num_new)
    _, right = twins.expected_scored(q, k, v, seqlens, None, counted)
    k = twins.with_nan_behind(k, seqlens)
    ours = twins.score_keys(TritonAttention(), q, k, seqlens, None, counted)
    rough = dtype != torch.float32
    torch.testing.assert_close(ours, right, atol=1e-4, rtol=1e-2 if rough else 1e-4)


@pytest.mark.parametrize(("num_new", "window"), [(1, None), (4, 100)])
def test_selected_slots_against_sdpa(num_new, window):
    twins.check(TritonAttention(), num_new, 4, 64, 300, window, chosen=260)


@pytest.mark.parametrize(("num_new", "window", "splits"), [(1, 6, 2), (4, 100, 1), (4, 100, 3)])
def test_a_window_over_slots_in_no_order(num_new, window, splits, monkeypatch):
    monkeypatch.setattr("magicdec.attention.cuda.triton_grid.split_count", lambda *_: splits)
    twins.check_positions(TritonAttention(), num_new, 4, 64, 200, 150, window)
    twins.check_scores_at_positions(TritonAttention(), num_new, 2, 64, 100, window)


CODED = [(4, 1, 4, 128, torch.bfloat16, 3), (8, 1, 1, 64, torch.float16, 1)]
CODED += [(4, 5, 4, 64, torch.float32, 2), (8, 2, 3, 128, torch.float32, 3)]


@pytest.mark.parametrize(("bits", "num_new", "group", "dim", "dtype", "splits"), CODED)
def test_codes_against_sdpa(bits, num_new, group, dim, dtype, splits, monkeypatch):
    """One row holds no codes, one some, and one little else."""
    monkeypatch.setattr("magicdec.attention.cuda.triton_grid.split_count", lambda *_: splits)
    calls = []
    monkeypatch.setattr(
        "magicdec.attention.cuda.triton_codes.attend", lambda *x: calls.append(x) or attend(*x)
    )
    *arguments, coded = twins.coded_case(num_new, group, dim, 300, bits, dtype)
    out = twins.attend_coded(TritonAttention(), *arguments, coded)
    right = twins.expected_coded(*arguments, coded)
    torch.testing.assert_close(out.float(), right, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert calls


@pytest.mark.parametrize(
    ("dim", "num_new", "window"), [(96, 1, None), (64, 33, None), (64, 1, 100)]
)
def test_codes_that_the_kernel_cannot_read_are_decoded_first(dim, num_new, window, monkeypatch):
    monkeypatch.setattr("magicdec.attention.cuda.triton_codes.attend", None)
    *arguments, coded = twins.coded_case(num_new, 2, dim, 150, 4)
    out = twins.attend_coded(TritonAttention(), *arguments, coded, window)
    torch.testing.assert_close(
        out, twins.expected_coded(*arguments, coded, window), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("method", "num_new", "splits"),
    [("attend", 5, 2), ("attend", 5, 1), ("attend", 20, 1), ("attend_scored", 5, 2)],
)
def test_what_is_foreseen_is_what_is_allocated(method, num_new, splits, monkeypatch):
    monkeypatch.setattr("magicdec.attention.cuda.triton_grid.split_count", lambda *_: splits)
    q, k, v, seqlens = twins.case(num_new, 4, 64, 100)
    attention = TritonAttention()
    method = getattr(attention, method)
    plan = attention.plan(seqlens, Shape(num_new, k.shape[2], 4, q.dtype), None)
    allocated = counted_peak(lambda: method(q, k, v, plan))
    q, k, v = (x.to("meta") for x in (q, k, v))
    with Allocations([q, k, v]) as estimated:
        method(q, k, v, plan)
    assert estimated.peak == allocated


def test_what_lies_behind_the_valid_entries_is_never_read():
    q, k, v, seqlens = twins.case(2, 2, 64, 150)
    k, v = twins.with_nan_behind(k, seqlens), twins.with_nan_behind(v, seqlens)
    assert all(x.isfinite().all() for x in twins.attend_scored(TritonAttention(), q, k, v, seqlens))
