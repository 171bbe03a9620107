"""Small runs in this process, what they store, and the line by which a mistake is refused."""

import io
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from magicdec import api, scenarios
from magicdec.config.load import compose
from magicdec.scenarios import Job
from magicdec.scenarios.outcome import Outcome
from magicdec.tracking.progress import progress
from magicdec.tracking.reader import iter_runs
from magicdec.tracking.run_files import ROW, read_lines
from magicdec.tracking.store import Run
from tests.programs import ROOT

TINY = ROOT / "magicdec" / "models" / "tiny"
SMALL = [
    "hardware=cpu",
    "batch.size=2",
    "batch.context_len=128",
    "batch.generate_len=12",
    "cache.budget=64",
]
SMALL += ["scenario.repeats=1", "scenario.profile_repeats=1", "tracker=[]"]


def run_here(runs: Path, *keys: str, job: Job = Job()) -> api.Result:  # noqa: B008  # which is frozen
    """Run a small configuration with these keys, as a job of a sweep or alone, and return what it
    has stored.
    """
    return api._result(compose([*SMALL, f"runs_dir={runs}", *keys]), job)


def only_run(runs: Path) -> dict[str, Any]:
    """Return the result of the only run in a store, with its folder and its configuration."""
    (found,) = iter_runs(runs)
    return found


def lines(folder: str | Path, name: str) -> list[dict[str, Any]]:
    """Return the lines of a run's file."""
    return read_lines(Path(folder, f"{name}.jsonl"), ROW)


def outcome(*keys: str) -> Outcome:
    """Do what a scenario does, without storing it."""
    config = compose(keys)
    scenario = scenarios._scenario(config)
    with TemporaryDirectory() as runs, progress() as bars:
        return scenario.run(scenarios.prepare(config), Run.open(runs, "abc", {}), bars)


def shown(*views: Any, width: int = 100) -> str:
    """Return what the terminal shows."""
    console = Console(file=io.StringIO(), width=width)
    console.print(*views)
    return console.file.getvalue()


def one_line(*words: str) -> str:
    """Return a pattern of one line that holds these words in this order."""
    return r"^[^\n]*" + r"[^\n]*".join(map(re.escape, words)) + r"[^\n]*\Z"
