"""Shares of the best: exact without noise, and unlike the share of the largest median not too low
with it.
"""

from statistics import fmean

import numpy as np
import pytest

from magicdec.measure.intervals import share_of_best


def test_without_noise_both_shares_are_the_ratio_to_the_best():
    turns = [{0: 1.0, 1: 1.5, 2: 2.0}] * 3
    found = share_of_best(turns, 1)
    assert found.of_best == pytest.approx(0.75)
    assert found.apart == pytest.approx(0.75)
    assert found.apart_ci95 == pytest.approx([0.75, 0.75])


def test_the_best_of_a_turn_is_chosen_by_the_others():
    turns = [{1: 1.0, 2: 1.1}, {1: 1.0, 2: 1.1}, {1: 1.0, 2: 0.8}]
    # The first two turns choose 2 for the last, where it is slow; of turns 1 and 3 (or 2 and 3), 1
    # is the better.
    assert share_of_best(turns, 1).apart == pytest.approx((1.0 * 1.0 * 1 / 0.8) ** (1 / 3))


@pytest.mark.parametrize(
    ("number", "apart", "interval"), [(1, False, False), (2, True, False), (3, True, True)]
)
def test_few_turns_give_less(number, apart, interval):
    found = share_of_best([{1: 1.0, 2: 1.1}] * number, 1)
    assert (found.apart is not None, found.apart_ci95 is not None) == (apart, interval)


def test_noise_lowers_the_share_of_the_largest_but_not_the_one_chosen_apart():
    rng = np.random.default_rng(0)
    of_best, apart, covered = [], [], 0
    for _ in range(400):  # five choices that are equally fast, with 5% of noise
        found = share_of_best(
            [dict(enumerate(np.exp(0.05 * rng.standard_normal(5)))) for _ in range(5)], 0
        )
        assert found.apart is not None
        assert found.apart_ci95 is not None
        of_best.append(found.of_best)
        apart.append(found.apart)
        covered += found.apart_ci95[0] <= 1.0 <= found.apart_ci95[1]
    assert fmean(of_best) < 0.98
    assert fmean(apart) == pytest.approx(1.0, abs=0.005)
    assert covered / 400 > 0.9


def test_the_true_share_lies_between_both():
    rng = np.random.default_rng(1)
    true = np.log([0.97, 1.0, 0.99])
    found = [
        share_of_best(
            [dict(enumerate(np.exp(true + 0.03 * rng.standard_normal(3)))) for _ in range(4)], 0
        )
        for _ in range(2000)
    ]
    assert fmean(one.of_best for one in found) < 0.97 < fmean(one.apart or 0.0 for one in found)
