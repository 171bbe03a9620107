"""The confidence of a prediction: an interval for its speedup, and the probability that it pays.

Both are the errors that the cost model has made on rows to which nothing was fitted, of the same
kind: measurements of engines by others, which were held back while the model was changed, or rows
of a calibrated machine. Sources weigh equally, whatever the number of their rows.
"""

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from math import exp, log
from pathlib import Path
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from magicdec.costmodel.round import Setup

TABLE = Path(__file__).parent / "published" / "errors.csv"
COVERED = 0.9  # of the intervals
LARGE_BATCH = 32  # rows of a batch from which engines compute rather than read
MIN_SOURCES = 3  # of errors of one kind; with fewer, those of more kinds count
# An opinion that weighs as much as one source: gains and losses are equally likely.
PRIOR = 0.5
LOOKUPS = ("ngram", "suffix")
HEADS = ("eagle", "eagle3", "fr-spec", "hass", "mtp", "dflash", "dspark")


class Case(NamedTuple):
    """A prediction as far as its error depends on it."""

    is_calibrated: bool  # on this machine, with this software
    draft: str
    batch: int

    @property
    def family(self) -> str:
        """Return the kind of draft: a lookup, a head on the target's hidden states, or a model."""
        if self.draft in LOOKUPS:
            return "lookup"
        return "head" if self.draft in HEADS else "model"


class Error(NamedTuple):
    """The error of one row: the log of the measured over the predicted speedup."""

    case: Case
    source: str
    log_ratio: float


class Confidence(NamedTuple):
    """An interval that holds 90% of the measured speedups per row, the probability of a gain, and
    the share of comparable measurements in which their errors leave one.
    """

    low: float
    high: float
    pays: float
    share: float
    num_sources: int

    @override
    def __str__(self) -> str:
        """Return the share and the interval in words. The probability is left out: with few sources
        it stays far from 1.
        """
        interval = f"90% of such predictions: {self.low:.2f}x to {self.high:.2f}x per row"
        sources = f"{self.num_sources} source{'s' if self.num_sources > 1 else ''}"
        alike = "" if self.share in (0, 1) else ", each of which counts alike"
        return f"{self._in_measurements} of {sources}{alike}; {interval}"

    @property
    def _in_measurements(self) -> str:
        if self.share == 1:
            return "pays in every comparable measurement"
        if self.share == 0:
            return "does not pay in any comparable measurement"
        if self.share >= PRIOR:
            return f"pays in {self.share:.0%} of comparable measurements"
        return f"does not pay in {1 - self.share:.0%} of comparable measurements"


def confidence(
    case: Case, speedup: float, errors: Iterable[Error] | None = None
) -> Confidence | None:
    """Return how sure a predicted speedup is; None where no errors of such predictions are known.

    `errors` replace those that are shipped.
    """
    alike = _alike(case, shipped() if errors is None else list(errors))
    if not alike:
        return None
    rows_of = Counter(error.source for error in alike)
    weights = np.array([1 / rows_of[error.source] for error in alike])
    ratios = np.array([error.log_ratio for error in alike])
    # A new source is one more than those known, as in conformal prediction.
    tail = max(0.0, 1 - (1 + COVERED) / 2 * (1 + 1 / len(rows_of)))
    low = speedup * exp(_quantile(ratios, weights, tail))
    high = speedup * exp(_quantile(ratios, weights, 1 - tail))
    is_gain = ratios > -log(speedup)
    gains, num_sources = float(weights[is_gain].sum()), len(rows_of)
    share = 1.0 if is_gain.all() else gains / num_sources  # the sum of weights is rounded
    return Confidence(low, high, (gains + PRIOR) / (num_sources + 1), share, num_sources)


def case_of(setup: Setup) -> Case:
    """Return the case of a setup. What was not measured on its GPU is not calibrated either."""
    machine = setup.hardware
    is_measured = machine.kernels.knows(setup.work)
    return Case(machine.is_calibrated and is_measured, setup.draft.name, setup.batch)


@cache
def shipped() -> tuple[Error, ...]:
    """Return the errors on rows that were held back."""
    with TABLE.open(newline="") as lines:
        return tuple(
            Error(
                Case(row["calibrated"] == "True", row["draft"], int(row["batch"])),
                row["source"],
                float(row["log_ratio"]),
            )
            for row in csv.DictReader(lines)
        )


def _alike(case: Case, errors: Sequence[Error]) -> list[Error]:
    """Return the errors of the nearest kind that has enough sources: of its draft and its batches,
    of its batches, or of all.
    """
    same = [error for error in errors if error.case.is_calibrated == case.is_calibrated]
    if case.is_calibrated:  # of one kind, and of few sources
        return same
    by_batch = [
        error for error in same if (error.case.batch < LARGE_BATCH) == (case.batch < LARGE_BATCH)
    ]
    by_draft = [error for error in by_batch if error.case.family == case.family]
    for kind in (by_draft, by_batch):
        if len({error.source for error in kind}) >= MIN_SOURCES:
            return kind
    return same


def _quantile(values: np.ndarray, weights: np.ndarray, share: float) -> float:
    """Return a weighted quantile, between the values."""
    order = np.argsort(values)
    sorted_weights = weights[order]
    places = (np.cumsum(sorted_weights) - sorted_weights / 2) / sorted_weights.sum()
    return float(np.interp(share, places, values[order]))
