"""Score the cost model: its errors on measured rows, and on rows that a calibration has not seen."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import nan

import numpy as np

from magicdec.architectures import ModelConfig
from magicdec.costmodel.hardware import Hardware
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

    @property
    def time_errors(self) -> dict[str, float]:
        """Return the relative errors of T_T, T_D and T_V; nan for a time that the row does not give."""
        times, row = self.times, self.row
        pairs = {
            "target": (times.target.total, row.autoregressive_ms),
            "draft": (row.gamma * (times.draft.total + times.select.total), row.draft_ms),
            "verify": (times.verify.total, row.verify_ms),
        }
        return {name: nan if ms is None else 1e3 * predicted / ms - 1 for name, (predicted, ms) in pairs.items()}


def compare(row: Row, model: Model, machines: Mapping[str, Hardware] | None = None) -> Compared:
    """Predict one row, on its machine as named or as one of `machines`."""
    setup = row.setup(model, None if machines is None else machines[row.hardware])
    measured = row.speedup
    if measured is None and row.autoregressive_ms is not None and row.speculative_ms is not None:
        measured = row.autoregressive_ms / row.speculative_ms
    if row.omega is None or measured is None:
        raise UserError(f"a row of {row.target} on {row.hardware} has no omega, or no speedup to compare with")
    times = round_times(setup, row.gamma)
    return Compared(row, times, times.speedup(row.omega), measured)


@dataclass(frozen=True)
class Score:
    """Errors over rows: of speedups, and of T_T in the median."""

    rows: int
    median_error: float
    p90_error: float
    wrong_side: int
    spearman: float
    target_decode_median_error: float


def score(compared: Sequence[Compared]) -> Score:
    """Summarise; errors are absolute and relative, nan where there is nothing to summarise."""
    if not compared:
        return Score(0, nan, nan, 0, nan, nan)
    errors = np.abs([c.error for c in compared])
    target = [abs(c.time_errors["target"]) for c in compared if c.row.autoregressive_ms is not None]
    return Score(
        len(compared),
        float(np.median(errors)),
        float(np.quantile(errors, 0.9)),
        sum(c.wrong_side for c in compared),
        spearman([c.predicted for c in compared], [c.measured for c in compared]),
        float(np.median(target)) if target else nan,
    )


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the rank correlation, with mean ranks for ties; nan if either side does not vary."""
    ranks_a, ranks_b = _ranks(np.asarray(a)), _ranks(np.asarray(b))
    if np.ptp(ranks_a) == 0 or np.ptp(ranks_b) == 0:
        return nan
    return float(np.corrcoef(ranks_a, ranks_b)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def cross_validate(
    rows: Sequence[Row],
    model: Model,
    fit: Callable[[Sequence[Row]], Mapping[str, Hardware]],
    splits: Iterable[tuple[Sequence[Row], Sequence[Row]]] | None = None,
    folds: int = 5,
) -> list[Compared]:
    """Predict every left-out row on machines that `fit` makes of the others; `splits` are pairs of rows to fit and to
    predict.
    """
    if splits is None:
        splits = [
            (
                [row for i, row in enumerate(rows) if i % folds != fold],
                [row for i, row in enumerate(rows) if i % folds == fold],
            )
            for fold in range(folds)
        ]
    found = []
    for known, left_out in splits:
        fitted = fit(known)
        found += [compare(row, model, fitted) for row in left_out]
    return found
