"""Read a store as a table: a flat row per run, with dotted configuration keys (cache.budget) and
the metrics.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from magicdec.config.registry import has_cache
from magicdec.errors import UserError
from magicdec.shell import command_line
from magicdec.tracking.columns import Row, flatten, leaves
from magicdec.tracking.reader import check_store, iter_runs, latest
from magicdec.tracking.run_files import ROW, read_lines
from magicdec.tracking.store import shown
from magicdec.tracking.sweep import is_named, jobs
from magicdec.units import LOADS

SCENARIO = "scenario.name"

# Names of a run and of the place where it ran: neither settings nor metrics.
FACTS = frozenset(
    {
        "id",
        "status",
        "kind",
        "reason",
        "attempt",
        "started",
        "resumed",
        "finished",
        "host",
        "pid",
        "folder",
        "overrides",
    }
    | {"version", "source", "commit", "commit_dirty", "python", "torch", "openmp"}
)
# Runs with the same values of these should have the same tokens, on any engine and with any draft.
SAME_OUTPUT = (
    "data/fingerprint",
    "target.name",
    "target.path",
    "batch.generate_len",
    "hardware.dtype",
)
SAME_SAMPLING = (
    "sampling.temperature",
    "sampling.top_k",
    "sampling.top_p",
    "sampling.seed",
    "sampling.ignore_eos",
)


def read_runs(
    runs_dir: str | Path, sweep: str | None = None, every_attempt: bool = False
) -> tuple[list[dict[str, Any]], str]:
    """Return the runs of a store, or of a sweep in it, each by its latest attempt, and a line on
    those left out.

    Those of a store come oldest first, those of a sweep in the order of its jobs. Leave out earlier
    attempts and mistyped runs unless `every_attempt` is true. Raise UserError if there are no runs.
    """
    check_store(runs_dir)
    members = None if sweep is None else sweep_members(runs_dir, sweep)
    runs = list(iter_runs(runs_dir, members))
    if not runs:
        raise UserError(f"{runs_dir}: holds no runs{f' of sweep {sweep}' if sweep else ''}")
    chosen = runs if every_attempt else latest(runs)
    mistyped = sum(run.get("kind") == "invalid" for run in runs)
    others = {"mistyped": mistyped, "superseded": len(runs) - len(chosen) - mistyped}
    line = (
        f"left out: {', '.join(f'{number:,} {what}' for what, number in others.items() if number)};"
        " --all shows them"
    )
    if mistyped:
        line += (
            f", {command_line(['magicdec', 'clean', shown(Path(runs_dir))])} deletes what was"
            " mistyped"
        )
    if not chosen:
        raise UserError(f"{runs_dir}: {line}")
    places = {name: place for place, name in enumerate(members or ())}
    chosen.sort(key=lambda run: (places.get(run["id"], 0), str(run.get("started", ""))))
    return chosen, line if len(chosen) < len(runs) else ""


def rows_of(runs: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return a row per run. A run under load (scenario=serve) is a row per level, which is then a
    setting among others: load.concurrency, load.rate or load.replay.
    """
    rows = [row for run in runs for row in _levels(run)]
    drop_unread(rows)
    _compare_outputs(rows)
    return rows


def read_rows(runs_dir: str | Path, sweep: str | None = None) -> list[Row]:
    """Return the rows of a store, or of a sweep in it. Raise UserError where there are none."""
    return rows_of(read_runs(runs_dir, sweep)[0])


def rows_of_file(path: Path) -> list[Row]:
    """Return a row per level of load in the result file of a load generator, which `engine.name`
    names.

    A server counts as speculative if the file reports acceptance. Raise UserError for other files.
    """
    # Here, because only the files of load generators need it.
    from magicdec.peers.results.read import read_results

    tool, levels = read_results(path)
    rows = []
    for level in levels:
        way = "speculative" if level.speculation else "autoregressive"
        row: Row = {
            "id": path.name,
            "status": "done",
            "folder": str(path.parent),
            SCENARIO: "serve",
        }
        row |= {"engine.name": tool, "target.name": level.model or "unknown"}
        row |= {
            "batch.context_len": round(level.context_len),
            "batch.generate_len": round(level.generate_len),
        }
        row |= _of_level(level.load) | dict(level.speculation)
        rows.append(row | {f"{way}/{name}": value for name, value in level.metrics.items()})
    return rows


def drop_unread(rows: Sequence[Row]) -> None:
    """Delete the settings of the cache from runs whose draft has none, where runs of several drafts
    are compared.

    Nobody tells runs of a single draft apart by them, and to look a draft up imports PyTorch.
    """
    drafts = {row["draft.name"] for row in rows if "draft.name" in row}
    without = {name for name in drafts if not has_cache(name)} if len(drafts) > 1 else set()
    for row in rows:
        if row.get("draft.name") in without:
            for key in [key for key in row if key.startswith("cache.")]:
                del row[key]


def _compare_outputs(rows: Iterable[Row]) -> None:
    """Add output/agrees where several engines have continued the same prompts: whether an engine
    has written the tokens of the native one, or else of the first.
    """
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        if "output/fingerprint" in row:
            groups.setdefault(
                tuple(row.get(key) for key in SAME_OUTPUT + SAME_SAMPLING), []
            ).append(row)
    for group in groups.values():
        if len({row.get("engine.name") for row in group}) > 1:
            reference = min(group, key=lambda row: row.get("engine.name") != "native")
            for row in group:
                row["output/agrees"] = row["output/fingerprint"] == reference["output/fingerprint"]


def _levels(run: Mapping[str, Any]) -> list[Row]:
    row = flatten(run)
    if row.get(SCENARIO) != "serve":
        return [row]
    levels = read_lines(Path(run["folder"]) / "history.jsonl", ROW)
    # The run's own figures are those of its last level: another level that lacks one must not show
    # it.
    rows = [dict(leaves(level)) for level in levels]
    shared = {key: value for key, value in row.items() if not any(key in each for each in rows)}
    return [shared | _of_level(each) for each in rows] or [row]


def _of_level(level: Mapping[str, Any]) -> Row:
    return {f"load.{key}" if key in LOADS else key: value for key, value in level.items()}


def num_runs(rows: Iterable[Row]) -> int:
    """Return how many runs the rows are of: a run under load has several."""
    return len({row["id"] for row in rows})


def sweep_members(runs_dir: str | Path, name: str) -> list[str]:
    """Return the ids of the runs of all sweeps of a name, in the order of their jobs. The name is
    the sweep's own (gamma_x_budget), or that of its folder.
    """
    folders = sorted(path for path in Path(runs_dir, "sweeps").glob("*") if path.is_dir())
    chosen = [path for path in folders if is_named(path, name)]
    if not chosen:
        names = ", ".join(path.name for path in folders) or "none"
        raise UserError(f"--sweep {name}: no such sweep; {Path(runs_dir, 'sweeps')} holds: {names}")
    return [line["id"] for folder in chosen for line in jobs(folder) if line["id"]]


def keys_of(rows: Iterable[Row]) -> list[str]:
    """Return every key of any row, in order of appearance."""
    return list(dict.fromkeys(key for row in rows for key in row))
