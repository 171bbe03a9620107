"""What a sweep leaves at its end: its table on the terminal, and its page and figures in its folder."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from magicdec.errors import UserError
from magicdec.tracking.report import export, figures, page, terminal
from magicdec.tracking.report.rows import Row, read_runs, rows_of
from magicdec.tracking.store import shown
from magicdec.tracking.sweep import jobs

PAGE = "report.html"


def summarize(sweep_dir: Path, with_figures: bool) -> None:
    """Show a sweep, <runs_dir>/sweeps/<name>. What cannot be written is said; it is no failure."""
    runs_dir, console = sweep_dir.parents[1], terminal.console()
    if refused := sum(1 for job in jobs(sweep_dir) if not job.get("id")):
        print(f"{refused:,} job{'s' if refused > 1 else ''} ended before there was a run: see the errors above")
    try:
        runs, left_out = read_runs(runs_dir, sweep_dir.name)
        rows = rows_of(runs)
        console.print(terminal.render(rows, None, limit=50, width=console.width))
        states = Counter(str(row.get("status")) for row in rows)
        told = ", ".join(f"{number:,} {state}" for state, number in sorted(states.items()))
        print(f"{len(rows):,} run{'s' if len(rows) > 1 else ''}: {told}{f'; {left_out}' if left_out else ''}")
        for path in _written(rows, sweep_dir, with_figures):
            print(f"written           {shown(path)}")
        if with_figures:
            print("in the figures    points: measured; dashes: predicted; crosses: the MagicDec paper's tables, where")
            print("                  they have the same cell: no numbers of its figures are published")
    except UserError as error:
        print(f"not written       {error}")
    print(f"this table        python -m magicdec.tracking.report {shown(runs_dir)} --sweep {sweep_dir.name}")


def _written(rows: Sequence[Row], sweep_dir: Path, with_figures: bool) -> Iterator[Path]:
    export.write(sweep_dir / PAGE, page.render(rows, title=sweep_dir.name))
    yield sweep_dir / PAGE
    if with_figures:
        yield from figures.draw(rows, sweep_dir)
