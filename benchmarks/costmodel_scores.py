"""Score the cost model: its errors on measured rows, and on rows that a calibration has not
seen.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import nan

import numpy as np
import pandas

from magicdec.architectures.model_config import ModelConfig
from magicdec.costmodel.calibration import errors_of
from magicdec.costmodel.hardware import Hardware, hardware_named
from magicdec.costmodel.round import RoundTimes, round_times
from magicdec.costmodel.tables import Row
from magicdec.errors import UserError

CLEAR = 0.06  # a measured speedup at least this far from 1 has a side
Model = Callable[[str], ModelConfig]


@dataclass(frozen=True)
class Compared:
    """A measured row and its prediction, for the acceptance that the row gives."""

    row: Row
    times: RoundTimes
    # Relative, of the times that the row gives: target, draft, verify.
    time_errors: Mapping[str, float]
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Return the relative error of the speedup."""
        return self.predicted / self.measured - 1

    @property
    def wrong_side(self) -> bool:
        """Return True if a clear gain is predicted to be a loss, or the reverse."""
        clear = abs(self.measured - 1) >= CLEAR - 1e-9
        return clear and (self.measured - 1) * (self.predicted - 1) <= 0


def compare(row: Row, model: Model, machines: Mapping[str, Hardware] | None = None) -> Compared:
    """Predict one row, on its machine as named or as one of `machines`."""
    machine = hardware_named(row.hardware) if machines is None else machines[row.hardware]
    measured = row.speedup
    if measured is None and row.autoregressive_ms is not None and row.speculative_ms is not None:
        measured = row.autoregressive_ms / row.speculative_ms
    if row.omega is None or measured is None:
        raise UserError(
            f"a row of {row.target} on {row.hardware} has no omega, or no speedup to compare with"
        )
    times = round_times(row.setup(model, machine), row.gamma)
    return Compared(row, times, errors_of(machine, row, model), times.speedup(row.omega), measured)


@dataclass(frozen=True)
class Score:
    """Errors over rows, absolute and relative: of speedups, and of T_T in the median; nan where
    there is nothing.
    """

    rows: int
    median_error: float
    p90_error: float
    wrong_side: int
    spearman: float
    target_decode_median_error: float


def score(compared: Sequence[Compared]) -> Score:
    """Summarise the errors of some rows."""
    if not compared:
        return Score(0, nan, nan, 0, nan, nan)
    errors = np.abs([c.error for c in compared])
    target = [abs(c.time_errors["target"]) for c in compared if "target" in c.time_errors]
    speedups = pandas.DataFrame([(c.predicted, c.measured) for c in compared])
    return Score(
        len(compared),
        float(np.median(errors)),
        float(np.quantile(errors, 0.9)),
        sum(c.wrong_side for c in compared),
        float(speedups.corr(method="spearman").iloc[0, 1]),
        float(np.median(target)) if target else nan,
    )


def cross_validate(
    rows: Sequence[Row],
    model: Model,
    fit: Callable[[Sequence[Row]], Mapping[str, Hardware]],
    splits: Iterable[tuple[Sequence[Row], Sequence[Row]]] | None = None,
    folds: int = 5,
) -> list[Compared]:
    """Predict every left-out row on machines that `fit` makes of the others; `splits` are pairs of
    rows to fit and to predict.
    """
    own = (
        ([row for i, row in enumerate(rows) if i % folds != n], rows[n::folds])
        for n in range(folds)
    )
    found: list[Compared] = []
    for known, left_out in splits or own:
        machines = fit(known)
        found += [compare(row, model, machines) for row in left_out]
    return found
