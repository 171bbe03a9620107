"""95% intervals of a run's figures that hold with few rows and few repeats.

N rows, K repeats. The error of a figure has up to two parts: the choice of rows, which is estimated
by a jackknife, and the noise of repeats, which all rows of a repeat share. The interval is
Student's t with the degrees of freedom of both parts (Welch and Satterthwaite), on a scale on which
errors are about symmetric: the logit of a share, the log of a speedup. docs/results/studies.md
shows how often the intervals of this and of other methods cover the truth.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from math import exp, log, pi, sqrt, tan
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from magicdec.config.omega import alpha_of_rounds

LEVEL = 0.95
MIN_ROWS, MIN_REPEATS = 4, 3  # with fewer there is no interval
Floats = NDArray[np.float64]
Rounds = Mapping[tuple[int, int], int]  # number of a row's rounds by proposed and accepted tokens
NONE = np.empty(0)


class Part(NamedTuple):
    """One source of a figure's error."""

    variance: float
    freedom: int  # degrees of freedom


class Estimate(NamedTuple):
    """A figure on its scale, and what its error is estimated from."""

    value: float
    # By how much the figure changes without each row; none if the rows are given.
    rows_N: Floats = NONE
    # The figure of each repeat, scaled so that the error of their mean is that of `value`; none if
    # it does not depend on time.
    repeats_K: Floats = NONE

    @classmethod
    def of_median(cls, values_K: ArrayLike, rows_N: Floats = NONE) -> "Estimate":
        """Return the log of the median over repeats, which is what a run reports. The repeats are
        scaled by `median_error`.
        """
        values = np.asarray(values_K, dtype=np.float64)
        return cls(log(np.median(values)), rows_N, median_error(len(values)) * np.log(values))

    @property
    def parts(self) -> list[Part]:
        """Return the sources of the error."""
        rows = len(self.rows_N)
        repeats = len(self.repeats_K)
        of_rows = [Part((rows - 1) * float(np.var(self.rows_N)), rows - 1)] if rows else []
        return of_rows + (
            [Part(float(np.var(self.repeats_K)) / (repeats - 1), repeats - 1)] if repeats else []
        )

    @property
    def ends(self) -> tuple[float, float]:
        """Return the low and the high end of the interval, on the figure's scale."""
        half = half_width(self.parts)
        return self.value - half, self.value + half


def half_width(parts: Sequence[Part]) -> float:
    """Return half the width of the interval of a figure whose error has these parts."""
    total = sum(part.variance for part in parts)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(part.variance**2 / part.freedom for part in parts)
    return t_quantile(round(freedom, 2)) * sqrt(total)


def median_error(count: int) -> float:
    """Return the standard error of the median of `count` normal errors over that of their mean:
    within 1% for odd counts, up to 8% too large for even ones from 4 on.
    """
    return sqrt(pi / 2 * count / (count + pi / 2 - 1))


@cache
def t_quantile(freedom: float) -> float:
    """Return the value that the size of Student's t exceeds with probability 1 - LEVEL. With t =
    sqrt(freedom) tan(a), the density of a is proportional to cos(a)^(freedom - 1).
    """
    angles = np.linspace(0, pi / 2, 20_001)
    density = np.cos(angles) ** (freedom - 1)
    mass = np.cumsum(density[1:] + density[:-1])
    angle = float(np.interp(LEVEL * mass[-1], mass, angles[1:]))
    return sqrt(freedom) * tan(angle)


def acceptance_intervals(rows: Sequence[Rounds]) -> dict[str, list[float]]:
    """Return the intervals of the acceptance rate, the acceptance length and alpha; {} where there
    are none.
    """
    counts = [
        [sum(n * x for (_, x), n in row.items()), sum(n * x for (x, _), n in row.items())]
        for row in rows
    ]
    rounds = np.array([sum(row.values()) for row in rows], dtype=np.float64)
    accepted, proposed = np.array(counts, dtype=np.float64).reshape(-1, 2).T
    rate = share(accepted, proposed)
    if rate is None:
        return {}
    gamma = proposed.sum() / rounds.sum()  # the mean, if it varies
    filled = share(accepted, gamma * rounds)
    by_gamma: Counter[int] = Counter()
    for row in rows:
        for (size, _), number in row.items():
            by_gamma[size] += number
    lengths = [1 + gamma * from_logit(end) for end in filled.ends] if filled else []
    return {
        "acceptance_rate_ci95": [from_logit(end) for end in rate.ends],
        "acceptance_length_ci95": lengths,
        "alpha_ci95": [alpha_of_rounds(length, by_gamma) for length in lengths],
    }


def share(accepted_N: ArrayLike, possible_N: ArrayLike) -> Estimate | None:
    """Return the logit of accepted / possible tokens over all rows. Return None for too few rows
    that have possible tokens, and where all or none are accepted.
    """
    accepted = np.asarray(accepted_N, dtype=np.float64)
    possible = np.asarray(possible_N, dtype=np.float64)
    accepted = accepted[possible > 0]
    possible = possible[possible > 0]
    total = possible.sum()
    if len(possible) < MIN_ROWS or not 0 < accepted.sum() < total:
        return None
    rate = accepted.sum() / total
    changes_N = (rate * possible - accepted) / (total - possible)
    return Estimate(log(rate / (1 - rate)), changes_N / (rate * (1 - rate)))


