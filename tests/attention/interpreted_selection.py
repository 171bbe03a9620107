"""The selecting kernels in Triton's interpreter, against the operators that they replace;
test_interpreted.py runs this file.
"""

import pytest
import torch

from magicdec.attention.base import PageBounds, Weighting
from magicdec.attention.cuda import triton_selection
from magicdec.attention.cuda.triton import TritonAttention
from magicdec.attention.sdpa import SdpaAttention
from tests.attention import twins

TRITON, SDPA = TritonAttention(), SdpaAttention()


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Let few numbers take several turns, and copies overflow."""
    monkeypatch.setattr(triton_selection, "MIN_GROUPS", 32)
    monkeypatch.setattr(triton_selection, "ALONE", 32)


def as_sets(slots):
    """Return the slots of each head; each is selected once."""
    heads = [[int(slot) for slot in head if slot >= 0] for head in slots.flatten(0, -2)]
    assert all(len(head) == len(set(head)) for head in heads)
    return [set(head) for head in heads]


def recall(slots, right):
    """Return the share of the right slots that are selected."""
    pairs = list(zip(as_sets(slots), as_sets(right), strict=True))
    return sum(len(mine & its) for mine, its in pairs) / sum(len(its) for _, its in pairs)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("num_new", "group", "dim", "window", "dtype", "count"),
    [
        (1, 4, 64, None, torch.float32, 20),
        (2, 3, 80, 60, torch.float32, 20),
        (1, 1, 128, None, torch.float32, 400),
        (2, 4, 64, None, torch.bfloat16, 30),
    ],
)
def test_slots(num_new, group, dim, window, dtype, count, splits, monkeypatch):
    """Rows from a few tokens on, of which one has fewer than are selected."""
    monkeypatch.setattr(triton_selection.grid, "split_count", lambda *_: splits)
    q, k, v, seqlens = twins.case(num_new, group, dim, 300, dtype)
    length = seqlens - num_new
    exact = q.float(), k.float(), v.float()
    plan = twins.plan_of(TRITON, q, k, seqlens, window)
    selected = TRITON.select_slots(q, k, v, plan, length, count)
    plan = twins.plan_of(SDPA, *exact[:2], seqlens, window)
    right = SDPA.select_slots(*exact, plan, length, count)
    scores = twins.attend_scored(SDPA, *exact, seqlens, window)[1]
    mass, most = twins.at(selected, scores).sum(2), twins.at(right, scores).sum(2)
    for slots, size in zip(as_sets(selected), length.repeat_interleave(2).tolist(), strict=True):
        assert slots <= set(range(size))
    torch.testing.assert_close(mass, most, rtol=1e-5 if dtype == torch.float32 else 1e-3, atol=1e-6)
    if window is None:
        assert recall(selected, right) >= (1 if dtype == torch.float32 else 0.9)


def page_bounds(keys, lengths, size):
    """Return the least and the largest value of each feature of pages, as a cache keeps them."""
    pages = -(-keys.shape[2] // size)
    padded = torch.nn.functional.pad(keys, (0, 0, 0, pages * size - keys.shape[2]))
    behind = (torch.arange(pages * size) >= lengths[:, None])[:, None, :, None]
    least, largest = (padded.masked_fill(behind, sign * torch.inf) for sign in (1, -1))
    return PageBounds(
        least.unflatten(2, (pages, size)).amin(3), largest.unflatten(2, (pages, size)).amax(3), size
    )


@pytest.mark.parametrize(
    ("num_new", "group", "dim", "size", "window", "dtype", "count", "splits"),
    [
        (1, 4, 64, 8, None, torch.float32, 7, 1),
        (2, 2, 80, 5, 100, torch.float32, 6, 2),
        (1, 8, 128, 1, None, torch.float32, 50, 1),
        (1, 4, 64, 16, None, torch.float32, 30, 1),
        (1, 4, 64, 4, None, torch.bfloat16, 16, 3),
    ],
)
def test_pages(num_new, group, dim, size, window, dtype, count, splits, monkeypatch):
    """More pages than some rows have, pages partly outside of a window, and an empty row."""
    monkeypatch.setattr(triton_selection.grid, "split_count", lambda *_: splits)
    q, keys, _, seqlens = twins.case(num_new, group, dim, 400, dtype)
    length = seqlens - num_new
    first = torch.zeros_like(length) if window is None else length + 1 - window
    exact = page_bounds(keys.float(), length, size)
    bounds = PageBounds(exact.least_BKPD.to(dtype), exact.largest_BKPD.to(dtype), size)
    slots = TRITON.select_pages(q, bounds, first, length, count)
    right = SDPA.select_pages(q.float(), exact, first, length, count)
    assert slots.shape == (*keys.shape[:2], count * size)
    assert recall(slots, right) >= (1 if dtype == torch.float32 else 0.9)
    assert sum(map(len, as_sets(slots))) == sum(map(len, as_sets(right)))


def test_a_weighting_is_left_to_operators():
    """Of slots and of pages: the kernels know the softmax alone."""
    q, k, v, seqlens = twins.case(1, 4, 64, 200)
    weighting = Weighting(torch.linspace(-1, 6, 8), 20.0)
    bounds, length = page_bounds(k, seqlens - 1, 8), seqlens - 1
    selected = []
    for backend in (TRITON.weighted(weighting), SDPA.weighted(weighting)):
        plan = twins.plan_of(backend, q, k, seqlens, None)
        slots = backend.select_slots(q, k, v, plan, length, 10)
        pages = backend.select_pages(q, bounds, torch.zeros_like(length), length, 3)
        selected.append((as_sets(slots), as_sets(pages)))
    assert selected[0] == selected[1]


@pytest.mark.parametrize("kind", ["noise", "few", "equal", "rising"])
@pytest.mark.parametrize("count", [1, 17, 300])
def test_largest(kind, count):
    """Scores of which many are equal, or so many are large that all are searched."""
    generator = torch.Generator().manual_seed(count)
    scores = torch.rand(2, 3, 2, 257, generator=generator)
    if kind == "few":
        scores = (4 * scores).round()
    if kind == "equal":
        scores.fill_(0.25)
    if kind == "rising":  # a group holds the largest
        scores[..., ::32] += 1
    first, last = torch.tensor([[[0]], [[100]]]), torch.tensor([[257], [0], [130]])
    selected = TRITON.select_largest(scores, first, last, count)
    right = SDPA.select_largest(scores, first, last, count)
    assert selected.shape == right.shape
    bounds = torch.stack((first.expand(2, 3, 2), last.expand(2, 3, 2)), -1).view(-1, 2).tolist()
    for slots, (begin, end) in zip(as_sets(selected), bounds, strict=True):
        assert slots <= set(range(begin, end))
    values = twins.at(selected, scores).sort(-1).values
    assert torch.equal(values, twins.at(right, scores).sort(-1).values)
