"""The halves of the published measurements: the model may be changed by one, and is judged on the
other.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from math import log, nan
from random import Random
from statistics import fmean, median, quantiles
from typing import NamedTuple

from render import Row

from magicdec.costmodel.confidence import LARGE_BATCH, Case, Error, confidence

SMALL_BATCHES = "small_batches"  # a rule: it pays below batch 32
# The model, the model before it was changed, bytes and FLOPs of the datasheet alone, and a rule.
PREDICTORS = ("predicted", "before", "roofline", SMALL_BATCHES)
DRAWS = 1000  # of tables, for an interval
BATCHES = {"1": range(1, 2), "2 to 31": range(2, 32), "32 and more": range(32, 10**6)}
CONTEXTS = {
    "to 2,000": range(2_001),
    "to 16,000": range(2_001, 16_001),
    "beyond 16,000": range(16_001, 10**9),
}


def band(value: int, bands: Mapping[str, range]) -> str:
    """Return the name of the band that holds a value."""
    return next(name for name, values in bands.items() if value in values)


def is_held_back(publisher: str) -> bool:
    """Return whether a source's measurements judge the model, and are not looked at to change it.

    The last bit of the SHA-256 of its name decides. What a name has in brackets, the engine of a
    part of its tables, does not count.
    """
    source = publisher.partition(" (")[0]
    return sha256(source.encode()).digest()[-1] % 2 == 1


class Scored(NamedTuple):
    """A held-back row: what was measured, and what several say of it."""

    row: Row
    weight: float  # of its source, which all sources have alike
    block: str  # the table that it is from

    def says(self, name: str) -> bool:
        """Return whether a predictor says that it pays."""
        if name == SMALL_BATCHES:
            return bool(self.row["batch"] < LARGE_BATCH)
        return bool(self.row[name] > 1)

    @property
    def is_gain(self) -> bool:
        """Return whether it paid."""
        return bool(self.row["measured"] > 1)


def family(row: Row) -> str:
    """Return the kind of a row's draft."""
    return Case(False, row["draft"], 1).family


def strata(
    rows: Iterable[Row], **kinds_of: Callable[[Row], str]
) -> dict[tuple[str, str], list[Row]]:
    """Return the rows by what they are compared by: all, batch, context, and `kinds_of` a row."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        kinds = {
            "all": "all",
            "batch": band(row["batch"], BATCHES),
            "context": band(row["context"], CONTEXTS),
        } | {by: kind_of(row) for by, kind_of in kinds_of.items()}
        for stratum in kinds.items():
            found.setdefault(stratum, []).append(row)
    order = {name: place for place, name in enumerate((*BATCHES, *CONTEXTS))}
    names = sorted(found, key=lambda stratum: (stratum[0], order.get(stratum[1], 0)))
    return {name: found[name] for name in names}


def skill(rows: list[Row]) -> Row:
    """Return the scores of some rows, and of those who know less. Sources weigh equally."""
    rows_of = Counter(row["publisher"] for row in rows)
    scored = [Scored(row, 1 / rows_of[row["publisher"]], row["source"]) for row in rows]
    gains = sum(one.weight for one in scored if one.is_gain) / len(rows_of)
    low, high = interval(scored)
    result: Row = {
        "rows": len(rows),
        "sources": len(rows_of),
        "losses": sum(not one.is_gain for one in scored),
        "constant": max(gains, 1 - gains),
        "balanced_low": low,
        "balanced_high": high,
    }
    for name in PREDICTORS:
        result[f"{name}_right"] = accuracy(scored, name)
        result[f"{name}_balanced"] = balanced(scored, name)
        if name != SMALL_BATCHES:
            result[f"{name}_error"] = typical_error(scored, name)
    return result


def accuracy(scored: Sequence[Scored], name: str) -> float:
    """Return the share of rows whose side a predictor says."""
    right = sum(one.weight for one in scored if one.says(name) == one.is_gain)
    return right / sum(one.weight for one in scored)


def balanced(scored: Sequence[Scored], name: str) -> float | None:
    """Return the mean of the shares of gains and of losses that are found; None without either.

    Sources weigh equally among the gains, and among the losses.
    """
    shares = []
    for is_gain in (True, False):
        side = [one for one in scored if one.is_gain == is_gain]
        if not side:
            return None
        rows_of = Counter(one.row["publisher"] for one in side)
        again = [one._replace(weight=1 / rows_of[one.row["publisher"]]) for one in side]
        shares.append(accuracy(again, name))
    return fmean(shares)


def typical_error(scored: Sequence[Scored], name: str) -> float:
    """Return the median of the relative errors, of equally weighed sources."""
    errors = [abs(one.row[name] / one.row["measured"] - 1) for one in scored]
    pairs = sorted(zip(errors, (one.weight for one in scored), strict=True))
    half = sum(weight for _, weight in pairs) / 2
    for error, weight in pairs:
        half -= weight
        if half <= 0:
            return error
    return nan


def interval(scored: Sequence[Scored]) -> tuple[float | None, float | None]:
    """Return the middle 90% of the balanced accuracy where tables are drawn again, as wholes."""
    blocks: dict[str, list[Scored]] = {}
    for one in scored:
        blocks.setdefault(one.block, []).append(one)
    draw = Random(0)
    found = []
    for _ in range(DRAWS):
        chosen = draw.choices(list(blocks.values()), k=len(blocks))
        value = balanced([one for block in chosen for one in block], "predicted")
        if value is not None:
            found.append(value)
    if len(found) < DRAWS / 2:
        return None, None
    cuts = quantiles(found, n=20)
    return cuts[0], cuts[-1]


def errors_of(rows: Iterable[Row]) -> list[Error]:
    """Return the errors of rows that others have measured."""
    return [
        Error(
            Case(False, row["draft"], row["batch"]),
            row["publisher"].partition(" (")[0],
            log(row["measured"] / row["predicted"]),
        )
        for row in rows
    ]


def judged_confidence(rows: list[Row]) -> Row:
    """Return how often 90% intervals hold what was measured, how wide they are, and the Brier score
    of the probabilities, each source judged by the errors of the others.
    """
    errors = errors_of(rows)
    held, widths, briers, base_briers, weights = [], [], [], [], []
    rows_of = Counter(error.source for error in errors)
    for row, error in zip(rows, errors, strict=True):
        others = [one for one in errors if one.source != error.source]
        sure = confidence(error.case, row["predicted"], others)
        assert sure is not None
        paid = float(row["measured"] > 1)
        sources = Counter(one.source for one in others)
        pairs = [(one, other) for one, other in zip(errors, rows, strict=True) if one in others]
        base = sum((other["measured"] > 1) / sources[one.source] for one, other in pairs)
        held.append(sure.low <= row["measured"] <= sure.high)
        widths.append((sure.high - sure.low) / 2 / row["predicted"])
        briers.append((sure.pays - paid) ** 2)
        base_briers.append((base / len(sources) - paid) ** 2)
        weights.append(1 / rows_of[error.source])

    def mean(values: Sequence[float]) -> float:
        return fmean(values, weights)

    return {
        "rows": len(rows),
        "coverage": mean(held),
        "half_width": median(widths),
        "brier": mean(briers),
        "base_brier": mean(base_briers),
    }
