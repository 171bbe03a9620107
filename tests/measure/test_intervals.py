"""Intervals, against hand-made arithmetic, SciPy's quantiles and studies whose truth is known."""

from math import exp, sqrt

import numpy as np
import pytest
from scipy import stats

from magicdec.config.omega import omega
from magicdec.measure import intervals
from magicdec.measure.intervals import acceptance_intervals, speedup_intervals
from tests.programs import ROOT

ROWS = [{(2, 0): 6, (2, 1): 3, (2, 2): 3}, {(2, 0): 8, (2, 1): 4, (2, 2): 1}] * 2


@pytest.mark.parametrize("freedom", [1, 2, 2.5, 7, 100])
def test_quantile(freedom):
    assert intervals.t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-5)


def test_acceptance():
    found = acceptance_intervals(ROWS)
    low, high = found["acceptance_rate_ci95"]
    accepted, proposed = np.array([9, 6] * 2), np.array([24, 26] * 2)
    without = [np.delete(accepted, i).sum() / np.delete(proposed, i).sum() for i in range(4)]
    error = sqrt(3 * np.var(without))
    assert low < 30 / 100 < high
    assert high - low == pytest.approx(2 * stats.t.ppf(0.975, 3) * error, rel=0.05)
    assert found["acceptance_length_ci95"] == pytest.approx([1 + 2 * low, 1 + 2 * high])
    assert [omega(2, alpha) for alpha in found["alpha_ci95"]] == pytest.approx(
        found["acceptance_length_ci95"]
    )


def test_acceptance_where_gamma_varies():
    found = acceptance_intervals([row | {(4, 2): number} for number, row in enumerate(ROWS)])
    assert found["acceptance_length_ci95"][0] < 1 + 42 / 56 < found["acceptance_length_ci95"][1]


def test_speedup_of_equal_rows_is_a_t_interval_around_the_median_log_ratio():
    plain, fast = np.full((3, 4), 3.0), np.repeat([[1.0], [1.5], [2.0]], 4, axis=1)
    error = sqrt(np.pi / 2 * 3 / (2 + np.pi / 2)) * stats.sem(np.log([3.0, 2.0, 1.5]))
    expected = stats.t.interval(0.95, 2, np.log(2.0), error)
    found = speedup_intervals(plain, fast, plain[:, 0], fast[:, 0])
    assert found["speedup_ci95"] == pytest.approx(np.exp(expected), rel=1e-4)
    assert found["speedup_wall_ci95"] == pytest.approx(np.exp(expected), rel=1e-4)


@pytest.mark.parametrize(("count", "too_large"), [(3, 0), (5, 0), (4, 0.08), (15, 0)])
def test_the_error_of_a_median_over_that_of_a_mean(count, too_large):
    errors = np.random.default_rng(0).normal(size=(100_000, count))
    simulated = np.median(errors, axis=1).std() * sqrt(count)
    assert simulated * 0.985 < intervals.median_error(count) < simulated * (1.015 + too_large)


def test_intervals_hold_the_median_that_a_run_reports_where_few_repeats_are_disturbed():
    """4 of 20 repeats are slow on one side; the mean of logs is far from the median of 1.5."""
    disturbed = np.r_[np.full(16, 1.0), np.full(4, 2.0)]
    plain = np.random.default_rng(0).normal(1.5, 0.002, 20)
    found = speedup_intervals(
        *(np.repeat(t[:, None], 4, 1) for t in (plain, disturbed)), plain, disturbed
    )
    reported = np.median(plain / disturbed)
    for low, high in found.values():
        assert low < reported < high
        assert sqrt(low * high) == pytest.approx(reported)


def test_speedup_without_noise_is_a_jackknife_over_rows():
    plain, fast = np.full((3, 4), 3.0), np.tile([1.0, 2.0, 2.0, 3.0], (3, 1))
    low, high = speedup_intervals(plain, fast, plain.max(1), fast.max(1))["speedup_ci95"]
    changes = [np.log(np.delete(fast[0], i).mean()) for i in range(4)]
    half = stats.t.ppf(0.975, 3) * sqrt(3 * np.var(changes))
    assert [low, high] == pytest.approx([1.5 * exp(-half), 1.5 * exp(half)], rel=1e-4)


def test_too_little_has_no_interval():
    assert acceptance_intervals(ROWS[:3]) == {}
    assert acceptance_intervals([]) == {}
    assert acceptance_intervals([{(2, 2): 5}] * 4) == {}
    assert acceptance_intervals([*ROWS[:3], {}]) == {}
    assert speedup_intervals(np.ones((2, 9)), np.ones((2, 9)), np.ones(2), np.ones(2)) == {}
    assert [*speedup_intervals(np.ones((3, 3)), np.ones((3, 3)), np.ones(3), np.ones(3))] == [
        "speedup_wall_ci95"
    ]


def test_intervals_cover_the_truth_in_simulated_studies(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import intervals as simulation

    population = simulation.POPULATIONS["some repeat themselves"]
    found = simulation.coverage(population, studies=300, rows=8, repeats=3)
    for figure in found.values():
        chosen, *others = figure.values()
        assert 0.925 <= chosen <= 0.98
        assert min(others) < 0.92
    assert max(simulation.alarms(population, studies=300, rows=8, repeats=3).values()) <= 0.065
