"""`magicdec figure RUNS_DIR --x KEY`: draw metrics of stored runs over a setting, for a paper, with
what was held constant in the caption.
"""

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path

from magicdec.errors import UserError, exit_code
from magicdec.inputs.others import given_path
from magicdec.report import figures, picture, query
from magicdec.report.by_context import CONTEXT, rows_by_context
from magicdec.report.rows import keys_of, read_runs, rows_of
from magicdec.shell import command_line
from magicdec.tracking.columns import Row, is_setting
from magicdec.tracking.store import shown


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    return exit_code(lambda: _figure(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("magicdec figure", description=__doc__)
    parser.add_argument("runs_dir", type=given_path, help="a run store, as in runs_dir=FOLDER")
    parser.add_argument(
        "--x",
        metavar="KEY",
        required=True,
        help="the setting on the x axis: cache.budget; context: acceptance by context, under load",
    )
    parser.add_argument(
        "--y",
        metavar="KEYS",
        help="metrics, separated by commas (speedup, or acceptance_length over context)",
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
        "--out", metavar="FILE", type=given_path, help="the file; by default named after the axes"
    )
    return parser


def _figure(arguments: Sequence[str]) -> None:
    options = _parser().parse_args(arguments)
    rows = query.select(rows_of(read_runs(options.runs_dir, options.sweep)[0]), options.where)
    metrics = options.y or "speedup"
    if options.x == CONTEXT:
        metrics = options.y or "acceptance_length"
        rows = list(rows_by_context(rows))
        if not rows:
            raise UserError(
                "--x context: no run has acceptance by context; scenario=serve stores it for"
                " prompts of several lengths"
            )
    names = keys_of(rows)
    x = _setting(names, options.x, "--x")
    series = options.series and _setting(names, options.series, "--series")
    keys = [query.find_key(names, key, "--y") for key in metrics.split(",")]
    rows = [row for row in rows if row.get("status") == "done"]
    _refuse_mixtures(rows, (x, series))
    title = keys[0] if len(keys) == 1 else ", ".join(keys)
    spec = figures.figure(rows, x, series, {key: key for key in keys}, title)
    if spec is None:
        raise UserError(f"no run that is done has numbers for {metrics} over {x}")
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


def _refuse_mixtures(rows: Sequence[Row], axes: Collection[str | None]) -> None:
    """Raise UserError if the runs differ in what has no meaningful median, unless an axis shows
    it.
    """
    for key in query.NEVER_MIXED:
        values = sorted({str(row[key]) for row in rows if key in row})
        if len(values) > 1 and key not in axes:
            raise UserError(
                f"the runs differ in {key} ({', '.join(values)}), and their median means nothing;"
                f" choose one with --where '{key}={values[0]}', or draw them with --series {key}"
            )


def _setting(names: Sequence[str], key: str, option: str) -> str:
    """Return the setting that ends in `key`, or else any known key: gamma is draft.gamma, not the
    metric.
    """
    settings = [name for name in names if is_setting(name) and name.endswith(f".{key}")]
    return settings[0] if len(settings) == 1 else query.find_key(names, key, option)
