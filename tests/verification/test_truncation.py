"""Cutting distributions: every way against the sorted definition, and the kernel for GPUs
compiled.
"""

import pytest
import torch

from magicdec.verification import sampling as ours
from magicdec.verification.sampling import (
    RowSampling,
    Sampling,
    Use,
    choose,
    draw,
    probabilities,
)
from tests.chi_square import chisquare
from tests.verification.twin import SETTINGS, check


@pytest.mark.parametrize(("vocab", "few"), [(11, 256), (300, 256), (300, 8)])
def test_against_the_sorted_definition(monkeypatch, vocab, few):
    """Small vocabularies are sorted; of large ones, only the likeliest tokens if these are
    enough.
    """
    monkeypatch.setattr(ours, "FEW", few)
    check(probabilities, vocab)


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (None, 0.5, [1]),  # the mass before the next token has reached 0.5
        (None, 0.5 + 2**-20, [1, 0]),
        (None, 0.75, [1, 0]),
        (None, 0.75 + 2**-20, [1, 0, 2]),  # of equal ones the first by number
        (None, 0.875 + 2**-20, [1, 0, 2, 4]),
        (None, 1.0, [1, 0, 2, 4]),
        (1, None, [1]),
        (2, None, [1, 0]),
        (3, None, [1, 0, 2, 4]),  # as likely as the third
        (6, None, [1, 0, 2, 4]),
        (2, 2 / 3 + 2**-20, [1, 0]),  # of what top-k leaves, two thirds and one
        (2, 2 / 3 - 2**-20, [1]),
    ],
)
@pytest.mark.parametrize("of_each_row", [False, True])
def test_tokens_are_kept_up_to_the_bound(top_k, top_p, kept, of_each_row):
    """A half, a quarter and two eighths, whose sums have no rounding."""
    p = torch.tensor([0.25, 0.5, 0.125, 0.0, 0.125, 0.0])
    sampling = Sampling(1.0, top_k=top_k, top_p=top_p)
    settings = sampling
    if of_each_row:
        settings = RowSampling(1, "cpu")
        settings.set_row(0, sampling)
    found = probabilities(p.log()[None, None], settings)[0, 0]
    expected = torch.zeros(6).index_copy_(0, torch.tensor(kept), p[kept] / p[kept].sum())
    assert sorted(found.nonzero().flatten().tolist()) == sorted(kept)
    torch.testing.assert_close(found, expected)


def test_rows_of_a_large_vocabulary_are_cut_as_each_alone():
    """By every token, by fewer and by more than there are, next to rows that keep one."""
    each = [Sampling(1.0), *(Sampling(0.8, top_k=k) for k in (1, 299, 300, 301, 4000))]
    each += [Sampling(1.3, top_p=1.0), Sampling(0.7, 40, 0.9), Sampling(0.7, top_p=0.3)]
    rows = RowSampling(len(each), "cpu")
    for row, sampling in enumerate(each):
        rows.set_row(row, sampling)
    logits = torch.randn(len(each), 2, 300, generator=torch.Generator().manual_seed(8))
    found = probabilities(logits, rows)
    assert (found > 0).sum(-1)[:7, 0].tolist() == [300, 1, 299, 300, 300, 300, 300]
    for row, sampling in enumerate(each):
        torch.testing.assert_close(found[row], probabilities(logits[row], sampling))


@pytest.mark.parametrize("vocab", [5000, 5120])
def test_draws_from_a_large_vocabulary_have_its_distribution(vocab):
    """Draw by blocks, the last of which may be shorter. No token of probability 0 is drawn;
    chi-square for the rest.
    """
    generator = torch.Generator().manual_seed(vocab)
    p = (torch.randn(vocab, generator=generator) * 3).softmax(-1)
    p[512:768] = p[::7] = 0.0  # a whole block and others' tokens
    p /= p.sum()
    count = 20_000
    u = ours.uniform_BT(Sampling(seed=2), torch.arange(count)[None], Use.DECIDE)[0]
    tokens = draw(p.expand(count, vocab), u)
    assert (p[tokens] > 0).all()
    likely = p > 20 / count
    counts = torch.bincount(tokens, minlength=vocab)
    found = torch.tensor([*counts[likely].tolist(), int(counts[~likely].sum())])
    expected = torch.tensor([*p[likely].tolist(), float(p[~likely].sum())], dtype=torch.float64)
    assert chisquare(found, expected * count / expected.sum()) > 1e-3


