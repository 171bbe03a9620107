"""Make the CSV files next to the pages from the runs of their sweeps, as tables.yaml says."""

from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml
from races import races

from magicdec.errors import UserError
from magicdec.report.rows import read_rows
from magicdec.tracking.run_files import ROW, read_lines

Row = dict[str, Any]
WAYS = ("autoregressive", "speculative")
TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
FILTERS = {
    "s": lambda ms: ms / 1e3,
    "half": lambda width: width / 2,
    "first": itemgetter(0),
    "last": itemgetter(-1),
}


def tables(page: str, runs_dir: Path) -> Iterator[tuple[str, list[Row]]]:
    """Yield the name and the rows of each CSV file of a page, from the runs of its sweep in this
    store.

    Leave out a file if the store has no runs for it. Raise UserError if it holds none of the page's
    sweeps.
    """
    missing: list[UserError] = []
    of_page = {name: wanted for name, wanted in TABLES.items() if wanted["page"] == page}
    for name, wanted in of_page.items():
        try:
            runs = [
                run for run in read_rows(runs_dir, wanted.get("sweep")) if run["status"] == "done"
            ]
        except UserError as error:
            missing.append(error)
            continue
        where = wanted.get("where", {})
        chosen = (run for run in runs if where.items() <= run.items())
        if wanted.get("cells"):
            chosen = (
                run | line
                for run in chosen
                for line in read_lines(Path(run["folder"]) / "history.jsonl", ROW)
            )
        rows = list(rows_of(chosen, wanted["columns"]))
        if not rows:
            continue
        yield name, rows
        if "races" in wanted:
            yield wanted["races"], list(races(rows))
    if missing and len(missing) == len(of_page):
        raise missing[0]


def rows_of(runs: Iterable[Row], columns: Mapping[str, str]) -> Iterator[Row]:
    """Yield a row for each run, or for each way of decoding that a run has measured."""
    by_way = any("{way}" in key for key in columns.values())
    for run in runs:
        for way in WAYS if by_way else ("",):
            if not by_way or f"{way}/tokens_per_second" in run:
                row = {
                    column: _value(run | {way: way}, key.format(way=way))
                    for column, key in columns.items()
                }
                yield row | {"run": run["id"], "measured_by": measured_by(run)}


def _value(run: Row, key: str) -> Any:
    name, _, change = key.partition(" | ")
    first, _, second = name.partition(" - ")
    value = run.get(first)
    if second and value is not None:
        value -= run[second]
    return FILTERS[change](value) if change and value is not None else value


def measured_by(run: Row) -> str:
    """Return the commit, the machine and the software of a run."""
    commit = f"{run.get('commit') or 'unknown':.7}{'-dirty' if run.get('commit_dirty') else ''}"
    return (
        f"commit {commit}, {run.get('device')}, PyTorch {run['torch']},"
        f" attention={run.get('attention')}"
    )
