"""Compare two runs: say whether they differ by more than noise, from the times of each row in every
repeat.
"""

from collections.abc import Iterator
from math import exp
from pathlib import Path

import numpy as np

from magicdec.measure import intervals
from magicdec.measure.intervals import (
    Difference,
    Estimate,
    difference,
    half_width,
    log_ratio,
    ratio_of_repeats,
    ratio_of_rows,
)
from magicdec.report.rows import Row
from magicdec.tracking.run_files import GENERATION, GenerationLine, read_lines
from magicdec.tracking.store import counted
from magicdec.units import WAYS

MOST_REPEATS = 100  # repeats that anyone would wait for
FIGURES = ("speedup", "speedup_wall", "acceptance_length")


def verdicts(a: Row, b: Row) -> Iterator[str]:
    """Say of each figure that both runs have whether its change is more than noise."""
    measured = [key for key in FIGURES if key in a and key in b]
    if not measured or {a.get("scenario.name"), b.get("scenario.name")} != {"compare"}:
        return
    first, second = estimates(a), estimates(b)
    common = [key for key in measured if key in first and key in second]
    same_prompts = a.get("data/fingerprint") == b.get("data/fingerprint")
    for key in common:
        yield f"{key}: {_in_words(difference(first[key], second[key], same_prompts))}"
    if unknown := [key for key in measured if key not in common]:
        yield (
            f"{', '.join(unknown)}: not known whether the change is noise; an interval needs at"
            f" least {intervals.MIN_ROWS} rows and {intervals.MIN_REPEATS} repeats"
            " (scenario.repeats) of both"
        )


def estimates(row: Row) -> dict[str, Estimate]:
    """Return the logs of a run's figures, as far as its generations.jsonl tells them."""
    lines = read_lines(Path(row["folder"], "generations.jsonl"), GENERATION)
    rounds = [_whole(line, int(row["batch.generate_len"])) for line in lines]
    tokens = [sum(accepted + 1 for _, accepted in of_row) for of_row in rounds]
    ratios = {"acceptance_length": log_ratio(tokens, [*map(len, rounds)])}
    times = [line.get("decode_s") or {} for line in lines]
    timed = [of_row for of_row in times if of_row.keys() >= set(WAYS)]
    # A damaged file may hold different numbers of repeats.
    repeats = {len(seconds) for times in timed for seconds in times.values()}
    if timed and len(timed) == len(lines) and len(repeats) == 1:
        seconds = [np.transpose([times[way] for times in timed]) for way in WAYS]
        written = [
            [len(of or ()) - 1 for of in (line.get("autoregressive"), line.get("speculative"))]
            for line in lines
        ]
        # Rows of a single token have no time per token.
        counts = np.array([row for row in written if min(row) > 0]).reshape(-1, 2).T
        kept = [min(row) > 0 for row in written]
        per_token = (time[:, kept] / count for time, count in zip(seconds, counts, strict=True))
        starts = range(0, len(lines), int(row["batch.size"]))
        ratios["speedup"] = ratio_of_rows(*per_token)
        ratios["speedup_wall"] = ratio_of_repeats(
            *(np.maximum.reduceat(time, starts, axis=1).sum(1) for time in seconds)
        )
    return {key: estimate for key, estimate in ratios.items() if estimate}


def _whole(line: GenerationLine, generate_len: int) -> list[tuple[int, int]]:
    """Return the rounds of a row that proposed anything, without one that an end of sequence has
    cut.
    """
    rounds = line.get("rounds") or []
    written = len(line.get("speculative") or ())
    is_cut = written < generate_len and 1 + sum(accepted + 1 for _, accepted in rounds) > written
    return [pair for pair in rounds[: -1 if is_cut else None] if pair[0]]


def _in_words(change: Difference) -> str:
    """Return a relative change with its interval, and what that means."""
    half = change.half_width()
    if change.value == half == 0:
        return "the same"
    low = f"{exp(change.value - half) - 1:+.1%}"
    high = f"{exp(change.value + half) - 1:+.1%}"
    told = (
        "more than noise"
        if abs(change.value) > half
        else f"within noise; {_what_would_tell(change)}"
    )
    return f"changes by {low} to {high}, {told}"


def _what_would_tell(change: Difference) -> str:
    """Say how many more repeats would make a change of this size more than noise."""
    if half_width(change.rows) > abs(change.value):
        return "more repeats would not tell, more rows might"
    number = next(
        (more for more in range(1, MOST_REPEATS) if change.half_width(more) < abs(change.value)),
        None,
    )
    if number is None:
        return f"{MOST_REPEATS} more repeats of both would not tell"
    return f"about {counted(number, 'more repeat')} of both would tell"
