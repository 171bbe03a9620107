"""The table of runs on the terminal: the settings in which they differ, and their main metrics."""

import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate

from rich.console import Console, Group, RenderableType
from rich.text import Text

from magicdec.tracking.cells import cell, new_table
from magicdec.tracking.reader import NOISY, TWICE, gpu_trouble, is_impossible, noise
from magicdec.tracking.report.query import find_key
from magicdec.tracking.report.rows import Row, keys_of, telling

# The speedups of a row, of a batch, and of a level of load.
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
    "predicted/speedup_error": "off",
    "predicted/step_error": "steps off",
    "published/speedup": "published",
    "published/predicted_speedup": "predicted for it",
}
ENGINE = "engine.name"
BETWEEN_ENGINES = {ENGINE: "engine", "draft.name": "draft", "autoregressive/tokens_per_second": "AR tokens/s"}
LABELS = MAIN_METRICS | BETWEEN_ENGINES
MAX_SETTINGS = 6  # columns that say what differs
GAP = 3  # blanks between columns
WIDTH_OF_A_PIPE = 200


def console() -> Console:
    """Return standard output, with a fixed width if it is not a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=WIDTH_OF_A_PIPE)


def runs_table(
    rows: Sequence[Row], columns: Sequence[str] | None, limit: int, width: int, runs: Sequence[Row] | None = None
) -> RenderableType:
    """Return a table with a line per row and as many columns as the width holds. If rows are groups, `runs` are their
    members.
    """
    grouped, known = runs is not None, keys_of(rows)
    chosen = [find_key(known, key, "--columns") for key in columns] if columns else _columns(rows, known, grouped)
    shown = rows[: limit or None]
    cells = {key: [_marked(row, key) for row in shown] for key in chosen}
    names = {key: LABELS.get(key, key) if columns else _short(key, chosen) for key in chosen}
    widths = [max(map(len, [names[key], *(text.plain for text in cells[key])])) + GAP for key in chosen]
    fitting = chosen if columns else [key for key, end in zip(chosen, accumulate(widths), strict=True) if end <= width]
    table = new_table()
    for key in fitting:
        numeric = any(isinstance(row.get(key), int | float) for row in shown)
        table.add_column(names[key], justify="right" if numeric else "left", no_wrap=not columns, overflow="fold")
    for line in zip(*(cells[key] for key in fitting), strict=True):
        table.add_row(*line)
    left_out = [names[key] for key in chosen if key not in fitting]
    notes = [*_omissions(rows, limit, left_out), *_notes(rows if runs is None else runs)]
    return Group(table, Text("\n".join(["medians over the runs that are done"] * grouped + notes), style="dim"))


def _short(key: str, among: Sequence[str]) -> str:
    """Return the last part of a key, such as budget for cache.budget, or the whole key if others share that part. An
    option's name has the name of its group.
    """
    last = key.removesuffix(".name").rpartition(".")[2]
    namesakes = sum(last == other.removesuffix(".name").rpartition(".")[2] for other in among)
    return LABELS.get(key) or (last if namesakes == 1 else key)


def _columns(rows: Sequence[Row], known: Sequence[str], grouped: bool) -> list[str]:
    """Return the columns: settings in which the rows differ, then main metrics."""
    if grouped:
        return [*known[: known.index("runs") + 1], *(key for key in MAIN_METRICS if key in known)] if rows else []
    marks = [key for key in ("acceptance/source",) if len({row.get(key) for row in rows} - {None}) > 1]
    main, settings = [key for key in MAIN_METRICS if key in known], telling(rows)
    engines = [key for key in BETWEEN_ENGINES if key in known] if ENGINE in settings else []
    if engines:  # the settings of engines are implied by their names
        settings = [key for key in settings if key not in engines and not key.startswith(("engine.", "attention."))]
    first, others = ([key for key in main if (key in SPEEDUPS) == is_first] for is_first in (True, False))
    return ["id", "status", *engines, *first, *settings[:MAX_SETTINGS], *marks, *others]


def _marked(row: Row, key: str) -> Text:
    value = row.get(key)
    if (key in SPEEDUPS or key.endswith("speedup")) and isinstance(value, int | float):
        mark = "!" if key == "speedup" and noise(row) else ""
        return Text(f"{value:.2f}x{mark}", style="green" if value > 1 else "red")
    if key.endswith("_error") and isinstance(value, int | float):
        return Text(f"{value:+.0%}")
    if key == "status" and value != "done":
        return Text(str(row.get("kind") or value), style="yellow")
    if key in ("lossless/passed", "lossless/identical", "output/agrees"):
        return Text("" if value is None else "yes" if value else "no", style="" if value else "yellow")
    return Text(cell(value))


def _omissions(rows: Sequence[Row], limit: int, left_out: Sequence[str]) -> Iterator[str]:
    """Name the lines and columns that are not shown."""
    if limit and len(rows) > limit:
        yield f"{limit} of {len(rows):,} lines; --limit 0 shows all"
    if left_out:
        yield f"not shown: {', '.join(left_out)}; a wider terminal, --columns or --csv shows them"


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    """Count the failed, noisy, disturbed, published, too large and synthetic runs."""
    failed = [row for row in rows if row.get("status") == "failed"]
    if failed:
        yield f"{len(failed):,} failed; --columns id,kind,reason says why"
    if noisy := [row for row in rows if noise(row)]:
        keys = [key for key in ("speedup_spread", *TWICE) if any(key in row for row in noisy)]
        yield (
            f"{len(noisy):,} noisy, marked !: repeats spread over more than {NOISY:.0%}, or what was measured twice "
            f"disagrees; --columns id,{','.join(keys)} says how"
        )
    if impossible := sum(1 for row in rows if is_impossible(row)):
        yield f"{impossible:,} with an impossible overhead (time/overhead_ms below 0): measure them again"
    if troubled := sum(1 for row in rows if gpu_trouble(row)):
        yield f"{troubled:,} on a GPU that was throttled or shared; --columns gpu/throttled/power,gpu/shared says how"
    if published := [row for row in rows if "published/table" in row]:
        tables = ", ".join(sorted({str(row["published/table"]) for row in published}))
        yield (
            f"published: the MagicDec paper's Table {tables}, which has {len(published):,} of these {len(rows):,}; "
            "predicted for it: by the cost model, at the paper's gamma and acceptance"
        )
    if unfit := sum(1 for row in rows if row.get("predicted/fits") is False and "speedup" not in row):
        yield f"{unfit:,} predicted to need more memory than there is; --columns id,predicted/memory_gib says how much"
    synthetic = sum(1 for row in rows if row.get("acceptance/source") == "synthetic")
    if synthetic:
        yield f"{synthetic:,} SYNTHETIC: their acceptance was drawn, not measured; only the times are real"
