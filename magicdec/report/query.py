"""Select, sort, group and compare the rows of a table of runs."""

import re
from collections.abc import Callable, Collection, Sequence
from operator import ge, gt, le, lt
from statistics import median
from typing import Any

import pandas

from magicdec.errors import UserError
from magicdec.inputs.rules import did_you_mean
from magicdec.report.rows import SCENARIO, keys_of, num_runs
from magicdec.tracking.columns import NOT_METRICS, Row, is_setting
from magicdec.units import LOADS, is_number

SYNTAX = (
    "KEY=VALUE, or with != > >= < <= or ~ (contains); several must all hold. A key's unique ending,"
    " or its heading, will do: budget"
)
# A median over several models, or over measured, predicted and synthetic values, means nothing.
NEVER_MIXED = ("target.name", SCENARIO, "acceptance/source")
# Runs that differ in these are in different groups, unless one asks for a mix.
APART = (*NEVER_MIXED, "draft.name", "draft.model.name", "engine.name", "device", "hardware.name")
# Of a group: the number of its runs, and the settings in which they differ.
RUNS, DIFFER = "runs", "differ"
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
ENGINE = "engine.name"
BETWEEN_ENGINES = {
    ENGINE: "engine",
    "draft.name": "draft",
    "autoregressive/tokens_per_second": "AR tokens/s",
}
# Of levels of load, which have a time to first token and may have been served in one way only.
UNDER_LOAD = {
    "autoregressive/tokens_per_second": "AR tokens/s",
    "autoregressive/time_to_first_token_ms": "AR TTFT ms",
    "autoregressive/time_per_output_token_ms": "AR TPOT ms",
    "speculative/tokens_per_second": "tokens/s",
    "speculative/time_to_first_token_ms": "TTFT ms",
    "speculative/time_per_output_token_ms": "TPOT ms",
}
LOAD_KEYS = tuple(f"load.{kind}" for kind in LOADS)
LABELS = MAIN_METRICS | BETWEEN_ENGINES | UNDER_LOAD
LABELS |= {"batch.size": "batch", DIFFER: "also differ in"}
# Keys of ratios that are shown in the same form, as 1.48x.
SPEEDUP_KEY = re.compile(
    r"(.+/)?(predicted_)?speedup(_wall|_duration|_min|_max|_low|_high|_with_prefill)?(/gamma_\d+)?"
)
# Settings that runs are compared by, the most usual first. Of the others, those with fewer values
# come first.
ASKED_FIRST = (
    "engine.name",
    "target.name",
    "scenario.name",
    "draft.name",
    "draft.model.name",
    "cache.policy",
    "cache.budget",
    "draft.gamma",
    "batch.context_len",
    "batch.size",
    *LOAD_KEYS,
    "hardware.name",
    "data.name",
)
# What a comparison holds constant: model, machine, batch, context, text, and how the draft is made.
HELD = (
    "target.name",
    "device",
    "hardware.dtype",
    "batch.size",
    "batch.context_len",
    "batch.generate_len",
    "data.name",
    "data.task",
    "sampling.temperature",
    "draft.name",
    "draft.gamma",
    "cache.policy",
    "cache.budget",
    "engine.name",
)
# The nullable type of a column by that of its values: a gamma of 1 stays 1 where other runs have
# none.
TYPES = {int: "Int64", float: "Float64", bool: "boolean", str: "string"}
ORDERS: dict[str, Callable[[Any, Any], bool]] = {">": gt, ">=": ge, "<": lt, "<=": le}


def table(rows: Collection[Row]) -> pandas.DataFrame:
    """Return a column per key, with nullable types; what is mixed keeps the values as they are."""
    columns = {}
    for key in keys_of(rows):
        values = [row.get(key) for row in rows]
        kinds = {type(value) for value in values} - {type(None)}
        kind = TYPES.get(kinds.pop(), "object") if len(kinds) == 1 else "object"
        try:
            columns[key] = pandas.Series(values, dtype=kind)  # type: ignore[call-overload]
        except OverflowError:  # an integer of more than 64 bits
            columns[key] = pandas.Series(values, dtype="object")
    return pandas.DataFrame(columns, index=range(len(rows)))


def select(rows: Collection[Row], tests: Sequence[str]) -> list[Row]:
    """Return the rows for which every test holds. A test may be several, separated by blanks. Raise
    UserError if no row is left.
    """
    frame = table(rows)
    holds = pandas.Series(True, index=frame.index)
    for test in " ".join(tests).split():
        parts = re.fullmatch(r"(.+?)(!=|>=|<=|=|>|<|~)(.*)", test)
        if not parts:
            raise UserError(f"--where {test}: not of the form {SYNTAX}")
        key, (_, sign, value) = find_key(list(frame), parts[1], "--where"), parts.groups()
        if sign in ORDERS and _number(value) is None:
            raise UserError(
                f"--where {test}: {value or 'nothing'} is not a number, and {sign} compares numbers"
            )
        holds &= _holds(frame[key], sign, value)
    if not holds.any():
        raise UserError(f"--where {' '.join(tests)}: holds for none of {num_runs(rows):,} runs")
    return [row for row, is_chosen in zip(rows, holds, strict=True) if is_chosen]


def sort(rows: Collection[Row], key: str | None, descending: bool = False) -> list[Row]:
    """Return the rows sorted by a key: numbers before words, and rows without the key last in both
    directions.
    """
    if not key:
        return list(rows)
    name = find_key(keys_of(rows), key, "--sort")
    having = [row for row in rows if name in row]
    having.sort(key=lambda row: rank(row[name]), reverse=descending)
    return having + [row for row in rows if name not in row]


