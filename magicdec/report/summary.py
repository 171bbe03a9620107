"""The end of a sweep: its table on the terminal, and its page and figures in its folder."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from magicdec.errors import UserError, to_stderr
from magicdec.report import export, figures, page, terminal
from magicdec.report.fastest import answer
from magicdec.report.rows import read_runs, rows_of
from magicdec.shell import command_line
from magicdec.tracking.columns import Row
from magicdec.tracking.store import counted, shown
from magicdec.tracking.sweep import JOBS, jobs
from magicdec.tracking.trackers import chosen

PAGE = "report.html"


def summarize(sweep_dir: Path, with_figures: bool) -> None:
    """Print the summary of a sweep, <runs_dir>/sweeps/<name>. A file that cannot be written is no
    failure.
    """
    runs_dir = sweep_dir.parents[1]
    console = terminal.console()
    if refused := sum(1 for job in jobs(sweep_dir) if not job["id"]):
        print(f"{counted(refused, 'job')} ended before there was a run: see the errors above")
    try:
        runs, left_out = read_runs(runs_dir, sweep_dir.name)
        rows = rows_of(runs)
        console.print(terminal.runs_table(rows, None, limit=50, width=console.width))
        states = Counter(str(run.get("status")) for run in runs)
        in_words = [f"{number:,} {state}" for state, number in sorted(states.items())]
        by_state = ", ".join(in_words)
        answered = answer(rows)
        for line in answered.sentences() if answered else ():
            print(f"{'finding':18}{line}")
        print(f"{counted(len(runs), 'run')}: {by_state}{f'; {left_out}' if left_out else ''}")
        files = [sweep_dir / JOBS]
        try:
            for path in _written(rows, sweep_dir, with_figures):
                print(f"written           {shown(path)}")
                files.append(path)
        except UserError as error:
            print(f"not written       {error}")
        _log(sweep_dir, runs, files)
    except UserError as error:
        print(f"not written       {error}")
    print(f"this table        {_command(sweep_dir)}")


def _log(sweep_dir: Path, runs: Sequence[Mapping[str, Any]], files: Sequence[Path]) -> None:
    """Log the report as the runs are logged, and say where it is."""
    if not runs or "wandb" not in runs[-1]["config"]:
        return
    config = runs[-1]["config"]
    for logged in filter(
        None, (tracker.log_sweep(sweep_dir, config, files) for tracker in chosen(config))
    ):
        if logged.warning:
            to_stderr(f"warning: the report of the sweep: {logged.warning}")
        if logged.url or logged.command:
            print(f"report in {logged.tracker:8}{logged.url or logged.command}")


def _written(rows: Sequence[Row], sweep_dir: Path, with_figures: bool) -> Iterator[Path]:
    export.write(sweep_dir / PAGE, page.html_page(rows, sweep_dir.name))
    yield sweep_dir / PAGE
    if with_figures:
        yield from figures.draw_sweep(rows, sweep_dir, _command(sweep_dir))


def _command(sweep_dir: Path) -> str:
    """Return the command that shows the table of a sweep."""
    return command_line(
        ["magicdec", "report", shown(sweep_dir.parents[1]), "--sweep", sweep_dir.name]
    )
