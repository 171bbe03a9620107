"""A linear fit whose coefficients have bounds, without scipy. N values, C columns."""

from collections.abc import Sequence
from itertools import product
from math import inf, sqrt

import numpy as np
from numpy.typing import NDArray


def fit_bounded(
    matrix_NC: NDArray[np.float64], values_N: NDArray[np.float64], most: Sequence[float]
) -> tuple[list[float], float]:
    """Return the coefficients from 0 to `most` whose sum of columns is nearest to the values by
    shares of these, and the root mean square of what is left.

    With few columns, the best is found by trying all sets of those that are 0, free, or at their
    bound.
    """
    matrix_NC = matrix_NC / values_N[:, None]
    least = inf
    bounds_C = np.array(most)
    best_C = np.zeros(len(most))
    states = [("zero", "free") if bound == inf else ("zero", "free", "bound") for bound in most]
    for chosen in product(*states):
        free_C = np.array([state == "free" for state in chosen])
        fixed_C = np.where([state == "bound" for state in chosen], bounds_C, 0.0)
        rest_N = 1.0 - matrix_NC @ fixed_C
        found_C = fixed_C.copy()
        found_C[free_C] = np.linalg.lstsq(matrix_NC[:, free_C], rest_N, rcond=None)[0]
        left = float(np.square(matrix_NC @ found_C - 1.0).sum())
        if left < least and (found_C >= 0).all() and (found_C <= bounds_C).all():
            best_C, least = found_C, left
    return best_C.tolist(), sqrt(least / len(values_N))
