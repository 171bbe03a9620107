"""`magicdec report RUNS_DIR`: sort, filter, group, export and plot runs; or compare two, or draw a
figure.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from magicdec.commands import command_line
from magicdec.errors import UserError, exit_code
from magicdec.tracking.reader import find_run
from magicdec.tracking.report import difference, export, figures, page, picture, query, terminal
from magicdec.tracking.report.rows import (
    Row,
    drop_unread,
    flatten,
    is_setting,
    keys_of,
    num_runs,
    read_runs,
    rows_of,
    rows_of_file,
)
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["compare"]:
        return exit_code(lambda: _compare(arguments[1:]))
    if arguments[:1] == ["figure"]:
        return exit_code(lambda: _figure(arguments[1:]))
    command = command_line(["magicdec", "report", *arguments])
    return exit_code(
        lambda: _report(_parser().parse_args(arguments, argparse.Namespace(command=command)))
    )


def _report(options: argparse.Namespace) -> None:
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


def _compare(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("magicdec compare", description=difference.__doc__)
    parser.add_argument("run_a", help="a run's folder, or the beginning of its id")
    parser.add_argument("run_b")
    parser.add_argument(
        "--runs-dir", type=Path, default=Path("runs"), help="the store to look ids up in (runs)"
    )
    parser.add_argument(
        "--all", action="store_true", help="every metric that differs, not only the main ones"
    )
    options = parser.parse_args(arguments)
    a = flatten(find_run(options.run_a, options.runs_dir))
    b = flatten(find_run(options.run_b, options.runs_dir))
    drop_unread([a, b])
    console = terminal.console()
    console.print(difference.difference_table(a, b, options.all, console.width))


def _figure(arguments: Sequence[str]) -> None:
    """Draw metrics of stored runs over a setting, for a paper, with what was held constant in the
    caption.
    """
    parser = argparse.ArgumentParser("magicdec figure", description=_figure.__doc__)
    parser.add_argument("runs_dir", type=Path, help="a run store, as in runs_dir=FOLDER")
    parser.add_argument(
        "--x", metavar="KEY", required=True, help="the setting on the x axis: cache.budget"
    )
    parser.add_argument(
        "--y", metavar="KEYS", default="speedup", help="metrics, separated by commas (speedup)"
    )
    parser.add_argument(
        "--series", metavar="KEY", help="a setting with a colour for each value: cache.policy"
    )
    parser.add_argument(
        "--sweep",
        metavar="NAME",
        help="only the runs of the sweeps of this name, or of this folder",
    )
    parser.add_argument("--where", metavar="TEST", action="append", default=[], help=query.SYNTAX)
    parser.add_argument("--format", choices=picture.FORMATS, help="(that of --out, or pdf)")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="the file; by default named after the axes"
    )
    options = parser.parse_args(arguments)
    rows = query.select(rows_of(read_runs(options.runs_dir, options.sweep)[0]), options.where)
    names = keys_of(rows)
    x, series = (
        _setting(names, options.x, "--x"),
        options.series and _setting(names, options.series, "--series"),
    )
    keys = [query.find_key(names, key, "--y") for key in options.y.split(",")]
    rows = [row for row in rows if row.get("status") == "done"]
    for key in query.NEVER_MIXED:
        values = sorted({str(row[key]) for row in rows if key in row})
        if len(values) > 1 and key not in (x, series):
            choice = (
                f"choose one with --where '{key}={values[0]}', or draw them with --series {key}"
            )
            raise UserError(
                f"the runs differ in {key} ({', '.join(values)}), and their median means nothing;"
                f" {choice}"
            )
    title = keys[0] if len(keys) == 1 else ", ".join(keys)
    spec = figures.figure(rows, x, series, {key: key for key in keys}, title)
    if spec is None:
        raise UserError(f"no run that is done has numbers for {options.y} over {x}")
    path = options.out or Path(
        f"{'-'.join(keys)}-by-{x}.{options.format or 'pdf'}".replace("/", "_")
    )
    kind = path.suffix.removeprefix(".")
    if kind not in picture.FORMATS:
        endings = ", ".join(f".{ending}" for ending in picture.FORMATS)
        raise UserError(f"--out {path}: must end in one of {endings}")
    if options.format not in (None, kind):
        raise UserError(
            f"--out {path}: does not end in .{options.format}, as --format {options.format} says"
        )
    figures.draw(spec, path, command_line(["magicdec", "figure", *arguments]))
    print(f"written {shown(path)}")


def _setting(names: Sequence[str], key: str, option: str) -> str:
    """Return the setting that ends in `key`, or else any known key: gamma is draft.gamma, not the
    metric.
    """
    settings = [name for name in names if is_setting(name) and name.endswith(f".{key}")]
    return settings[0] if len(settings) == 1 else query.find_key(names, key, option)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "magicdec report",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs_dir", type=Path, help="a run store, as in runs_dir=FOLDER, or a result file alone"
    )
    parser.add_argument(
        "results",
        nargs="*",
        type=Path,
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
    parser.add_argument(
        "--csv", metavar="FILE", type=Path, help="write the same lines with all their columns"
    )
    parser.add_argument(
        "--parquet", metavar="FILE", type=Path, help="the same as Parquet; needs 'magicdec[report]'"
    )
    parser.add_argument(
        "--figures",
        metavar="FOLDER",
        type=Path,
        help="draw speedups and step times over what the runs differ in",
    )
    parser.add_argument(
        "--html", metavar="FILE", type=Path, help="write a page with interactive plots of the runs"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
