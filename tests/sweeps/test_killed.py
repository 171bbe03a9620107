"""Sweeps that are killed, that share a store, whose jobs die: every run is done once, and nothing
is lost.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from magicdec.config.load import compose
from magicdec.errors import StorageError
from magicdec.scenarios import Job, run
from magicdec.tracking.lock import is_locked
from magicdec.tracking.reader import iter_runs
from magicdec.tracking.sweep import jobs
from tests.sweeps.grid import (
    COMMON,
    GRID,
    check_all_done_once,
    done,
    ended,
    finished,
    folders,
    seeded,
    start,
    started,
)


@pytest.fixture
def forked(quick):
    """Start a sweep of the 12 runs of GRID in a process of its own, one after another as
    hydra/launcher=basic does.
    """
    base = compose(COMMON)

    def sweep(runs):
        for number, (gamma, budget) in enumerate(GRID):
            draft, cache = replace(base.draft, gamma=gamma), replace(base.cache, budget=budget)
            config = replace(base, runs_dir=str(runs), draft=draft, cache=cache)
            run(
                config,
                Job((f"draft.gamma={gamma}",), runs / "sweeps" / "a sweep", number, waits=True),
            )

    return lambda runs: started(sweep, runs)


@pytest.mark.soak
def test_killed_at_ten_random_moments_and_started_again(tmp_path, forked):
    calm, runs = tmp_path / "calm", tmp_path / "runs"
    assert ended(forked(calm)) == 0
    moments = seeded()
    before, kills = set(), 0
    while kills < 10:
        process = forked(runs)
        time.sleep(moments.uniform(0, 0.25))
        process.kill()
        kills += ended(process) == -signal.SIGKILL
        before = done(runs, before)
        if len(before) == len(GRID):  # a fast machine: all over again
            shutil.rmtree(runs)
            before = set()
    assert ended(forked(runs)) == 0
    check_all_done_once(runs, calm, before)


@pytest.mark.slow
def test_four_sweeps_in_one_store(tmp_path, forked, starts):
    calm, runs = tmp_path / "calm", tmp_path / "runs"
    assert ended(forked(calm)) == 0
    processes = [forked(runs) for _ in range(4)]
    assert [ended(process) for process in processes] == [0] * 4
    assert len(list(starts.iterdir())) == 2 * len(GRID), "no run was begun twice"
    assert len(folders(runs)) == len(GRID)
    check_all_done_once(runs, calm)
    assert len(jobs(runs / "sweeps" / "a sweep")) == len(GRID), "a job is recorded once"


@pytest.fixture
def tmpfs(tmp_path):
    """A file system of 256 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.parametrize("free_kib", [12, 24, 32])
def test_a_full_disk_ends_a_run_with_a_line_and_its_own_kind(tmpfs, quick, capfd, free_kib):
    """There is room for less and more of a run: for none of its log, for some of it."""
    (tmpfs / "filler").write_bytes(bytes((256 - free_kib) << 10))
    config = replace(compose(COMMON), runs_dir=str(tmpfs / "runs"))
    with pytest.raises(
        StorageError,
        match=rf"^runs_dir={tmpfs}/runs: cannot write: No space left on device; choose",
    ):
        run(config, Job())
    assert "Traceback" not in capfd.readouterr().err
    (tmpfs / "filler").unlink()
    (found,) = iter_runs(tmpfs / "runs")
    assert found["kind"] == ("storage" if free_kib > 12 else "interrupted"), (
        "no room to say it, either"
    )


