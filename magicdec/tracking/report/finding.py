"""The sentence that a sweep ends with: the fastest configuration with its interval, and what was held constant."""

from collections.abc import Iterator, Sequence
from math import exp

from magicdec.measure.intervals import MIN_REPEATS, MIN_ROWS, Estimate, difference
from magicdec.tracking.cells import cell
from magicdec.tracking.report.answer import MEASURED, Answer, Place, answer
from magicdec.tracking.report.rows import Row
from magicdec.tracking.report.verdict import estimates
from magicdec.tracking.store import counted

HELD = {
    "target.name": "model",
    "device": "machine",
    "batch.size": "batch",
    "batch.context_len": "context",
    "data.name": "text",
}
MOST_PLACES, MOST_NAMED = 10, 3


def finding(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a sentence for each place, and what was held constant; nothing without measured speedups to compare."""
    found = answer(rows)
    if found is None or found.key != MEASURED or not any(place.others for place in found.places):
        return
    for place in found.places[:MOST_PLACES]:
        where = ", ".join(f"{key}={cell(place.best[key])}" for key in found.given if key in place.best)
        yield f"{where}{': ' if where else ''}{_winner(place, found)}"
    if len(found.places) > MOST_PLACES:
        yield f"and {counted(len(found.places) - MOST_PLACES, 'more place')}: see the report"
    held = [f"{word} {cell(found.held[key])}" for key, word in HELD.items() if key in found.held]
    yield f"held constant: {', '.join(held) or 'nothing'}"


def _winner(place: Place, found: Answer) -> str:
    """Say which configuration is the fastest, or from which others it cannot be distinguished."""
    best, figure = _name(place.best, found), f"{place.best[MEASURED]:.2f}x per row"
    own = _speedup(place.best)
    if own is None:
        least = f"at least {MIN_ROWS} rows and {MIN_REPEATS} repeats (scenario.repeats)"
        return f"{best} was the fastest, {figure}; how sure that is takes {least} to tell"
    low, high = map(exp, own.ends)
    figure += f" (95% interval {low:.2f}x to {high:.2f}x)"
    pays = "" if low > 1 else "; not faster than autoregressive decoding by more than noise"
    alike = [_name(row, found) for row in place.others if not _is_slower(row, place.best, own)]
    if not alike:
        return f"{best} is the fastest, {figure}{pays}"
    more = [counted(len(alike) - MOST_NAMED, "other")] if len(alike) > MOST_NAMED else []
    return f"not distinguishable: {best}, {figure}, and {', '.join(alike[:MOST_NAMED] + more)}{pays}"


def _is_slower(row: Row, best: Row, own: Estimate) -> bool:
    """Return whether a run is slower than the best by more than noise."""
    other = _speedup(row)
    if other is None:
        return False
    change = difference(own, other, row.get("data/fingerprint") == best.get("data/fingerprint"))
    return abs(change.value) > change.half_width()


def _speedup(row: Row) -> Estimate | None:
    return estimates(row).get(MEASURED) if row.get("scenario.name") == "compare" else None


def _name(row: Row, found: Answer) -> str:
    return " ".join(f"{key}={cell(row[key])}" for key in found.chosen if key in row) or str(row["id"])
