"""The number of repeats that a run takes: a given one, or as many as make the interval of its
speedup narrow.

K repeats.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from magicdec.config.scenario_settings import Compare
from magicdec.measure.intervals import half_width, ratio_of_repeats
from magicdec.measure.metrics import Times
from magicdec.scenarios.stored_units import Repeats, Unit
from magicdec.units import WAYS

FIRST = 5  # repeats, before an interval decides whether there are more
# Repeats after which the interval is narrow: a run that stops at the first is too often lucky.
IN_A_ROW = 2


@dataclass(frozen=True)
class Goal:
    """The repeats that a run asks for, and how many earlier ones do not count towards them."""

    scenario: Compare
    before: int = 0  # repeats of a disturbed run, which are pooled with as many new ones

    @property
    def wanted(self) -> int:
        """Return how many repeats there must be at least."""
        repeats = self.scenario.repeats
        return self.before + (FIRST if repeats == "auto" else int(repeats))

    def is_reached(self, batch: Sequence[Unit], num_batches: int) -> bool:
        """Return whether a run's first batch has been decoded often enough; it decides for all
        batches.

        With scenario.repeats=auto that is when the interval is narrow, or when decoding has taken
        `max_minutes`.
        """
        comparable = [unit for unit in batch if unit.left_out is None]
        if self.scenario.repeats != "auto":
            return len(comparable) >= self.wanted
        if minutes(batch[self.before :], num_batches) >= self.scenario.max_minutes:
            return True
        return len(comparable) >= self.wanted and self._is_narrow(comparable)

    def _is_narrow(self, batch: Sequence[Unit]) -> bool:
        """Return whether the interval is, and was before each of the last repeats but the first of
        them.
        """
        times = Repeats.of([batch]).times
        widths = [precision(times[: len(times) - dropped]) for dropped in range(IN_A_ROW)]
        return all(width is not None and width <= self.scenario.precision for width in widths)

    def is_met_by(self, result: Mapping[str, Any]) -> bool:
        """Return whether a stored result has all repeats that are asked for."""
        number = self.number_of(result)
        if self.scenario.repeats != "auto":
            return number >= self.wanted
        reached = result.get("speedup_precision")
        is_narrow = reached is not None and reached <= self.scenario.precision
        is_late = result.get("repeats_minutes", 0.0) >= self.scenario.max_minutes
        return number > self.before and (is_late or (number >= self.wanted and is_narrow))

    @staticmethod
    def number_of(result: Mapping[str, Any]) -> int:
        """Return the comparable repeats of a stored result, disturbed ones included."""
        return int(result.get("repeats", 0)) + int(result.get("repeats_disturbed", 0))


def minutes(batch: Sequence[Unit], num_batches: int) -> float:
    """Return the minutes of decoding that all batches take for as many repeats as the first one
    has.
    """
    seconds = sum(
        g.round_seconds[-1] for unit in batch for g in unit.ways.values() if g.round_seconds
    )
    return num_batches * seconds / 60


def precision(times_K: Sequence[Times]) -> float | None:
    """Return half the interval of the speedup over these repeats, as a share of it; None for too
    few repeats.
    """
    estimate = ratio_of_repeats(*(_seconds(times_K, way) for way in WAYS))
    return None if estimate is None else half_width(estimate.parts)


def _seconds(times_K: Sequence[Times], way: str) -> list[float]:
    """Return the sum of all rows' times per token in each repeat; 1 for a way that is not
    measured.
    """
    return [
        sum(row.decode / row.decoded for batch in times[way] for row in batch if row.decoded)
        if way in times
        else 1.0
        for times in times_K
    ]