def from_logit(value: float) -> float:
    """Return the share whose logit is `value`."""
    return 1 / (1 + exp(-value))


def speedup_intervals(
    plain_KN: ArrayLike, fast_KN: ArrayLike, plain_K: ArrayLike, fast_K: ArrayLike
) -> dict[str, list[float]]:
    """Return the intervals of both speedups, from each row's time per token and from the times to
    decode the batches; {} where there are none.
    """
    estimates = {
        "speedup_ci95": ratio_of_rows(plain_KN, fast_KN),
        "speedup_wall_ci95": ratio_of_repeats(plain_K, fast_K),
    }
    return {
        name: [exp(end) for end in estimate.ends]
        for name, estimate in estimates.items()
        if estimate
    }


def ratio_of_rows(plain_KN: ArrayLike, fast_KN: ArrayLike) -> Estimate | None:
    """Return the log of the ratio of the rows' mean times per token, the median over repeats; None
    for too few rows or repeats.
    """
    plain = np.asarray(plain_KN, dtype=np.float64)
    fast = np.asarray(fast_KN, dtype=np.float64)
    if plain.ndim != 2 or plain.shape[0] < MIN_REPEATS or plain.shape[1] < MIN_ROWS:
        return None
    ratios_K = plain.sum(1) / fast.sum(1)
    without_KN = np.log((plain.sum(1, keepdims=True) - plain) / (fast.sum(1, keepdims=True) - fast))
    return Estimate.of_median(ratios_K, (without_KN - np.log(ratios_K)[:, None]).mean(0))


def ratio_of_repeats(plain_K: ArrayLike, fast_K: ArrayLike) -> Estimate | None:
    """Return the log of the ratio of the times that the same batches take, the median over repeats;
    None for too few repeats or no times.

    A batch waits for its slowest row, and one batch does not tell how slow the slowest row of
    another is. The rows are taken as given: the interval is about these batches.
    """
    plain = np.asarray(plain_K, dtype=np.float64)
    fast = np.asarray(fast_K, dtype=np.float64)
    # A time is 0 where every row ended at its first token.
    if len(plain) < MIN_REPEATS or not (plain.all() and fast.all()):
        return None
    return Estimate.of_median(plain / fast)


def log_ratio(above_N: ArrayLike, below_N: ArrayLike) -> Estimate | None:
    """Return the log of the ratio of two sums over rows; None for too few rows with anything
    below.
    """
    above = np.asarray(above_N, dtype=np.float64)
    below = np.asarray(below_N, dtype=np.float64)
    above = above[below > 0]
    below = below[below > 0]
    if len(below) < MIN_ROWS:
        return None
    value = log(above.sum() / below.sum())
    return Estimate(value, np.log((above.sum() - above) / (below.sum() - below)) - value)


class Difference(NamedTuple):
    """The difference of two estimates, and the parts of its error."""

    value: float
    rows: list[Part]
    repeats: list[Part]

    def half_width(self, more: int = 0) -> float:
        """Return half the width of its interval, as expected after so many more repeats of both."""
        longer = [
            Part(variance * (free + 1) / (free + 1 + more), free + more)
            for variance, free in self.repeats
        ]
        return half_width(self.rows + longer)


def difference(a: Estimate, b: Estimate, is_paired: bool) -> Difference:
    """Return b - a. Rows are pairs where both runs have decoded the same prompts."""
    repeats = [part for side in (a, b) for part in side._replace(rows_N=NONE).parts]
    if is_paired and len(a.rows_N) == len(b.rows_N):
        rows = Estimate(0.0, b.rows_N - a.rows_N).parts
    else:
        rows = [part for side in (a, b) for part in side._replace(repeats_K=NONE).parts]
    return Difference(b.value - a.value, rows, repeats)


class ShareOfBest(NamedTuple):
    """The share of the best that a choice reaches."""

    of_best: float  # of the largest median: too low
    apart: float | None  # of the best of the other turns, turn by turn; None with a single turn
    apart_ci95: list[float] | None = None  # None with too few turns


def share_of_best(turns: Sequence[Mapping[int, float]], choice: int) -> ShareOfBest:
    """Return the share of the best speed that a choice reaches, from the speed of every choice in
    every turn.

    The largest of several noisy speeds is too large: against it even a perfect choice falls short
    (the winner's curse). So the best of each turn is chosen from the other turns only, and both
    are compared on the held-out turn. That is not too low, but too high where the other turns
    choose badly: the true share is expected between the two.
    """
    medians = {choice: median(turn[choice] for turn in turns) for choice in turns[0]}
    of_best = medians[choice] / max(medians.values())
    if len(turns) == 1:
        return ShareOfBest(of_best, None)
    logs = [
        log(turn[choice] / turn[_best([*turns[:at], *turns[at + 1 :]])])
        for at, turn in enumerate(turns)
    ]
    apart = Estimate(fmean(logs), repeats_K=np.array(logs))
    ends = [exp(end) for end in apart.ends] if len(turns) >= MIN_REPEATS else None
    return ShareOfBest(of_best, exp(apart.value), ends)


def _best(turns: Sequence[Mapping[int, float]]) -> int:
    """Return the fastest choice by the mean of its log."""
    return max(turns[0], key=lambda choice: fmean(log(turn[choice]) for turn in turns))