@pytest.mark.slow
def test_a_job_that_fails_or_dies_is_one_failed_run(tmp_path, starts, monkeypatch):
    runs, secret = tmp_path / "runs", "MARKER" + "0123456789abcdef" * 3
    monkeypatch.setenv("WANDB_API_KEY", secret)
    sweep = finished(
        start(
            runs,
            "sweep.name=mine",
            "hydra.launcher.jobs=2",
            "draft.gamma=1,6,7,2",
            "cache.budget=64",
        )
    )
    assert sweep.code == 1
    crash = (
        r"^error: job 1 \(.*draft.gamma=6 .*\): RuntimeError: gamma 6 is unlucky; its traceback is"
        r" in (.*)\n"
    )
    assert "in quick\n" in Path(re.search(crash, sweep.err, re.M)[1]).read_text()
    assert "Traceback" not in sweep.err
    assert re.search(r"^error: job 2 \(.*draft.gamma=7 .*\): killed by SIGKILL\n", sweep.err, re.M)
    found = {run["config"]["draft"]["gamma"]: run for run in iter_runs(runs)}
    assert {
        gamma: (run["status"], run.get("kind"), run.get("reason")) for gamma, run in found.items()
    } == {
        1: ("done", None, None),
        6: ("failed", "crashed", "RuntimeError: gamma 6 is unlucky"),
        7: ("failed", "crashed", "killed by SIGKILL"),
        2: ("done", None, None),
    }
    assert found[2]["pid"] not in (
        found[6]["pid"],
        found[7]["pid"],
    ), "no job follows one that failed in its process"
    (folder,) = (runs / "sweeps").glob("*_mine")
    assert {line["id"] for line in jobs(folder)} == {run["id"] for run in found.values()}
    assert (folder / "multirun.yaml").exists()
    assert {run["config"]["wandb"]["group"] for run in found.values()} == {"mine"}
    stored = [path.read_text() for path in runs.rglob("*") if path.is_file()]
    assert not [text for text in [*stored, sweep.out, sweep.err] if secret in text], (
        "no secret is written"
    )


@pytest.mark.slow
def test_a_killed_launcher_takes_its_jobs_along_and_the_sweep_goes_on(
    tmp_path, starts, monkeypatch
):
    monkeypatch.setenv("QUICK_SECONDS", "0.5")
    runs = tmp_path / "runs"
    first = start(runs, "draft.gamma=1,2")
    while first.poll() is None and len(list(starts.iterdir())) < 2:
        time.sleep(0.01)
    first.kill()
    first.communicate()
    assert [run["status"] for run in iter_runs(runs)].count("done") == 1
    assert finished(start(runs, "draft.gamma=1,2")).code == 0
    assert sorted(run["attempt"] for run in iter_runs(runs) if run["status"] == "done") == [1, 2]
    assert not list(runs.glob("*/.*"))


@pytest.mark.soak
def test_a_sweep_of_processes_killed_at_ten_random_moments(tmp_path, starts):
    """Five times with its jobs, as a terminal that is closed does, and five times alone: its jobs
    must follow.
    """
    calm, runs, moments = tmp_path / "calm", tmp_path / "runs", seeded()
    grid = ["sweep.name=mine", "draft.gamma=1,2,3,4", "cache.budget=32,64,128"]
    assert finished(start(calm, *grid)).code == 0
    before = set()
    for kill in range(10):
        sweep = start(runs, *grid)
        time.sleep(moments.uniform(0.5, 5))
        if kill % 2:
            sweep.kill()
        else:
            os.killpg(sweep.pid, signal.SIGKILL)
        # Its jobs hold the other ends of these pipes: they are gone, too.
        sweep.communicate(timeout=20)
        assert not any(is_locked(path) for path in folders(runs))
        before = done(runs, before)
    last = finished(start(runs, *grid))
    assert last.code == 0, last.err
    check_all_done_once(runs, calm, before)


@pytest.mark.slow
def test_an_interrupt_stops_a_sweep_and_its_jobs(tmp_path, starts, monkeypatch):
    monkeypatch.setenv("QUICK_SECONDS", "5")
    runs = tmp_path / "runs"
    sweep = start(runs, "draft.gamma=1,2")
    while sweep.poll() is None and not list(starts.iterdir()):
        time.sleep(0.05)
    os.killpg(sweep.pid, signal.SIGINT)  # as Ctrl-C does
    sweep = finished(sweep)
    assert sweep.code == 130
    assert sweep.err.count("interrupted") == 1
    assert "interrupted; to resume, run the same command again" in sweep.err
    assert [(run["status"], run["kind"]) for run in iter_runs(runs)] == [("failed", "interrupted")]
    assert not any(is_locked(path) for path in folders(runs))