@pytest.mark.parametrize("vocab", [5000, 5120])
def test_a_draw_is_where_the_cumulative_distribution_exceeds_u(vocab):
    p = torch.randn(64, vocab, generator=torch.Generator().manual_seed(1)).softmax(-1)
    u = torch.rand(64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    u[:2] = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    cdf = p.double().cumsum(-1)
    token = draw(p, u)[:, None]
    threshold = u[:, None] * cdf[:, -1:]
    assert (cdf.gather(-1, token) > threshold - 1e-6).all()
    assert ((cdf - p).gather(-1, token) <= threshold + 1e-6).all()
    last = torch.zeros(2, vocab)
    last[:, -2:] = torch.tensor([0.25, 0.75])
    assert draw(last, torch.tensor([0.2, 0.3], dtype=torch.float64)).tolist() == [
        vocab - 2,
        vocab - 1,
    ]


@pytest.mark.parametrize("vocab", [300, 5000])
def test_a_draw_from_nan_is_a_token(vocab):
    """The token is looked up in the embedding; the pass that reads the logits reports them."""
    assert (
        0
        <= int(draw(torch.full((vocab,), float("nan")), torch.tensor(0.5, dtype=torch.float64)))
        < vocab
    )


def test_a_row_of_nans_leaves_others_as_they_are():
    """Its own probabilities are NaN, which a pass reports; cutting it must not fail."""
    logits = torch.randn(2, 3, 300, generator=torch.Generator().manual_seed(4))
    logits[1] = float("nan")
    rows = RowSampling(2, "cpu")
    rows.set_row(0, Sampling(0.8, 5, 0.9))
    rows.set_row(1, Sampling(0.8, top_p=0.9))
    for sampling in (*SETTINGS, rows):
        p = probabilities(logits, sampling)
        assert p[1].isnan().all()
        alone = Sampling(0.8, 5, 0.9) if sampling is rows else sampling
        torch.testing.assert_close(p[:1], probabilities(logits[:1], alone))


def test_a_token_does_not_depend_on_other_rows():
    logits = torch.randn(6, 2, 5000, generator=torch.Generator().manual_seed(3))
    logits *= torch.logspace(-1, 1, 6)[:, None, None]
    positions = torch.arange(2).expand(6, -1)
    for sampling in SETTINGS:
        together, _ = choose(logits, positions, Use.DECIDE, sampling)
        for row in range(6):
            alone = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sequence=row)
            assert torch.equal(
                choose(logits[row : row + 1], positions[:1], Use.DECIDE, alone)[0][0], together[row]
            )


@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("top_k", "top_p", "tiles"),
    [(50, 0.9, 1), (None, 0.9, 4), (50, None, 1)],
    ids=["both", "top_p", "top_k"],
)
def test_compiled(top_k, top_p, tiles, capability):
    """On a fake GPU a distribution takes three kernels, which sort nothing, wait for nothing and
    spill nothing, and its random numbers another one.

    On an H100 the three take at most 0.15 ms for the rows of a round, by the instructions that they
    issue: where top-k keeps 50 logits, and where a sixteenth of the vocabulary may be in the
    nucleus.
    """
    pytest.importorskip("triton", reason="needs Triton (Linux only)")
    from tests.gpu_rehearsal.compile import compiled
    from tests.gpu_rehearsal.fake import fake_cuda
    from tests.gpu_rehearsal.sass import truncation_seconds

    with fake_cuda() as recording:
        logits = torch.empty(24, 5, 128256, dtype=torch.bfloat16, device="cuda")
        positions = torch.empty(24, 5, dtype=torch.int64, device="cuda")
        with recording.of() as seen:
            choose(logits, positions, Use.DECIDE, Sampling(0.8, top_k, top_p))
    assert not seen.faults
    assert [launch.name for launch in seen.launches] == [
        "collect",
        "find_cut",
        "write",
        "draw_numbers",
    ]
    assert not {"sort", "topk", "bitwise_xor"} & {op.name for op in seen.ops}
    vocabulary = [op.name for op in seen.ops if (24, 5, 128256) in op.inputs]
    assert len(vocabulary) <= 3, vocabulary  # sums of blocks, a block
    kernels = [compiled(launch, capability) for launch in seen.launches]
    for kernel in kernels:
        assert kernel.spilled == 0
        assert kernel.programs >= 1
    for rows in (24, 120, 320) if capability == 90 else ():
        pairs = zip(seen.launches[:3], kernels, strict=False)
        assert (
            sum(truncation_seconds(launch, kernel, rows, tiles) for launch, kernel in pairs)
            <= 0.15e-3
        )


@pytest.mark.parametrize("setting", [Sampling(1.0), Sampling(0.8, 4, 0.9)])
def test_kernels_are_for_gpus(setting, monkeypatch):
    """Where they could be used, too."""
    monkeypatch.setattr(ours, "_kernels", lambda: pytest.fail("asked for kernels"))
    choose(torch.zeros(1, 1, 9), torch.zeros(1, 1, dtype=torch.int64), Use.DECIDE, setting)


def test_a_gpu_cuts_nothing_of_a_plain_distribution():
    pytest.importorskip("triton", reason="needs Triton (Linux only)")
    from tests.gpu_rehearsal.fake import fake_cuda

    with fake_cuda() as recording:
        logits = torch.empty(2, 5, 1000, device="cuda")
        positions = torch.empty(2, 5, dtype=torch.int64, device="cuda")
        with recording.of() as seen:
            choose(logits, positions, Use.DECIDE, Sampling(0.8))
    assert [launch.name for launch in seen.launches] == ["draw_numbers"]


@pytest.mark.gpu
def test_on_a_gpu():
    check(lambda logits, sampling: probabilities(logits.cuda(), sampling).cpu(), 40_000)
