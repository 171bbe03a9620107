"""The Triton kernels of sampling in Triton's interpreter; test_interpreted.py runs this file."""

import pytest
import torch

from magicdec.kernels import triton_sampling
from magicdec.verification import sampling as ours
from magicdec.verification.sampling import RowSampling, Sampling, Use, probabilities, uniform_BT
from tests.verification.twin import SETTINGS, check


@pytest.mark.parametrize(
    ("vocab", "rows", "setting", "dtype"),
    [
        (11, slice(None), 0, torch.bfloat16),
        (11, slice(2, 6), 6, torch.float32),
        (11, slice(3), 5, torch.float16),
        (600, slice(1, 4, 2), 8, torch.bfloat16),
        (600, slice(2, 4), 1, torch.float32),  # of many ties, some behind the first block
        (600, slice(1, 2), 0, torch.bfloat16),
        (11, slice(2), 9, torch.float32),
    ],
)
def test_against_the_sorted_definition(monkeypatch, vocab, rows, setting, dtype):
    """The larger vocabulary is no multiple of a block. The interpreter takes half a second a
    row.
    """
    monkeypatch.setattr(triton_sampling, "BLOCK", 128)

    def truncated(logits, s):
        return triton_sampling.truncated(logits, s.temperature, s.top_k, s.top_p)

    check(truncated, vocab, [SETTINGS[setting]], rows, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kth", [-2.4e38, torch.finfo(torch.bfloat16).min, -torch.inf])
def test_the_kth_logit_may_be_the_least_number(kth, dtype):
    """As of a model that masks tokens so. All that are as likely as the k-th are kept."""
    logits = torch.tensor([[0.0, kth, kth, 1.0, -torch.inf, kth]], dtype=dtype)
    for top_k in (2, 3, 5):
        given = Sampling(1e4, top_k=top_k)
        kept = triton_sampling.truncated(logits, given.temperature, given.top_k, None)
        torch.testing.assert_close(kept, probabilities(logits, given))


@pytest.mark.parametrize("setting", [Sampling(1.0, top_k=4), Sampling(1.0, top_p=0.9)])
def test_few_logits_are_copied(monkeypatch, setting):
    """A peaked row is read in parts: a few of each part for top-k, and those that are not too
    unlikely for top-p.
    """
    launch, copied = triton_sampling.find_cut, []

    class Watched:
        def __getitem__(self, grid):
            def watched(*arguments, **options):
                copied.append(arguments[launch.arg_names.index("counts")])
                launch[grid](*arguments, **options)

            return watched

    monkeypatch.setattr(triton_sampling, "BLOCK", 128)
    monkeypatch.setattr(triton_sampling, "find_cut", Watched())
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(5)) * 8
    triton_sampling.truncated(logits, setting.temperature, setting.top_k, setting.top_p)
    (counts,) = copied
    assert counts.shape == (1, 8)
    assert 4 <= counts.sum() <= 150


def test_rows_have_settings_of_their_own():
    each = [
        Sampling(),
        Sampling(1.0),
        Sampling(0.6, top_k=3),
        Sampling(1.4, top_p=0.7),
        Sampling(0.8, 4, 0.9),
    ]
    rows = RowSampling(len(each), "cpu")
    for row, sampling in enumerate(each):
        rows.set_row(row, sampling)
    logits = torch.randn(len(each), 1, 33, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits[0, :, [9, 5]] = 7.0  # a greedy row takes the first of equal ones
    p = triton_sampling.truncated(logits, rows.temperature, rows.top_k, rows.top_p)
    torch.testing.assert_close(p, probabilities(logits, rows), atol=1e-6, rtol=1e-5)
    assert p[0].argmax(-1).tolist() == [5]
    assert ours._kernels() is triton_sampling


@pytest.mark.parametrize("key", [7, -(1 << 62) + 5, "of each row"])
def test_the_same_random_numbers(key):
    """Bit for bit, over more than one block, also where positions are a view, as those of one step
    are.
    """
    rows, sampling = 50, RowSampling(50, "cpu")
    positions = torch.randint(1 << 60, (rows, 9), generator=torch.Generator().manual_seed(3))
    for row in range(rows):
        sampling.set_row(
            row,
            Sampling(0.7, seed=row // 2, sequence=3 * row)
            if key == "of each row"
            else Sampling(0.7),
        )
    if key != "of each row":
        sampling.key = key + torch.arange(rows)[:, None]
    for part in (positions, positions[:, 4:5], positions[:, 2:8]):
        for use in (Use.PROPOSE, Use.INNER_DECIDE):
            given = sampling.key if key == "of each row" else key
            assert torch.equal(
                triton_sampling.uniform(given, part, int(use)), uniform_BT(sampling, part, use)
            )
