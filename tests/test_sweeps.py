"""Sweeps that are killed, that share a store, whose jobs die: every run is done once, and nothing is lost."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from magicdec.tracking.lock import Busy, is_locked, locked
from magicdec.tracking.reader import iter_runs, load_run
from magicdec.tracking.store import Run
from tests.tracking.sample import CONFIG, finished_run, result_of

ROOT = Path(__file__).parents[1]
GRID = ["draft.gamma=1,2,3,4", "cache.budget=32,64,128"]
COMMON = ["hardware=cpu", "batch.size=1", "batch.context_len=64", "batch.generate_len=4", "wandb.mode=disabled"]
DECISIVE = ("id", "status", "speedup", "version")


@pytest.fixture
def starts(tmp_path, monkeypatch):
    folder = tmp_path / "starts"
    folder.mkdir()
    monkeypatch.setenv("QUICK_STARTS", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder


def sweep(runs, *arguments, launcher="basic", grid=GRID):
    command = [sys.executable, str(ROOT / "tests" / "quick_launch.py"), "-m", f"hydra/launcher={launcher}"]
    command += [f"runs_dir={runs}", *grid, *COMMON, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process):
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def results(runs):
    return {run["id"]: {key: run.get(key) for key in DECISIVE} for run in iter_runs(runs)}


def outputs(runs):
    """What the runs have written, but for where, and for the sweep that they were of."""
    names = ("generations.jsonl", "history.jsonl")
    texts = {path.name: [(path / name).read_text() for name in names] for path in folders(runs)}
    return texts | {run["id"] + " of": run["config"] | {"wandb": None, "runs_dir": None} for run in iter_runs(runs)}


def folders(runs):
    return [path for path in sorted(runs.iterdir()) if path.name != "sweeps"]


def finish_stamps(runs):
    return {run["id"]: (run["finished"], run["attempt"]) for run in iter_runs(runs) if run["status"] == "done"}


# The lock


def test_a_lock_is_one_process_alone_and_goes_with_it(tmp_path):
    assert not is_locked(tmp_path / "abc")
    with locked(tmp_path / "abc"):
        assert is_locked(tmp_path / "abc")
        with pytest.raises(Busy, match=rf"run abc is being run by process {os.getpid()} on "), locked(tmp_path / "abc"):
            pass
    assert not list((tmp_path / "abc").iterdir())


def test_a_killed_process_leaves_no_lock_and_its_run_was_interrupted(tmp_path):
    script = """
import os, signal, sys
from pathlib import Path
from magicdec.tracking.lock import locked
from magicdec.tracking.store import Run
with locked(Path(sys.argv[1], "abc")):
    Run.open(sys.argv[1], "abc", {})
    print("ready", flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert load_run(tmp_path / "abc")["status"] == "running"
        process.kill()
    run = load_run(tmp_path / "abc")
    assert (run["status"], run["kind"]) == ("failed", "interrupted")
    assert f"process {process.pid} on " in run["reason"]
    with locked(tmp_path / "abc"):
        assert Run.open(tmp_path, "abc", CONFIG).attempt == 2


def test_what_a_dead_process_left_running_is_buried_by_another(tmp_path):
    before = finished_run(tmp_path)
    again = Run.open(tmp_path, "abc", CONFIG)
    Run.bury(tmp_path, "abc", again.result["pid"] + 1, "not this one")
    assert result_of(before)["rerun"]["status"] == "running"
    Run.bury(tmp_path, "abc", again.result["pid"], "killed by SIGKILL")
    assert (result_of(before)["status"], result_of(before)["rerun"]["kind"]) == ("done", "crashed")


# Sweeps with a scenario that takes a moment


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_at_any_moment_and_started_again(tmp_path, starts, kills):
    assert ended(sweep(tmp_path / "calm"))[0] == 0
    runs, done = tmp_path / "runs", {}
    for _ in range(kills):
        process = sweep(runs)
        count = len(list(starts.iterdir()))
        while process.poll() is None and len(list(starts.iterdir())) == count:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.15))
        process.kill()
        process.communicate()
        now = finish_stamps(runs)
        assert done.items() <= now.items(), "what was done stays as it was"
        done = now
    assert ended(sweep(runs))[0] == 0
    assert done.items() <= finish_stamps(runs).items()
    assert len(results(runs)) == 12
    assert results(runs) == results(tmp_path / "calm")
    assert outputs(runs) == outputs(tmp_path / "calm")
    assert not [path for path in runs.glob("*/.*") if path.name == ".lock"]


