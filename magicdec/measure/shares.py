"""The share of the best speed that a choice reaches, where the best one is known from noisy turns only.

The largest of several noisy speeds is too large: against it even a perfect choice falls short (the winner's curse). So
the best of each turn is chosen by the other turns, and both are compared on the turn that had no say. That is not too
low, but too high where the other turns choose badly: the true share is expected between the two.
"""

from collections.abc import Mapping, Sequence
from math import exp, log
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from magicdec.measure.intervals import MIN_REPEATS, Estimate


class Share(NamedTuple):
    """The share of the best that a choice reaches."""

    of_best: float  # of the largest median: too low
    apart: float | None  # of the best of the other turns, turn by turn; None with a single turn
    apart_ci95: list[float] | None = None  # None with too few turns


def share_of_best(turns: Sequence[Mapping[int, float]], choice: int) -> Share:
    """Return the share of a choice, from the speed of every choice in every turn."""
    medians = {one: median(turn[one] for turn in turns) for one in turns[0]}
    of_best = medians[choice] / max(medians.values())
    if len(turns) == 1:
        return Share(of_best, None)
    logs = [
        log(turn[choice] / turn[_best([*turns[:number], *turns[number + 1 :]])]) for number, turn in enumerate(turns)
    ]
    apart = Estimate(fmean(logs), repeats_K=np.array(logs))
    ends = [exp(end) for end in apart.ends] if len(turns) >= MIN_REPEATS else None
    return Share(of_best, exp(apart.value), ends)


def _best(turns: Sequence[Mapping[int, float]]) -> int:
    """Return the fastest choice by the mean of its log."""
    return max(turns[0], key=lambda one: fmean(log(turn[one]) for turn in turns))
