"""`magicdec report RUNS_DIR`: sort, filter, group, export and plot runs."""

import argparse
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from rich.text import Text

from magicdec.errors import UserError, exit_code
from magicdec.inputs.others import given_path
from magicdec.inputs.rules import at_least
from magicdec.report import export, figures, page, query, terminal
from magicdec.report.rows import num_runs, read_runs, rows_of, rows_of_file
from magicdec.shell import command_line
from magicdec.tracking.columns import Row
from magicdec.tracking.reader import check_store
from magicdec.tracking.store import counted, shown

EXAMPLES = """examples:
  magicdec report runs                                    every run, newest last
  magicdec report runs --where cache.budget=128 --where 'speedup>1' --sort speedup --descending
  magicdec report runs --group-by cache.policy,cache.budget
  magicdec report runs --sweep gamma_x_budget --html report.html --csv runs.csv
  magicdec report runs vllm.json benchmarks.json          next to what load generators have measured
  magicdec report vllm.json benchmarks.json               these alone
  magicdec compare runs/0a1b2c3d4e5f runs/6a7b8c9d0e1f
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    command = command_line(["magicdec", "report", *arguments])
    return exit_code(
        lambda: _report(_parser().parse_args(arguments, argparse.Namespace(command=command)))
    )


def _report(options: argparse.Namespace) -> None:
    _check(options)
    files, left_out = options.results, ""
    runs: list[dict[str, Any]] = []
    if options.runs_dir.is_file():  # no store, result files alone
        if options.sweep:
            raise UserError(
                f"--sweep {options.sweep}: {options.runs_dir} is a file; name a run store before it"
            )
        files = [options.runs_dir, *files]
    else:
        runs, left_out = read_runs(options.runs_dir, options.sweep, options.all)
    all_rows = [*rows_of(runs), *(row for path in files for row in rows_of_file(path))]
    rows = query.select(all_rows, options.where)
    table = (
        query.group(rows, options.group_by.split(","), options.mix) if options.group_by else rows
    )
    table = query.sort(table, options.sort, options.descending)
    written = list(_write_files(options, rows, table))
    console = terminal.console()
    columns = options.columns.split(",") if options.columns else None
    console.print(
        terminal.runs_table(
            table, columns, options.limit, console.width, rows if options.group_by else None
        )
    )
    for line in filter(None, [left_out, *written]):
        console.print(Text(line, no_wrap=True, overflow="ignore"), crop=False)


def _check(options: argparse.Namespace) -> None:
    """Raise UserError for options out of range or without an effect, and for a missing store."""
    at_least(0, "--limit", options.limit)
    if options.descending and not options.sort:
        raise UserError("--descending has no effect without --sort KEY")
    if options.mix and not options.group_by:
        raise UserError("--mix has no effect without --group-by KEYS")
    files = {name: getattr(options, name) for name in ("csv", "parquet", "html")}
    for (one, path), (other, same) in combinations(files.items(), 2):
        if path and same and path.resolve() == same.resolve():
            raise UserError(f"--{other} {same}: --{one} writes the same file; name another")
    if not options.runs_dir.is_file():
        check_store(options.runs_dir, "or a result file")


def _write_files(options: argparse.Namespace, rows: list[Row], table: list[Row]) -> Iterator[str]:
    """Write the files that the options ask for, and say what they hold: CSV and Parquet the table,
    the others all runs.
    """
    for target, write in ((options.csv, export.write_csv), (options.parquet, export.write_parquet)):
        if target:
            write(target, table)
            yield f"{counted(len(table), 'line')} in {shown(target)}"
    if options.html:
        title = f"{options.runs_dir}{f', {options.sweep}' if options.sweep else ''}"
        export.write(options.html, page.html_page(rows, title))
        yield (
            f"{counted(num_runs(rows), 'run')} in {shown(options.html)}: open it in any browser, no"
            " network needed"
        )
    if options.figures:
        yield (
            "figures:"
            f" {', '.join(map(shown, figures.draw_sweep(rows, options.figures, options.command)))}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "magicdec report",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs_dir",
        type=given_path,
        help="a run store, as in runs_dir=FOLDER, or a result file alone",
    )
    parser.add_argument(
        "results",
        nargs="*",
        type=given_path,
        help="result files of vllm bench serve, AIPerf or GuideLLM, as further rows",
    )
    parser.add_argument(
        "--sweep",
        metavar="NAME",
        help="only the runs of the sweeps of this name, or of this folder",
    )
    parser.add_argument(
        "--all", action="store_true", help="every attempt at a run, and runs that were mistyped"
    )
    parser.add_argument("--where", metavar="TEST", action="append", default=[], help=query.SYNTAX)
    parser.add_argument("--sort", metavar="KEY", help="by this key, the smallest first")
    parser.add_argument("--descending", action="store_true", help="the largest first")
    parser.add_argument(
        "--group-by", metavar="KEYS", help="a line per combination of these keys, with medians"
    )
    parser.add_argument(
        "--mix",
        action="store_true",
        help="let a group hold several targets, drafts, machines and so on",
    )
    parser.add_argument(
        "--columns", metavar="KEYS", help="columns to show, not those that differ and main metrics"
    )
    parser.add_argument(
        "--limit", metavar="N", type=int, default=50, help="lines on the terminal (50; 0: all)"
    )
    _add_files(parser)
    return parser


def _add_files(parser: argparse.ArgumentParser) -> None:
    """Add the options that name files to write."""
    parser.add_argument(
        "--csv", metavar="FILE", type=given_path, help="write the same lines with all their columns"
    )
    parser.add_argument(
        "--parquet",
        metavar="FILE",
        type=given_path,
        help="the same as Parquet; needs 'magicdec[report]'",
    )
    parser.add_argument(
        "--figures",
        metavar="FOLDER",
        type=given_path,
        help="draw speedups and step times over what the runs differ in",
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=given_path,
        help="write a page with interactive plots of the runs",
    )