def test_four_sweeps_in_one_store(tmp_path, starts):
    sweeps = [sweep(tmp_path / "runs") for _ in range(4)]
    codes = [ended(process)[0] for process in sweeps]
    assert codes == [0] * 4
    assert len(list(starts.iterdir())) == 12, "no run was begun twice"
    runs = results(tmp_path / "runs")
    assert len(runs) == 12
    assert {run["status"] for run in runs.values()} == {"done"}
    assert not list((tmp_path / "runs").glob("*/.*"))


def test_each_job_in_its_own_process(tmp_path, starts):
    grid = ["draft.gamma=1,6,7,2", "cache.budget=64"]
    code, _, err = ended(sweep(tmp_path, "sweep.name=mine", "hydra.launcher.jobs=2", launcher="process", grid=grid))
    assert code == 1
    assert re.search(r"error: job 1 \(.*draft.gamma=6 .*\): RuntimeError: gamma 6 is unlucky\n", err)
    assert re.search(r"error: job 2 \(.*draft.gamma=7 .*\): killed by SIGKILL\n", err)
    runs = {run["overrides"][1]: run for run in iter_runs(tmp_path)}
    kinds = {key: (run["status"], run.get("kind"), run.get("reason")) for key, run in runs.items()}
    assert kinds == {
        "draft.gamma=1": ("done", None, None),
        "draft.gamma=6": ("failed", "crashed", "RuntimeError: gamma 6 is unlucky"),
        "draft.gamma=7": ("failed", "crashed", "killed by SIGKILL"),
        "draft.gamma=2": ("done", None, None),
    }
    assert len({run["pid"] for run in runs.values()}) == 4
    (folder,) = (tmp_path / "sweeps").glob("*_mine")
    lines = [json.loads(line) for line in (folder / "jobs.jsonl").read_text().splitlines()]
    assert {line["id"] for line in lines} == {run["id"] for run in runs.values()}
    assert (folder / "multirun.yaml").exists()
    assert {run["config"]["wandb"]["group"] for run in runs.values()} == {"mine"}


@pytest.mark.parametrize("launcher", ["basic", "process"])
def test_fail_fast(tmp_path, starts, launcher):
    grid = ["draft.gamma=6,1,2", "cache.budget=64"]
    assert ended(sweep(tmp_path, "sweep.fail_fast=true", launcher=launcher, grid=grid))[0] == 1
    assert len(list(starts.iterdir())) == 1


def test_a_dry_run_lists_and_leaves_nothing(tmp_path, starts):
    assert ended(sweep(tmp_path / "runs", launcher="basic", grid=["draft.gamma=1", "cache.budget=64"]))[0] == 0
    before = sorted((tmp_path / "runs").rglob("*"))
    code, out, _ = ended(sweep(tmp_path / "runs", "sweep.dry_run=true", launcher="process"))
    assert code == 0
    lines = [line for line in out.splitlines() if " GiB " in line]
    assert sorted(line.split()[1] for line in lines) == ["done"] + ["new"] * 11
    assert sorted((tmp_path / "runs").rglob("*")) == before
    assert len(list(starts.iterdir())) == 1


def test_a_single_run_that_another_process_is_running_is_refused(tmp_path, starts):
    command = [sys.executable, str(ROOT / "tests" / "quick_launch.py"), f"runs_dir={tmp_path}", *COMMON]
    assert subprocess.run(command, capture_output=True, cwd=ROOT).returncode == 0
    (folder,) = tmp_path.glob("*/result.json")
    with locked(folder.parent):
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert f"error: run {folder.parent.name} is being run by process {os.getpid()}" in done.stderr


def test_an_interrupt_stops_a_sweep_and_its_jobs(tmp_path, starts):
    process = sweep(tmp_path / "runs", launcher="process")
    while process.poll() is None and not list(starts.iterdir()):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 130
    assert not any(is_locked(path) for path in folders(tmp_path / "runs"))
    assert len(folders(tmp_path / "runs")) < 12
