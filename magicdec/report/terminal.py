"""The table of runs on the terminal: the settings in which they differ, and their main metrics."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, takewhile

from rich.console import Group, RenderableType
from rich.text import Text

from magicdec.measure.trust import (
    CROSS_CHECKS,
    DISTURBED,
    NOISY,
    gpu_trouble,
    is_impossible,
    noise,
)
from magicdec.report.fastest import FASTER, SLOWER, is_synthetic, is_too_large, verdict_of
from magicdec.report.query import (
    BETWEEN_ENGINES,
    DIFFER,
    ENGINE,
    LABELS,
    LOAD_KEYS,
    MAIN_METRICS,
    RUNS,
    SPEEDUPS,
    UNDER_LOAD,
    find_key,
    informative,
    is_speedup,
)
from magicdec.report.rows import SCENARIO, keys_of, num_runs
from magicdec.tracking.cells import cell, new_table
from magicdec.tracking.columns import Row
from magicdec.tracking.console import Console

# Of predictions alone: a run that is measured has one gamma, and an alpha.
ONLY_PREDICTED = ("predicted/gamma", "predicted/break_even_alpha")
PREDICTED_SPEEDUPS = ("predicted/speedup", "predicted/speedup_wall")
MEASURED = ("speedup", "autoregressive/tokens_per_second")
COLOURS = {FASTER: "green", SLOWER: "red"}  # of a speedup that is known
# Of a table with one line, in which no setting differs.
WHAT_RAN = ("target.name", "device", "batch.context_len", "batch.size")
MAX_SETTINGS = 6  # columns that say what differs
GAP = 3  # blanks between columns
WIDTH_OF_A_PIPE = 200


def console() -> Console:
    """Return standard output, with a fixed width if it is not a terminal."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without Unicode
    return Console() if sys.stdout.isatty() else Console(width=WIDTH_OF_A_PIPE)


def runs_table(
    rows: Sequence[Row],
    columns: Sequence[str] | None,
    limit: int,
    width: int,
    runs: Sequence[Row] | None = None,
) -> RenderableType:
    """Return a table with a line per row and as many columns as the width holds. Scenarios, which
    measure different things, have a table each, unless `columns` are named. If rows are groups,
    `runs` are their members.
    """
    shown = rows[: limit or None]
    grouped = runs is not None
    kinds = list(dict.fromkeys(None if columns else row.get(SCENARIO) for row in shown))
    tables = []
    left_out: dict[str | None, list[str]] = {}  # names of columns, by the table that lacks them
    for kind in kinds:
        several = len(kinds) > 1
        alike = [row for row in rows if row.get(SCENARIO) == kind] if several else rows
        all_keys = keys_of(alike)
        chosen = (
            [find_key(all_keys, key, "--columns") for key in columns]
            if columns
            else _columns(alike, all_keys, grouped)
        )
        lines = [row for row in shown if row.get(SCENARIO) == kind] if several else shown
        named = [key for key in chosen if not (several and key == SCENARIO)]
        title = str(kind) if several else None
        table, left_out[title] = _table(lines, named, None if columns else width, title)
        tables.append(table)
    notes = [
        *_omissions(rows, limit, left_out),
        *_notes(rows if runs is None else runs),
    ]
    if grouped:
        notes.insert(0, _of_medians(rows))
    return Group(*tables, Text("\n".join(notes), style="dim"))


def _table(
    rows: Sequence[Row], keys: Sequence[str], width: int | None, title: str | None
) -> tuple[RenderableType, list[str]]:
    """Return the table of these rows and keys, and the names of the columns that do not fit (None:
    fold them).
    """
    cells = {key: [marked(row, key) for row in rows] for key in keys}
    names = {key: LABELS.get(key, key) if width is None else _short(key, keys) for key in keys}
    widths = [
        max(map(len, [names[key], *(text.plain for text in cells[key])])) + GAP for key in keys
    ]
    fitting = [
        key
        for key, end in zip(keys, accumulate(widths), strict=True)
        if width is None or end <= width
    ]
    table = new_table(title=title)
    for key in fitting:
        numeric = any(isinstance(row.get(key), int | float) for row in rows)
        table.add_column(
            names[key],
            justify="right" if numeric else "left",
            no_wrap=width is not None,
            overflow="fold",
        )
    for line in zip(*(cells[key] for key in fitting), strict=True):
        table.add_row(*line)
    return table, [names[key] for key in keys if key not in fitting]


def _short(key: str, among: Sequence[str]) -> str:
    """Return the last part of a key, such as budget for cache.budget, or the whole key if others
    share that part. An option's name has the name of its group.
    """
    last = key.removesuffix(".name").rpartition(".")[2]
    namesakes = sum(last == other.removesuffix(".name").rpartition(".")[2] for other in among)
    return LABELS.get(key) or (last if namesakes == 1 else key)


