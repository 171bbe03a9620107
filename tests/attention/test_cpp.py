"""The C++ backend against SDPA. Tolerances: 1e-5 in fp32; in bf16, against SDPA in fp32 on the same
numbers, 1%.
"""

import itertools
import math

import pytest
import torch

from magicdec.attention import cpp
from magicdec.attention.sdpa import SdpaAttention
from magicdec.kernels import library
from tests.attention import twins
from tests.threads import threads

if library.compiler() is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module")
def attention():
    return cpp.CppAttention()


@pytest.mark.parametrize(
    "num_new", [1, 2, 5, 9, cpp.CppAttention.max_new_tokens, cpp.CppAttention.max_new_tokens + 1]
)
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_against_sdpa(attention, num_new, group, dtype):
    """Lengths within a block, over several, and over several splits; head dims of one vector and of
    many.
    """
    for dim, longest, window in itertools.product((8, 80), (num_new + 30, 1300), (None, 3, 600)):
        twins.check(
            attention, num_new, group, dim, longest, window, dtype, tolerance=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("num_new", [1, 5, cpp.CppAttention.max_new_tokens + 1])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_sinks_and_soft_caps(attention, num_new, group, dtype):
    twins.check_weightings(attention, num_new, group, 32, dtype, TOLERANCE[dtype])


@pytest.mark.parametrize("num_new", [1, 2, 5, 9])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_scores_against_sdpa(attention, num_new, group, dtype):
    """Scores of all tokens and of some come from the same pass, so that the output is bit for bit
    that without.
    """
    for longest, window, counted in itertools.product(
        (40, 1300), (None, 3, 600), (None, twins.some_tokens(num_new))
    ):
        q, k, v, seqlens = twins.case(num_new, group, 16, num_new + longest, dtype)
        out, scores = twins.attend_scored(attention, q, k, v, seqlens, window, counted)
        right_out, right_scores = twins.expected_scored(q, k, v, seqlens, window, counted)
        torch.testing.assert_close(
            out.float(), right_out, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )
        torch.testing.assert_close(scores, right_scores, atol=1e-5, rtol=1e-5)
        assert torch.equal(out, twins.attend(attention, q, k, v, seqlens, window))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("num_new", "group"), [(1, 1), (1, 3), (5, 4), (cpp.CppAttention.max_new_tokens + 1, 2)]
)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_codes_against_sdpa(attention, bits, num_new, group, dtype):
    """Several splits, a window that begins within a block, and a head dim whose codes the kernel
    leaves to sdpa.

    The kernel rounds queries and weights to 8 bits. In the row without codes nothing is rounded.
    """
    for dim, window in itertools.product((64, 96, 40), (None, 601)):
        *arguments, coded = twins.coded_case(num_new, group, dim, 1300, bits, dtype)
        assert cpp.reads(coded) == (dim != 40)
        out = twins.attend_coded(attention, *arguments, coded, window)
        assert out.dtype == dtype
        right = twins.expected_coded(*arguments, coded, window)
        torch.testing.assert_close(
            out[0].float(), right[0], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )
        difference = (out.float() - right)[1:].square().mean().sqrt()
        assert difference < max(0.015 * right[1:].square().mean().sqrt(), TOLERANCE[dtype])


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_that_need_no_rounding_are_not_rounded(attention, bits):
    """All slots have the same score, and all values the same scale."""
    q, k, v, seqlens, coded = twins.coded_case(1, 3, 64, 700, bits)
    q.zero_()
    coded.v.scales[..., 0, :] = 0.25
    out = twins.attend_coded(attention, q, k, v, seqlens, coded)
    right = twins.expected_coded(q, k, v, seqlens, coded)
    torch.testing.assert_close(out, right, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_close_to_0_stay_finite(attention, bits):
    """Slots behind the first 128 have a score of -84, and a weight of 3e-37, next to those before
    them: 127 divided by it is more than float32 holds.
    """
    q, k, v, seqlens, coded = twins.coded_case(1, 3, 64, 700, bits)
    q.fill_(1.0)
    coded.k.scales[..., 0, :] = 0.0
    coded.k.scales[..., 1, :] = -84 / 64**0.5
    coded.k.scales[..., : 128 // 32, 1, :] = 0.0
    coded.v.scales[..., 0, :] = 0.25
    out = twins.attend_coded(attention, q, k, v, seqlens, coded)
    right = twins.expected_coded(q, k, v, seqlens, coded)
    torch.testing.assert_close(out, right, atol=2e-5, rtol=2e-5)


def test_codes_that_are_not_finite_stay_so(attention):
    q, k, v, seqlens, coded = twins.coded_case(1, 2, 64, 700, 4)
    coded.k.scales[1, 1, :, 0] = math.inf
    coded.v.scales[1, 2, :, 5] = math.nan
    out = twins.attend_coded(attention, q, k, v, seqlens, coded)
    assert out[0].isfinite().all()
    assert not out[1].isfinite().any()
    assert out[2].isnan().all()


def test_scores_of_more_tokens_than_the_kernel_takes_are_those_of_sdpa(attention):
    num_new = attention.max_new_tokens + 1
    arguments = *twins.case(num_new, 2, 16, 100), 40, twins.some_tokens(num_new)
    assert all(
        map(
            torch.equal,
            twins.attend_scored(attention, *arguments),
            twins.expected_scored(*arguments),
        )
    )


@pytest.mark.parametrize("num_new", [1, 4])
@pytest.mark.parametrize("window", [None, 6])
def test_selected_slots_against_sdpa(attention, num_new, window):
    twins.check(attention, num_new, 4, 64, 700, window, chosen=601)


@pytest.mark.parametrize("num_new", [1, 4, cpp.CppAttention.max_new_tokens + 1])
@pytest.mark.parametrize("window", [1, 6, 700])
def test_a_window_over_slots_in_no_order(attention, num_new, window):
    """Within a split, and over several."""
    for count in (20, 601):
        twins.check_positions(attention, num_new, 4, 64, 1300, count, window)
    twins.check_scores_at_positions(attention, num_new, 4, 64, 1300, window)


def test_what_lies_behind_the_valid_entries_is_never_read(attention):
    q, k, v, seqlens = twins.case(2, 2, 16, 600)
    k, v = twins.with_nan_behind(k, seqlens), twins.with_nan_behind(v, seqlens)
    assert all(x.isfinite().all() for x in twins.attend_scored(attention, q, k, v, seqlens))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("num_new", [1, 5, cpp.CppAttention.max_new_tokens + 1])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_what_is_not_finite_stays_so(attention, dtype, num_new, value):
    """One query, key or value, or all those of a head, spoil the outputs that depend on them, and
    no other row.
    """
    for of, where in itertools.product(range(3), ((1, 0, 0), (1, 0))):
        q, k, v, seqlens = twins.case(num_new, 2, 16, 700, dtype)
        (q.transpose(1, 2), k, v)[of][where] = value
        heads = slice(0, 1 if of == 0 else 2)
        outputs = [twins.attend(attention, q, k, v, seqlens)]
        if num_new <= attention.max_new_tokens:
            outputs.append(twins.attend_scored(attention, q, k, v, seqlens)[0])
            outputs.append(
                twins.attend(
                    attention, q, k, v, seqlens, indices=torch.arange(707).expand(3, 2, -1)
                )
            )
        for out in outputs:
            assert not out[1, 0 if where[2:] else slice(None), heads].isfinite().any()
            assert out[0::2].isfinite().all()


@pytest.mark.parametrize(("num_new", "window"), [(50, 700), (2, None)], ids=["prefill", "decode"])
def test_a_row_depends_neither_on_its_neighbours_nor_on_threads(attention, num_new, window):
    arguments = twins.case(num_new, 2, 64, 1300)

    def outputs(rows: slice):
        given = [x[rows] for x in arguments]
        if num_new > attention.max_new_tokens:
            return (twins.attend(attention, *given, window),)
        return twins.attend_scored(attention, *given, window)

    together = outputs(slice(None))
    with threads(2):
        assert all(map(torch.equal, outputs(slice(None)), together))
    for b in range(len(arguments[0])):
        alone = outputs(slice(b, b + 1))
        assert all(
            torch.equal(mine, theirs[b : b + 1])
            for mine, theirs in zip(alone, together, strict=True)
        )


@pytest.mark.parametrize("window", [None, 100])
def test_long_chunks_against_sdpa(attention, window):
    """Several tasks to each head, several blocks of slots; slots beyond the valid entries are never
    read.
    """
    q, k, v, seqlens = twins.case(150, 3, 24, 400)
    right = twins.expected(q, k, v, seqlens, window)
    k, v = twins.with_nan_behind(k, seqlens), twins.with_nan_behind(v, seqlens)
    torch.testing.assert_close(
        twins.attend(attention, q, k, v, seqlens, window), right, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("group", "num_new", "dim", "pages"), [(1, 1, 8, 1), (3, 1, 64, 70), (4, 2, 80, 257)]
)
def test_page_shares_against_pytorch(attention, dtype, group, num_new, dim, pages):
    """Rows look at a part of the pages, at none, and at ranges that reach beyond both ends."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(3, num_new, 2 * group, dim, generator=generator).to(dtype)
    keys = torch.randn(2, 3, 2, pages, dim, generator=generator).to(dtype)
    first, last = torch.tensor([0, pages // 3, pages]), torch.tensor([pages, pages // 2 + 1, pages])
    arguments = (keys.amin(0), keys.amax(0), first, last)
    right = SdpaAttention().page_shares(q.float(), *(x.float() for x in arguments[:2]), first, last)
    torch.testing.assert_close(attention.page_shares(q, *arguments), right, atol=1e-5, rtol=1e-5)
    for weighting in twins.weightings(q.shape[2]):
        twin, ours = SdpaAttention().weighted(weighting), attention.weighted(weighting)
        right = twin.page_shares(q.float(), *(x.float() for x in arguments[:2]), first, last)
        torch.testing.assert_close(ours.page_shares(q, *arguments), right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 5, 64, 300])
@pytest.mark.parametrize("size", [1, 17, 300])
@pytest.mark.parametrize("values", [1 << 20, 3])
def test_largest_scores_are_selected(attention, count, size, values):
    """Few values make ties; the largest may be infinite. PyTorch's selection holds the same
    values.
    """
    generator = torch.Generator().manual_seed(count)
    scores = torch.randint(values, (4, 2, size), generator=generator) / 7
    scores[0, 0, 0] = torch.inf
    first = torch.tensor([[0], [-5], [size // 2], [size]])
    last = torch.tensor([[size], [size + 9], [size - 1], [3]])
    found = attention.select_largest(scores, first, last, count)
    right = SdpaAttention().select_largest(scores, first, last, count)
    assert found.shape == right.shape == (4, 2, min(count, size))
    for row, head in itertools.product(range(4), range(2)):
        slots, others, own = found[row, head], right[row, head], scores[row, head]
        begin, end = first[row], last[row]
        chosen = slots[slots >= 0]
        assert (
            len(chosen.unique())
            == len(chosen)
            == min(count, max(0, min(end, size) - max(begin, 0)))
        )
        assert ((chosen >= begin) & (chosen < end)).all()
        assert torch.equal(own[chosen].sort().values, own[others[others >= 0]].sort().values)


def test_numbers_that_are_none_are_not_hidden_by_a_selection(attention):
    q = torch.full((1, 1, 2, 8), torch.nan)
    pages = torch.ones(1, 2, 5, 8)
    assert (
        attention.page_shares(q, pages, pages, torch.tensor([0]), torch.tensor([5])).isnan().all()
    )
