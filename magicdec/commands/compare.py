"""`magicdec compare RUN_A RUN_B`: print in what two runs differ, and whether by more than noise."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from magicdec.errors import exit_code
from magicdec.inputs.others import given_path
from magicdec.report import difference, terminal
from magicdec.report.rows import drop_unread
from magicdec.tracking.columns import flatten
from magicdec.tracking.reader import find_run


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    return exit_code(lambda: _compare(arguments))


def _compare(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("magicdec compare", description=__doc__)
    parser.add_argument("run_a", help="a run's folder, or the beginning of its id")
    parser.add_argument("run_b")
    parser.add_argument(
        "--runs-dir",
        type=given_path,
        default=Path("runs"),
        help="the store to look ids up in (runs)",
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
