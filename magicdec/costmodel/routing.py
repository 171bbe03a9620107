"""The number of experts that a pass touches.

L layers, R rows, T consecutive tokens of a row, K experts that a token takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HALVINGS = 40  # of the interval in which `Routing.novelty` is found


@dataclass(frozen=True)
class Routing:
    """The choice of experts: how popular each is, and how much the tokens of a row differ.

    Rows choose independently. The first token of a row in a pass is one free choice, each further
    one `novelty` of a free choice: 0 where consecutive tokens choose alike, 1 where they are as
    different as those of other rows.
    """

    # Relative, in any order and of any number of experts; empty: all are alike.
    popularity: tuple[float, ...] = ()
    novelty: float = 1.0

    def touched(self, experts: int, per_token: int, rows: int, tokens: float) -> float:
        """Return the expected number of distinct experts that a layer's pass touches."""
        choices = rows * (1 + self.novelty * (tokens - 1))
        return float(np.sum(1 - (1 - self._chances(experts, per_token)) ** choices))

    def _chances(self, experts: int, per_token: int) -> NDArray[np.float64]:
        """Return the probability of each expert that a token takes it."""
        if not self.popularity:
            return np.full(experts, per_token / experts)
        places = np.linspace(0, 1, experts)
        known = np.linspace(0, 1, len(self.popularity))
        weights = np.interp(places, known, np.sort(self.popularity))
        return np.minimum(1.0, per_token * weights / weights.sum())


UNIFORM = Routing()


def recorded(chosen_LRTK: NDArray[np.int64] | Sequence[object], experts: int) -> Routing:
    """Return the routing that choices of consecutive tokens show, on average over layers."""
    chosen_LRTK = np.asarray(chosen_LRTK)
    counts = np.sort([np.bincount(layer.ravel(), minlength=experts) for layer in chosen_LRTK])
    pairs = np.concatenate((chosen_LRTK[:, :, :-1], chosen_LRTK[:, :, 1:]), axis=-1)
    distinct = (np.diff(np.sort(pairs), axis=-1) != 0).sum(-1) + 1
    return explaining(counts.mean(0), chosen_LRTK.shape[-1], float(distinct.mean()))


def explaining(popularity: Sequence[float] | NDArray, per_token: int, distinct: float) -> Routing:
    """Return the routing of experts of this popularity whose novelty explains how many distinct
    ones two consecutive tokens of a row touch.
    """
    shares = tuple(map(float, popularity))
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        explained = Routing(shares, middle).touched(len(shares), per_token, 1, 2)
        low, high = (middle, high) if explained < distinct else (low, middle)
    return Routing(shares, (low + high) / 2)
