"""A sweep of twelve runs in a process of its own, and what its store holds at the end."""

import multiprocessing
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from magicdec.tracking.reader import iter_runs, latest, run_of
from tests.programs import ROOT

FORK = multiprocessing.get_context("fork")
GRID = [(gamma, budget) for gamma in (1, 2, 3, 4) for budget in (32, 64, 128)]
COMMON = [
    "hardware=cpu",
    "batch.size=1",
    "batch.context_len=64",
    "batch.generate_len=4",
    "wandb.mode=disabled",
]


def started(function, *arguments):
    process = FORK.Process(target=function, args=arguments)
    process.start()
    return process


def ended(process):
    process.join(60)
    return process.exitcode


def seeded():
    """Chance that can be had again: pytest shows the seed of a test that fails."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    return random.Random(seed)


def folders(runs):
    return [path for path in sorted(runs.glob("*")) if path.name != "sweeps"]


def decisive(runs):
    """Return what the runs have found and written, without times, attempts and folders."""
    names = ("generations.jsonl", "history.jsonl")
    shown = {run_of(run["id"]): run for run in latest(iter_runs(runs))}
    texts = {
        name: [Path(run["folder"], file).read_text() for file in names]
        for name, run in shown.items()
    }
    facts = {
        n: [r["status"], r["speedup"], r["config"] | {"runs_dir": None}] for n, r in shown.items()
    }
    return texts, facts


def done(runs, before=()):
    """The attempts that are done, each with the moment: those of `before`, too."""
    found = {(run["id"], run["finished"]) for run in iter_runs(runs) if run["status"] == "done"}
    assert found.issuperset(before)
    return found


def check_all_done_once(runs, calm, before=()):
    """The runs of GRID, as an undisturbed sweep has done them."""
    assert len(done(runs, before)) == len(GRID), "what was done is not done again"
    assert decisive(runs) == decisive(calm)
    assert not list(runs.glob("*/.*")), "neither locks nor files half written"


def start(runs, *arguments):
    # Whose jobs need no PyTorch, and so do not wait for it.
    own = ["scenario=predict", f"runs_dir={runs}"]
    command = [
        sys.executable,
        str(ROOT / "tests" / "quick_launch.py"),
        "-m",
        *own,
        *COMMON,
        *arguments,
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=runs.parent, start_new_session=True, **pipes)


def finished(process):
    out, err = process.communicate(timeout=120)
    return SimpleNamespace(code=process.returncode, out=out, err=err)
