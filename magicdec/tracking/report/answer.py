"""The answer that a store gives: the fastest configuration at each place, how sure that is, and what was held constant.

A place is what is given or assumed, such as model, machine, text, context and batch. The rest is chosen, and ranked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from magicdec.tracking.cells import cell, is_number
from magicdec.tracking.reader import noise
from magicdec.tracking.report.query import constants, informative
from magicdec.tracking.report.rows import Row

GIVEN = (
    *("target.name", "device", "hardware.name", "data.name", "data.task", "sampling.temperature", "scenario.alpha"),
    *("draft.synthetic_acceptance", "batch.context_len", "batch.size", "load.concurrency", "load.rate"),
)
PER = {"speedup": "row", "speedup_wall": "batch", "speedup_duration": "level"}  # what each speedup compares
MAX_SETTINGS = 6
MEASURED, PREDICTED = "speedup", "predicted/speedup"
BY = {
    MEASURED: "By time per output token (TPOT) against each run's own autoregressive baseline",
    PREDICTED: "By the cost model",
}


@dataclass(frozen=True)
class Place:
    """The best run at a place, and the others, the next best first."""

    best: Row
    others: Sequence[Row]
    key: str

    @property
    def interval(self) -> tuple[float, float]:
        """Return the least and the greatest speedup of the best run's repeats."""
        return _interval(self.best, self.key)

    @property
    def rivals(self) -> int:
        """Return how many others are within the noise of the best: their repeats reach into its own."""
        own, least = is_synthetic(self.best), self.interval[0]
        return sum(is_synthetic(row) == own and _interval(row, self.key)[1] >= least for row in self.others)

    @property
    def faster(self) -> str:
        """Return which way of decoding is faster here."""
        low, high = self.interval
        if low <= 1 <= high and low < high:
            return "within noise"
        if self.best[self.key] > 1:
            return "speculative"
        plain = self.best.get("autoregressive/tokens_per_second")
        return f"autoregressive, {cell(float(plain))} tokens/s" if is_number(plain) else "autoregressive"


@dataclass(frozen=True)
class Answer:
    """One ranking: the places in order, by which speedup, and the settings in which places and candidates differ."""

    key: str
    places: Sequence[Place]
    given: Sequence[str]
    chosen: Sequence[str]
    held: Row

    def headline(self) -> str:
        """Return the best speedup of all places."""
        best = self._top.best
        if self.key == PREDICTED:
            return f"predicted {best[PREDICTED]:.2f}x"
        return " and ".join(f"{best[key]:.2f}x per {per}" for key, per in PER.items() if is_number(best.get(key)))

    def sentences(self) -> Iterator[str]:
        """Say which configuration that is, how sure it is, and where speculation pays."""
        top, wins = self._top, sum(place.faster == "speculative" for place in self.places)
        how = ", ".join(f"{key} {cell(top.best[key])}" for key in [*self.chosen, *self.given] if key in top.best)
        what = "is the best speedup" if wins else "at best: autoregressive decoding is faster everywhere"
        if not wins and any(place.faster == "within noise" for place in self.places):
            what = "at best: speculation is faster nowhere by more than the noise"
        yield f"{what}{f', with {how}' if how else ''}."
        low, high = top.interval
        if low < high:
            yield f"Its repeats: {low:.2f}x to {high:.2f}x."
        if found := noise(top.best):
            yield f"Noisy: {', '.join(found)}."
        if top.rivals:
            yield f"{top.rivals} other{'s are' if top.rivals > 1 else ' is'} within its noise."
        if len(self.places) > 1:
            yield f"Speculation is faster in {wins} of {len(self.places)} places ({', '.join(self.given)})."

    def basis(self) -> str:
        """Say by which measure, and what was held constant."""
        held = ", ".join(f"{key} {cell(value)}" for key, value in self.held.items())
        return f"{BY[self.key]}. Held constant: {held or 'nothing'}."

    @property
    def _top(self) -> Place:
        return max(self.places, key=lambda place: (not is_synthetic(place.best), place.best[self.key]))


def answer(rows: Sequence[Row]) -> Answer | None:
    """Return the ranking of the runs that are done, by what was measured or else predicted; None without a speedup.

    Synthetic acceptance ranks below all that was measured. What does not fit in memory is no candidate.
    """
    done = [row for row in rows if row.get("status") == "done"]
    key = MEASURED if any(is_number(row.get(MEASURED)) for row in done) else PREDICTED
    candidates = [row for row in done if is_number(row.get(key)) and not (key == PREDICTED and is_too_large(row))]
    if not candidates:
        return None
    given = [name for name in GIVEN if len({row.get(name) for row in candidates}) > 1]
    places: dict[tuple, list[Row]] = {}
    for row in sorted(candidates, key=lambda row: (is_synthetic(row), -row[key])):
        places.setdefault(tuple(row.get(name) for name in given), []).append(row)
    chosen = [name for name in informative(candidates) if name not in given and not name.startswith("data.")]
    ordered = sorted(places.items(), key=lambda place: [(isinstance(v, str), v is None, v or 0) for v in place[0]])
    ranking = [Place(best, others, key) for _, (best, *others) in ordered]
    return Answer(key, ranking, given, chosen[:MAX_SETTINGS], constants(candidates))


def is_synthetic(row: Row) -> bool:
    """Return whether the acceptance was drawn, not measured."""
    return row.get("acceptance/source") == "synthetic"


def is_too_large(row: Row) -> bool:
    """Return whether a run was predicted not to fit in memory, and so was not measured."""
    return row.get("predicted/fits") is False and MEASURED not in row


def _interval(row: Row, key: str) -> tuple[float, float]:
    low, high = (row.get(f"{key}_{end}") for end in ("min", "max"))
    return (low, high) if is_number(low) and is_number(high) else (row[key], row[key])
