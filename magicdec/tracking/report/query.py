"""Select, sort and group the rows of a table of runs."""

import re
from collections.abc import Callable, Collection, Sequence
from operator import ge, gt, le, lt
from statistics import median
from typing import Any

from magicdec.errors import UserError
from magicdec.rules import did_you_mean
from magicdec.tracking.cells import is_number
from magicdec.tracking.report.rows import Row, is_setting, keys_of, num_runs

SYNTAX = (
    "KEY=VALUE, or with != > >= < <= or ~ (contains); several must all hold. A key's unique ending, or its heading, "
    "will do: budget"
)
# A median over several models, or over measured, predicted and synthetic values, means nothing.
APART = ("target.name", "scenario.name", "acceptance/source")
# Headings of columns on the terminal. The speedups of a row, of a batch, and of a level of load.
SPEEDUPS = ("speedup", "speedup_wall", "speedup_duration")
MAIN_METRICS = {key: key for key in SPEEDUPS} | {
    "acceptance_rate": "accepted",
    "acceptance_length": "length",
    "speculative/tokens_per_second": "tokens/s",
    "speculative/time_per_output_token_ms": "TPOT ms",
    "lossless/passed": "lossless",
    "output/agrees": "agrees",
    "formula/speedup": "formula",
    "predicted/speedup": "predicted",
    "predicted/speedup_wall": "predicted wall",
    "predicted/gamma": "best gamma",
    "predicted/break_even_alpha": "pays from alpha",
    "predicted/speedup_error": "off",
    "predicted/step_error": "steps off",
    "published/speedup": "published",
    "published/predicted_speedup": "predicted for it",
}
ENGINE, SCENARIO = "engine.name", "scenario.name"
BETWEEN_ENGINES = {ENGINE: "engine", "draft.name": "draft", "autoregressive/tokens_per_second": "AR tokens/s"}
LABELS = MAIN_METRICS | BETWEEN_ENGINES
ORDERS: dict[str, Callable[[Any, Any], bool]] = {">": gt, ">=": ge, "<": lt, "<=": le}


def select(rows: Collection[Row], tests: Sequence[str]) -> list[Row]:
    """Return the rows for which every test holds. A test may be several, separated by blanks. Raise UserError if no row
    is left.
    """
    chosen, keys = list(rows), keys_of(rows)
    for test in " ".join(tests).split():
        parts = re.fullmatch(r"(.+?)(!=|>=|<=|=|>|<|~)(.*)", test)
        if not parts:
            raise UserError(f"--where {test}: not of the form {SYNTAX}")
        key, (_, sign, value) = find_key(keys, parts[1], "--where"), parts.groups()
        if sign in ORDERS and _number(value) is None:
            raise UserError(f"--where {test}: {value or 'nothing'} is not a number, and {sign} compares numbers")
        chosen = [row for row in chosen if _holds(row.get(key), sign, value)]
    if not chosen:
        raise UserError(f"--where {' '.join(tests)}: holds for none of {num_runs(rows):,} runs")
    return chosen


def sort(rows: Collection[Row], key: str | None, descending: bool = False) -> list[Row]:
    """Return the rows sorted by a key: numbers before words, and rows without the key last in both directions."""
    if not key:
        return list(rows)
    name = find_key(keys_of(rows), key, "--sort")
    having = [row for row in rows if name in row]
    having.sort(key=lambda row: rank(row[name]), reverse=descending)
    return having + [row for row in rows if name not in row]


def group(rows: Collection[Row], keys: Sequence[str], mix: bool = False) -> list[Row]:
    """Return a row per combination of values: the number of `runs` that are done, and the median of each metric.

    Keys of APART in which the runs differ are added to `keys`, unless `mix`.
    """
    known = keys_of(rows)
    names = [find_key(known, key, "--group-by") for key in keys]
    done = [row for row in rows if row.get("status") == "done"]
    if not mix:
        names += [key for key in APART if key not in names and len({row.get(key) for row in done} - {None}) > 1]
    groups: dict[tuple, list[Row]] = {}
    for row in done:
        groups.setdefault(tuple(row.get(name) for name in names), []).append(row)
    metrics = [key for key in known if not is_setting(key) and key not in names and _is_metric(done, key)]
    result = []
    for values, members in groups.items():
        line: Row = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        line["runs"] = num_runs(members)
        for key in metrics:
            if numbers := [row[key] for row in members if is_number(row.get(key))]:
                line[key] = median(numbers)
        result.append(line)
    return sorted(result, key=lambda line: [rank(line.get(name)) for name in names])


def find_key(known: Collection[str], key: str, option: str) -> str:
    """Return the known key that is `key`, the only one that ends in it, or the one with that heading.

    Raise UserError if there is none.
    """
    if key in known:
        return key
    endings = [name for name in known if name.endswith((f".{key}", f"/{key}"))]
    if len(endings) == 1:
        return endings[0]
    if endings:
        raise UserError(f"{option} {key}: which one? {', '.join(endings)}")
    for name in known:
        if key in (LABELS.get(name), name.removesuffix(".name")):
            return name
    close = did_you_mean(key, known) or did_you_mean(key, [re.split(r"[./]", name)[-1] for name in known])
    raise UserError(f"{option} {key}: no run has such a key{close}")


def _holds(value: Any, sign: str, wanted: str) -> bool:
    if sign == "~":
        return wanted in _text(value)
    number = _number(wanted)
    if sign in ORDERS:
        return number is not None and is_number(value) and ORDERS[sign](value, number)
    same = value == number if number is not None and is_number(value) else _text(value) == wanted.lower()
    return same == (sign == "=")


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower()


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _is_metric(rows: Collection[Row], key: str) -> bool:
    return key not in ("attempt", "pid") and any(is_number(row.get(key)) for row in rows)


def rank(value: Any) -> tuple[int, float, str]:
    """Return a sort key: numbers first, then words, then missing values."""
    return (0, value, "") if is_number(value) else (1 if value is not None else 2, 0.0, str(value))
