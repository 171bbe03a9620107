"""`python -m magicdec.tracking.report RUNS_DIR`: sort, filter, group, export and plot runs; or compare two."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from magicdec.errors import UserError, to_stderr
from magicdec.tracking.report import difference, export, figures, page, query, terminal
from magicdec.tracking.report.rows import read_runs, rows_of
from magicdec.tracking.store import counted, shown

USER_ERROR = 2
EXAMPLES = """examples:
  python -m magicdec.tracking.report runs                                   every run, newest last
  python -m magicdec.tracking.report runs --where cache.budget=128 --where 'speedup>1' --sort speedup --descending
  python -m magicdec.tracking.report runs --group-by cache.policy,cache.budget
  python -m magicdec.tracking.report runs --sweep gamma_x_budget --html report.html --csv runs.csv
  python -m magicdec.tracking.report compare runs/0a1b2c3d4e5f runs/6a7b8c9d0e1f
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 2 for a user's mistake, told in one line."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments[:1] == ["compare"]:
            _compare(arguments[1:])
        else:
            _report(arguments)
    except UserError as error:
        to_stderr(f"error: {error}")
        return USER_ERROR
    return 0


def _report(arguments: Sequence[str]) -> None:
    options = _parser().parse_args(arguments)
    chosen, left_out = read_runs(options.runs_dir, options.sweep, options.all)
    rows = query.select(rows_of(chosen), options.where)
    table = query.group(rows, options.group_by.split(","), options.mix) if options.group_by else rows
    table = query.sort(table, options.sort, options.descending)
    written = [
        write(options, target, rows if name in ("html", "figures") else table)
        for name, write in (("csv", _csv), ("parquet", _parquet), ("html", _html), ("figures", _figures))
        if (target := getattr(options, name))
    ]
    console = terminal.console()
    columns = options.columns.split(",") if options.columns else None
    runs = rows if options.group_by else None
    console.print(terminal.render(table, columns, options.limit, console.width, runs))
    for line in filter(None, [left_out, *written]):
        console.print(Text(line, no_wrap=True, overflow="ignore"), crop=False)


def _csv(options: argparse.Namespace, target: Path, rows: list[query.Row]) -> str:
    export.write_csv(target, rows)
    return f"{counted(len(rows), 'line')} in {shown(target)}"


def _parquet(options: argparse.Namespace, target: Path, rows: list[query.Row]) -> str:
    export.write_parquet(target, rows)
    return f"{counted(len(rows), 'line')} in {shown(target)}"


def _html(options: argparse.Namespace, target: Path, rows: list[query.Row]) -> str:
    export.write(target, page.render(rows, title=f"{options.runs_dir}{f', {options.sweep}' if options.sweep else ''}"))
    return f"{counted(len(rows), 'run')} in {shown(target)}: open it in any browser, no network needed"


def _figures(options: argparse.Namespace, target: Path, rows: list[query.Row]) -> str:
    return f"figures: {', '.join(shown(path) for path in figures.draw(rows, target))}"


def _compare(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m magicdec.tracking.report compare", description=difference.__doc__)
    parser.add_argument("run_a", help="a run's folder, or the beginning of its id")
    parser.add_argument("run_b")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where ids are looked for (runs)")
    parser.add_argument("--all", action="store_true", help="every figure that differs, not only the main ones")
    options = parser.parse_args(arguments)
    a, b = (difference.find(name, options.runs_dir) for name in (options.run_a, options.run_b))
    Console().print(difference.render(a, b, options.all))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m magicdec.tracking.report",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs_dir", type=Path, help="a run store, as in runs_dir=FOLDER")
    parser.add_argument("--sweep", metavar="NAME", help="only the runs of the sweeps of this name, or of this folder")
    parser.add_argument("--all", action="store_true", help="every attempt at a run, and runs that were mistyped")
    parser.add_argument("--where", metavar="TEST", action="append", default=[], help=query.SYNTAX)
    parser.add_argument("--sort", metavar="KEY", help="by this key, the smallest first")
    parser.add_argument("--descending", action="store_true", help="the largest first")
    parser.add_argument("--group-by", metavar="KEYS", help="a line per combination of these keys, with medians")
    parser.add_argument("--mix", action="store_true", help="let a group hold several targets, scenarios, sources")
    parser.add_argument("--columns", metavar="KEYS", help="what to show, in place of what differs and what counts")
    parser.add_argument("--limit", metavar="N", type=int, default=50, help="lines on the terminal (50; 0: all)")
    parser.add_argument("--csv", metavar="FILE", type=Path, help="write the same lines with all their columns")
    parser.add_argument("--parquet", metavar="FILE", type=Path, help="likewise; needs pip install 'magicdec[report]'")
    parser.add_argument(
        "--figures", metavar="FOLDER", type=Path, help="draw the paper's figures; needs 'magicdec[plots]'"
    )
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page with interactive plots of the runs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