def group(rows: Collection[Row], keys: Sequence[str], mix: bool = False) -> list[Row]:
    """Return a row per combination of values: the number of `runs` that are done, the settings in
    which these differ, and the median of each metric.

    Keys of APART in which the runs differ are added to `keys`, unless `mix`.
    """
    all_keys = keys_of(rows)
    names = [find_key(all_keys, key, "--group-by") for key in keys]
    done = [row for row in rows if row.get("status") == "done"]
    others = [key for key in informative(done) if key not in names]
    if not mix:
        names += [
            key
            for key in APART
            if key not in names and len({row.get(key) for row in done} - {None}) > 1
        ]
    groups: dict[tuple, list[Row]] = {}
    for row in done:
        groups.setdefault(tuple(row.get(name) for name in names), []).append(row)
    frame = table(done)
    metrics = [
        key for key in frame if not is_setting(key) and key not in names and _is_metric(frame[key])
    ]
    lines = []
    for values, members in groups.items():
        line: Row = {
            name: value for name, value in zip(names, values, strict=True) if value is not None
        }
        line |= {RUNS: num_runs(members)}
        if differing := [key for key in others if len({row.get(key) for row in members}) > 1]:
            line[DIFFER] = ", ".join(differing)
        lines.append(line | _medians(members, metrics))
    return sorted(lines, key=lambda line: [rank(line.get(name)) for name in names])


def _medians(rows: Sequence[Row], metrics: Sequence[str]) -> Row:
    """Return the median of each metric over the rows that have it as a number."""
    numbers = {key: [row[key] for row in rows if is_number(row.get(key))] for key in metrics}
    return {key: float(median(values)) for key, values in numbers.items() if values}


def constants(rows: Collection[Row]) -> Row:
    """Return the settings of HELD that are the same in all rows, with their value."""
    values = {key: {row.get(key) for row in rows} for key in HELD}
    return {
        key: next(iter(distinct))
        for key, distinct in values.items()
        if len(distinct) == 1 and distinct != {None}
    }


def varying(rows: Collection[Row]) -> list[str]:
    """Return the settings in which the rows differ, in the order of ASKED_FIRST."""
    frame = table(rows)
    settings = [key for key in frame if is_setting(key) and ".architecture." not in key]
    counts = frame[settings].nunique(dropna=False)
    asked = {key: place for place, key in enumerate(ASKED_FIRST)}
    differing = [key for key in settings if counts[key] > 1]
    return sorted(differing, key=lambda key: (asked.get(key, len(asked)), counts[key]))


def informative(rows: Collection[Row]) -> list[str]:
    """Return `varying` without settings that an option implies, such as target.path, which follows
    from target.name.
    """
    differing = varying(rows)
    return [key for key in differing if key in ASKED_FIRST or not _is_implied(key, differing, rows)]


def _is_implied(key: str, differing: Collection[str], rows: Collection[Row]) -> bool:
    """Return True if a setting's value follows from the name of the option in its group."""
    group = key.rpartition(".")[0]
    for option in {f"{group}.name", f"{group}.policy"} & set(differing) - {key}:
        if len({(row.get(option), row.get(key)) for row in rows}) == len(
            {row.get(option) for row in rows}
        ):
            return True
    return False


def find_key(names: Collection[str], key: str, option: str) -> str:
    """Return the known key that is `key`, the only one that ends in it, or the one with that
    heading.

    Raise UserError if there is none.
    """
    if key in names:
        return key
    endings = [name for name in names if name.endswith((f".{key}", f"/{key}"))]
    if len(endings) == 1:
        return endings[0]
    if endings:
        raise UserError(f"{option} {key}: which one? {', '.join(endings)}")
    for name in names:
        if key in (LABELS.get(name), name.removesuffix(".name")):
            return name
    close = did_you_mean(key, names) or did_you_mean(
        key, [re.split(r"[./]", name)[-1] for name in names]
    )
    raise UserError(f"{option} {key}: no run has such a key{close}")


def _holds(column: pandas.Series, sign: str, wanted: str) -> pandas.Series:
    """Return for each value whether a test holds. A missing value is null, and smaller or larger
    than nothing.
    """
    words = column.map(_text).astype("object")
    number = _number(wanted)
    if sign in ORDERS:
        compared: Any = ORDERS[sign](_numbers(column), number)
        return compared.fillna(False).astype(bool)
    if sign == "~":
        return words.str.contains(wanted.lower(), regex=False).astype(bool)
    same = words == wanted.lower()
    if number is not None:
        same |= (_numbers(column) == number).fillna(False).astype(bool)
    return same if sign == "=" else ~same


def _numbers(column: pandas.Series) -> pandas.Series:
    """Return the numbers of a column; true, false and words are none."""
    return column.astype("object").where(column.map(is_number)).astype("Float64")


def _text(value: Any) -> str:
    return "null" if value is None or value is pandas.NA or value != value else str(value).lower()


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _is_metric(column: pandas.Series) -> bool:
    return column.name not in NOT_METRICS and bool(column.map(is_number).any())


def is_speedup(key: str) -> bool:
    """Return whether the values of a key are speedups."""
    return SPEEDUP_KEY.fullmatch(key) is not None


def rank(value: Any) -> tuple[int, float, str]:
    """Return a sort key: numbers first, then words, then missing values."""
    if is_number(value):
        return (0, value, "")
    return (1 if value is not None else 2, 0.0, str(value))
