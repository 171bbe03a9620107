"""Pearson's test of a distribution. To import scipy.stats takes each process of the suite more than
a second.

What is tested is drawn with fixed seeds: with another one, a right sampler falls below the suite's
bound of 1e-3 once in a thousand. One that is broken on purpose falls below 1e-4
(tests/drafts/test_hierarchical.py).
"""

import torch
from torch import Tensor


def chisquare(observed: Tensor, expected: Tensor | None = None) -> float:
    """Return the probability of counts as far from the expected ones, equal counts by default, or
    further.
    """
    observed = observed.double()
    expected = observed.mean().expand_as(observed) if expected is None else expected.double()
    torch.testing.assert_close(expected.sum(), observed.sum(), rtol=1e-6, atol=0)
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(observed) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))