def _columns(rows: Sequence[Row], all_keys: Sequence[str], grouped: bool) -> list[str]:
    """Return the columns: settings in which the rows differ, then main metrics."""
    is_measured = any(key in all_keys for key in MEASURED)
    main = [
        key
        for key in MAIN_METRICS
        if key in all_keys and not (is_measured and key in ONLY_PREDICTED)
    ]
    if grouped:
        named = dict.fromkeys(
            key for row in rows for key in takewhile(lambda key: key != RUNS, row)
        )
        return [key for key in (*named, RUNS, *main, DIFFER) if key in all_keys]
    marks = [
        key for key in ("acceptance/source",) if len({row.get(key) for row in rows} - {None}) > 1
    ]
    loads = [key for key in LOAD_KEYS if key in all_keys]
    settings = [key for key in informative(rows) if key not in loads]
    if len(rows) == 1 and not loads:
        settings = [key for key in WHAT_RAN if key in all_keys]
    engines = [key for key in BETWEEN_ENGINES if key in all_keys] if ENGINE in settings else []
    if engines:  # the settings of engines are implied by their names
        settings = [
            key
            for key in settings
            if key not in engines and not key.startswith(("engine.", "attention"))
        ]
    under_load = (
        [*loads, *(key for key in UNDER_LOAD if key in all_keys and key not in engines)]
        if loads
        else []
    )
    main = [key for key in main if key not in under_load]
    speedups = SPEEDUPS if is_measured else PREDICTED_SPEEDUPS
    first = [key for key in main if key in speedups]
    others = [key for key in main if key not in speedups]
    return [
        "id",
        "status",
        *engines,
        *first,
        *under_load,
        *settings[:MAX_SETTINGS],
        *marks,
        *others,
    ]


def marked(row: Row, key: str) -> Text:
    """Return the value of a key as a cell: a speedup or an error in its own form, and what is not
    good in colour.
    """
    value = row.get(key)
    if is_speedup(key) and isinstance(value, int | float):
        mark = "!" if key == "speedup" and noise(row) else ""
        return Text(f"{value:.2f}x{mark}", style=COLOURS.get(_verdict(row, key), ""))
    if key.endswith("_error") and isinstance(value, int | float):
        return Text(f"{value:+.0%}")
    if key == "status" and value != "done":
        return Text(str(row.get("kind") or value), style="yellow")
    if key in ("lossless/passed", "lossless/identical", "output/agrees"):
        word = "yes" if value else "no"
        return Text("" if value is None else word, style="" if value else "yellow")
    return Text(cell(value))


def _verdict(row: Row, key: str) -> str:
    """Return whether speculation is faster by a speedup: by the interval of what was measured, by
    the value itself of what was computed.
    """
    if "/" not in key:
        return verdict_of(row, key)
    return FASTER if row[key] > 1 else SLOWER


def _of_medians(groups: Sequence[Row]) -> str:
    """Say what the figures of groups are, and in which settings the runs of a group differ."""
    differing = dict.fromkeys(
        key for line in groups if DIFFER in line for key in line[DIFFER].split(", ")
    )
    also = f", which also differ in {', '.join(differing)}" if differing else ""
    return f"medians over the runs that are done{also}"


def _omissions(
    rows: Sequence[Row], limit: int, left_out: Mapping[str | None, Sequence[str]]
) -> Iterator[str]:
    """Name the lines that are not shown, and the columns, by the title of their table."""
    if limit and len(rows) > limit:
        yield f"{limit} of {len(rows):,} lines; --limit 0 shows all"
    parts = [
        f"{', '.join(names)}{f' (of {title})' if title else ''}"
        for title, names in left_out.items()
        if names
    ]
    if parts:
        yield f"not shown: {'; '.join(parts)}; a wider terminal, --columns or --csv shows them"


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    """Count the failed, noisy, disturbed, published, too large and synthetic runs."""

    def number(of: Iterable[Row]) -> str:
        return f"{num_runs(of):,}"

    if failed := [row for row in rows if row.get("status") == "failed"]:
        yield f"{number(failed)} failed; --columns id,kind,reason says why"
    if noisy := [row for row in rows if noise(row)]:
        keys = [
            key
            for key in (DISTURBED, "speedup_spread", *CROSS_CHECKS)
            if any(key in row for row in noisy)
        ]
        yield (
            f"{number(noisy)} noisy, marked !: other programs ran, repeats spread over more than"
            f" {NOISY:.0%}, or what was measured twice disagrees; --columns id,{','.join(keys)}"
            " says how"
        )
    if impossible := [row for row in rows if is_impossible(row)]:
        yield (
            f"{number(impossible)} with an impossible overhead (time/overhead_ms below 0): measure"
            " them again"
        )
    if troubled := [row for row in rows if gpu_trouble(row)]:
        how = "--columns gpu/throttled/power,gpu/shared says how"
        yield f"{number(troubled)} on a GPU that was throttled or shared; {how}"
    if published := [row for row in rows if "published/table" in row]:
        tables = ", ".join(sorted({str(row["published/table"]) for row in published}))
        yield (
            f"published: the MagicDec paper's Table {tables}, which has {number(published)} of"
            f" these {number(rows)}; predicted for it: by the cost model, at the paper's gamma and"
            " acceptance"
        )
    if unfit := [row for row in rows if is_too_large(row)]:
        how = "--columns id,predicted/memory_gib says how much"
        yield f"{number(unfit)} predicted to need more memory than there is; {how}"
    if synthetic := [row for row in rows if is_synthetic(row)]:
        yield (
            f"{number(synthetic)} SYNTHETIC: their acceptance was drawn, not measured; only the"
            " times are real"
        )
