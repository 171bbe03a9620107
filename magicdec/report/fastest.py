"""The answer that a store gives: the fastest configuration at each place, how sure that is, and
what was held constant.

A place is what is given or assumed, such as model, machine, text, context and batch. The rest is
chosen, and ranked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from magicdec.measure.intervals import MIN_REPEATS, MIN_ROWS, Estimate, difference
from magicdec.measure.trust import noise
from magicdec.report.query import LOAD_KEYS, constants, informative
from magicdec.report.verdict import estimates
from magicdec.tracking.cells import cell
from magicdec.tracking.columns import Row, interval
from magicdec.tracking.store import counted
from magicdec.units import enumerated, is_number

GIVEN = (
    "target.name",
    "device",
    "hardware.name",
    "data.name",
    "data.task",
    "sampling.temperature",
    "scenario.alpha",
    "draft.synthetic_acceptance",
    "batch.context_len",
    "batch.size",
    *LOAD_KEYS,
)
# What each speedup compares.
PER = {"speedup": "row", "speedup_wall": "batch", "speedup_duration": "level"}
HELD_IN_WORDS = {
    "target.name": "model",
    "device": "machine",
    "batch.size": "batch",
    "batch.context_len": "context",
    "data.name": "text",
}
MAX_SETTINGS, MAX_NAMED, MAX_PLACES = 6, 3, 10
MAX_RIVALS = 20  # the next best, which are compared with the best
MEASURED, PREDICTED = "speedup", "predicted/speedup"
BY = {
    MEASURED: (
        "Measure: time per output token (TPOT), against each run's own autoregressive baseline"
    ),
    PREDICTED: "Measure: the cost model's speedup",
}

FASTER, SLOWER, WITHIN_NOISE, UNKNOWN = "faster", "slower", "within noise", "not known"
# What the sentence about a place adds to its speedup, by whether speculation is faster there.
IN_A_SENTENCE = {
    FASTER: "",
    SLOWER: "; autoregressive decoding is faster",
    WITHIN_NOISE: "; not faster than autoregressive decoding by more than noise",
    UNKNOWN: (
        f"; an interval needs at least {MIN_ROWS} rows and {MIN_REPEATS} repeats (scenario.repeats)"
    ),
}
MEASURED_ONCE = "; a level is measured once, without an interval"


@dataclass(frozen=True)
class RankedPlace:
    """The best run at a place, and the others, the next best first."""

    best: Row
    others: Sequence[Row]
    key: str

    @cached_property
    def rivals(self) -> list[Row]:
        """Return the others that are not slower than the best by more than noise. Without an
        interval of the best nothing is known, and there are none.
        """
        if self.key == PREDICTED or interval(self.best, self.key) is None:
            return []
        estimate = _estimate(self.best)
        trust = _trust(self.best)
        near = islice((row for row in self.others if _trust(row) == trust), MAX_RIVALS)
        return [row for row in near if not _is_slower(row, self.best, estimate)]

    @property
    def noisy_above(self) -> list[Row]:
        """Return the noisy runs whose speedup is greater than that of the best, which can be
        trusted more.
        """
        drawn = is_synthetic(self.best)
        least = self.best[self.key]
        return [row for row in self.others if row[self.key] > least and is_synthetic(row) == drawn]

    @property
    def verdict(self) -> str:
        """Return whether speculation is faster here."""
        if self.key == PREDICTED:
            return FASTER if self.best[PREDICTED] > 1 else SLOWER
        return verdict_of(self.best, self.key)

    @property
    def faster(self) -> str:
        """Return which way of decoding is faster here, in words."""
        if self.verdict == FASTER:
            return "speculative"
        if self.verdict == UNKNOWN:
            repeats = self.best.get("repeats", 0)
            is_few = 0 < repeats < MIN_REPEATS
            return f"{UNKNOWN} ({counted(repeats, 'repeat') if is_few else 'no interval'})"
        if self.verdict == WITHIN_NOISE:
            return WITHIN_NOISE
        plain = self.best.get("autoregressive/tokens_per_second")
        return (
            f"autoregressive, {cell(float(plain))} tokens/s"
            if is_number(plain)
            else "autoregressive"
        )

    def figure(self) -> str:
        """Return the speedups of the best run, each with its interval."""
        if self.key == PREDICTED:
            return f"predicted {self.best[PREDICTED]:.2f}x per row"
        keys = [key for key in PER if is_number(self.best.get(key))]
        text = " and ".join(
            f"{self.best[key]:.2f}x per {PER[key]}{_bracket(self.best, key)}" for key in keys
        )
        return text.replace("(", "(95% interval ", 1)


@dataclass(frozen=True)
class Answer:
    """One ranking: the places in order, by which speedup, and the settings in which places and
    candidates differ.
    """

    key: str
    places: Sequence[RankedPlace]
    given: Sequence[str]
    chosen: Sequence[str]
    held: Row

    @property
    def top(self) -> RankedPlace:
        """Return the place with the greatest speedup among those whose best run can be trusted
        most. A speedup with an interval can be trusted more than one without.
        """
        return max(
            self.places,
            key=lambda place: (
                _trust(place.best),
                interval(place.best, self.key) is not None,
                place.best[self.key],
            ),
        )

    @property
    def given_in_words(self) -> str:
        """Return the settings that tell one place from another, in words."""
        return enumerated([HELD_IN_WORDS.get(key, key) for key in self.given], "and")

    @property
    def of_places(self) -> str:
        """Return what the places are, in words, after their number."""
        kind = "values" if len(self.given) == 1 else "combinations"
        return f"{kind} of {self.given_in_words}"

    def winner(self, place: RankedPlace) -> str:
        """Say which configuration is the fastest at a place, or from which others it cannot be
        distinguished.
        """
        best = self._name(place.best)
        figure = place.figure()
        rest = IN_A_SENTENCE[place.verdict]
        if _is_measured_once(place.best):
            rest += MEASURED_ONCE
        if reasons := noise(place.best):
            rest += f"; noisy: {', '.join(reasons)}"
        if place.noisy_above:
            rest += f"; {counted(len(place.noisy_above), 'noisy run')} above it: measure again"
        if not place.others:
            return f"{best}: {figure}{rest}"
        if place.verdict == UNKNOWN:
            return f"{UNKNOWN}: {best} was measured as the fastest, {figure}{rest}"
        if not place.rivals:
            return f"{best} is the fastest, {figure}{rest}"
        more = len(place.rivals) - MAX_NAMED
        alike = [self._name(row) for row in place.rivals[:MAX_NAMED]] + (
            [counted(more, "other")] if more > 0 else []
        )
        return f"not distinguishable: {best}, {figure}, and {', '.join(alike)}{rest}"

    def where(self, place: RankedPlace) -> str:
        """Name a place among several; "" if there is one."""
        return ", ".join(
            f"{key}={cell(place.best[key])}" for key in self.given if key in place.best
        )

    def sentences(self) -> Iterator[str]:
        """Yield a sentence for each place, and what was held constant; nothing without measured
        speedups to compare.
        """
        if self.key != MEASURED or not any(place.others for place in self.places):
            return
        for place in self.places[:MAX_PLACES]:
            yield ": ".join(filter(None, (self.where(place), self.winner(place))))
        if len(self.places) > MAX_PLACES:
            yield f"and {len(self.places) - MAX_PLACES} more {self.of_places}: see the report"
        words = {key: word for key, word in HELD_IN_WORDS.items() if key in self.held}
        held = [f"{word} {cell(self.held[key])}" for key, word in words.items()]
        yield f"held constant: {', '.join(held) or 'nothing'}"

    def _name(self, row: Row) -> str:
        return " ".join(f"{key}={cell(row[key])}" for key in self.chosen if key in row) or str(
            row["id"]
        )


def answer(rows: Sequence[Row]) -> Answer | None:
    """Return the ranking of the runs that are done, by what was measured or else predicted; None
    without a speedup.

    Synthetic acceptance ranks below all that was measured, and a noisy run below those that are
    not. What does not fit in memory is no candidate.
    """
    done = [row for row in rows if row.get("status") == "done"]
    key = MEASURED if any(is_number(row.get(MEASURED)) for row in done) else PREDICTED
    candidates = [
        row
        for row in done
        if is_number(row.get(key)) and not (key == PREDICTED and is_too_large(row))
    ]
    if not candidates:
        return None
    given = [name for name in GIVEN if len({row.get(name) for row in candidates}) > 1]
    places: dict[tuple, list[Row]] = {}
    for row in sorted(candidates, key=lambda row: (_trust(row), row[key]), reverse=True):
        places.setdefault(tuple(row.get(name) for name in given), []).append(row)
    chosen = [
        name
        for name in informative(candidates)
        if name not in given and not name.startswith("data.")
    ]
    ordered = sorted(
        places.items(),
        key=lambda place: [(isinstance(v, str), v is None, v or 0) for v in place[0]],
    )
    ranking = [RankedPlace(best, others, key) for _, (best, *others) in ordered]
    return Answer(key, ranking, given, chosen[:MAX_SETTINGS], constants(candidates))


def verdict_of(row: Row, key: str) -> str:
    """Return whether speculation is faster by a measured speedup: what its interval says. Without
    one nothing is known, except of a level of load, which never has one: it goes by its value.
    """
    ends = interval(row, key)
    if ends is None and _is_measured_once(row):
        return FASTER if row[key] > 1 else SLOWER
    if ends is None:
        return UNKNOWN
    if ends[0] > 1:
        return FASTER
    return SLOWER if ends[1] < 1 else WITHIN_NOISE


def is_synthetic(row: Row) -> bool:
    """Return whether the acceptance was drawn, not measured."""
    return row.get("acceptance/source") == "synthetic"


def _trust(row: Row) -> tuple[bool, bool]:
    """Return how far a run's speedup can be trusted; the greater is the better."""
    return not is_synthetic(row), not noise(row)


def is_too_large(row: Row) -> bool:
    """Return whether a run was predicted not to fit in memory, and so was not measured."""
    return row.get("predicted/fits") is False and MEASURED not in row


def _is_measured_once(row: Row) -> bool:
    """Return whether a run is a level of load, which has no repeats."""
    return row.get("scenario.name") == "serve" and "repeats" not in row


def _is_slower(row: Row, best: Row, estimate: Estimate | None) -> bool:
    """Return whether a run is slower than the best by more than noise. Where the times of each row
    are not stored, their intervals must be apart.
    """
    if estimate and (other := _estimate(row)):
        change = difference(
            estimate, other, row.get("data/fingerprint") == best.get("data/fingerprint")
        )
        return abs(change.value) > change.half_width()
    of_best = interval(best, MEASURED)
    of_row = interval(row, MEASURED)
    return of_best is not None and of_row is not None and of_row[1] < of_best[0]


def _estimate(row: Row) -> Estimate | None:
    is_compared = row.get("scenario.name") == "compare" and "folder" in row
    return estimates(row).get(MEASURED) if is_compared else None


def _bracket(row: Row, key: str) -> str:
    ends = interval(row, key)
    return f" ({ends[0]:.2f}x to {ends[1]:.2f}x)" if ends else ""
