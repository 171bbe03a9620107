"""Sweeps that are killed, that share a store, whose jobs die: every run is done once, and nothing
is lost.
"""

import contextlib
import errno
import itertools
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.utils import JobStatus
from omegaconf import OmegaConf

import magicdec.planning.duration
import magicdec.planning.fits
import magicdec.scenarios
from hydra_plugins.magicdec import _groups, _sweeper
from hydra_plugins.magicdec._launcher import ProcessLauncher, SweepJob, lost_code
from magicdec import cli
from magicdec.commands import report
from magicdec.config.load import compose
from magicdec.errors import StorageError
from magicdec.report import page
from magicdec.scenarios import Job, run
from magicdec.threads import usual
from magicdec.tracking import lock
from magicdec.tracking.lock import Busy, is_locked, locked
from magicdec.tracking.reader import iter_runs, latest, run_of
from magicdec.tracking.store import Run
from magicdec.tracking.sweep import BUSY, jobs, record
from tests import quick_launch
from tests.programs import ROOT
from tests.tracking.sample import CONFIG, finished_run, result_of

FORK = multiprocessing.get_context("fork")
GRID = [(gamma, budget) for gamma in (1, 2, 3, 4) for budget in (32, 64, 128)]
COMMON = [
    "hardware=cpu",
    "batch.size=1",
    "batch.context_len=64",
    "batch.generate_len=4",
    "wandb.mode=disabled",
]


@pytest.fixture
def starts(tmp_path, monkeypatch):
    """The folder that gets a file for each run that is begun."""
    folder = tmp_path / "starts"
    folder.mkdir()
    monkeypatch.setenv("QUICK_STARTS", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder


@pytest.fixture
def quick(starts, monkeypatch):
    """Runs of this process and those forked from it take a moment, and pages have no charts."""
    monkeypatch.setattr(page, "vega", lambda: "")
    monkeypatch.setattr(magicdec.scenarios, "_scenario", lambda config: quick_launch)
    monkeypatch.setattr(magicdec.planning.fits, "num_bytes", quick_launch.num_bytes)
    monkeypatch.setattr(magicdec.planning.duration, "seconds", quick_launch.seconds)
    return starts


def started(function, *arguments):
    process = FORK.Process(target=function, args=arguments)
    process.start()
    return process


# Sweeps without Hydra, which takes a second to start: what becomes of a run is up to
# magicdec.scenarios.run


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


@pytest.mark.slow
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


# The lock


def test_a_lock_is_one_process_alone_and_goes_with_it(tmp_path):
    assert not is_locked(tmp_path / "abc")
    with locked(tmp_path / "abc"):
        assert is_locked(tmp_path / "abc")
        with (
            pytest.raises(Busy, match=rf"run abc is being run by process {os.getpid()} on "),
            locked(tmp_path / "abc"),
        ):
            pass
    assert not (tmp_path / "abc").exists()


@pytest.mark.parametrize("taken_over", [True, False])
def test_a_lock_on_a_file_that_was_removed_is_none(tmp_path, monkeypatch, taken_over):
    """Its holder removes the file after another process has opened it; a third may have made the
    next one by then.
    """
    path, take = tmp_path / ".lock", lock._flock

    def removed_meanwhile(descriptor):
        path.unlink()
        if taken_over:
            path.touch()
        take(descriptor)

    monkeypatch.setattr(lock, "_flock", removed_meanwhile)
    assert lock._try(path) is None
    monkeypatch.undo()
    descriptor = lock._try(path)
    assert descriptor is not None
    os.close(descriptor)


def test_what_a_dead_process_left_running_is_buried_by_another(tmp_path):
    before = finished_run(tmp_path)
    again = Run.open(tmp_path, "abc", CONFIG)
    pid = again.result["pid"]
    Run.mark_crashed(tmp_path, again.id, pid + 1, "not this one")
    assert result_of(again)["status"] == "running"
    with locked(tmp_path / "abc"):
        Run.mark_crashed(tmp_path, again.id, pid, "somebody else is at the next attempt")
    assert result_of(again)["status"] == "running"
    Run.mark_crashed(tmp_path, again.id, pid, "killed by SIGKILL")
    assert (result_of(before)["status"], result_of(again)["kind"]) == ("done", "crashed")


# Whole sweeps, with launch.py and the process launcher


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


@pytest.mark.slow
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


def server_of(sweep):
    """The process that forks the jobs of a sweep, once there is one."""
    while sweep.poll() is None:
        for pid in Path(f"/proc/{sweep.pid}/task/{sweep.pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                if b"multiprocessing.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return int(pid)
        time.sleep(0.01)
    raise AssertionError(sweep.communicate())


HELD = """
import os, sys, time
while any("forkserver" in argument for argument in sys.orig_argv) and os.path.exists({hold!r}):
    open({hold!r} + ".held", "a").close()
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_a_fork_server_that_is_killed_loses_no_job(tmp_path, starts, monkeypatch):
    """Once before it has imported everything, where it is held, and once while a job of it is
    running.
    """
    hold = tmp_path / "hold"
    hold.touch()
    (tmp_path / "sitecustomize.py").write_text(HELD.format(hold=str(hold)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setenv("QUICK_SECONDS", "1")
    sweep = start(tmp_path / "runs", "draft.gamma=1,2")
    server = server_of(sweep)
    while sweep.poll() is None and not (tmp_path / "hold.held").exists():
        time.sleep(0.01)
    # The sweep asks the server for a process; a server that dies before that is replaced silently.
    time.sleep(1)
    os.kill(server, signal.SIGSTOP)
    hold.unlink()  # for the next one
    os.kill(server, signal.SIGKILL)
    while sweep.poll() is None and not list(starts.iterdir()):
        time.sleep(0.01)
    os.kill(server_of(sweep), signal.SIGKILL)
    sweep = finished(sweep)
    runs = {run["config"]["draft"]["gamma"]: run for run in iter_runs(tmp_path / "runs")}
    assert [runs[gamma]["status"] for gamma in (1, 2)] == ["done", "done"], sweep.err
    assert runs[1]["end"] <= runs[2]["begin"], "one job at a time"
    assert "warning: the fork server died while it imported; started again\n" in sweep.err
    assert runs[1]["pid"] == runs[2]["pid"], "the process goes on without its server"
    assert "Traceback" not in sweep.err
    assert sweep.code == 0


def test_what_became_of_a_job_without_its_fork_server_is_in_the_store(tmp_path, capsys):
    sweep_dir = tmp_path / "sweeps" / "mine"
    config = OmegaConf.create(
        {"runs_dir": str(tmp_path), "hydra": {"sweep": {"dir": str(sweep_dir)}}}
    )

    def code(status, name="abc"):
        if status:
            record(sweep_dir, 3, name if status != "refused" else None, [])
        return lost_code(SweepJob(3, ["a=1"]), os.getpid(), config)

    assert code(None) == BUSY, "it has come to no run: once more"
    assert code("refused") == 1
    finished_run(tmp_path)
    assert code("done") == 0
    assert capsys.readouterr().err == ""
    killed = Run.open(tmp_path, "abc", CONFIG)
    assert code("running", killed.id) == 1
    assert (
        capsys.readouterr().err
        == "error: job 3 (a=1): ended without an exit code, as its fork server did\n"
    )
    assert (result_of(killed)["kind"], result_of(killed)["reason"][:5]) == ("crashed", "ended")


SERVER = """
import importlib, os, sys
import torch
asked = []
for name in ("is_available", "device_count", "init", "_lazy_init", "get_device_properties", "get_device_capability"):
    setattr(torch.cuda, name, lambda *_, name=name: asked.append(name))
from magicdec.scenarios import imports
for name in ["magicdec.cli", *imports("compare")]:
    importlib.import_module(name)
assert not asked, asked
if os.fork() == 0:
    torch.set_num_threads(2)
    os._exit(int((torch.ones(2000, 2000) @ torch.ones(2000)).sum() / 1e6))
assert os.waitstatus_to_exitcode(os.wait()[1]) == 4
"""  # noqa: E501


@pytest.mark.slow
def test_jobs_are_forked_before_a_gpu_or_a_thread_is_in_use(starts):
    """A process that has asked CUDA for a device, or whose threads have worked, has no working
    children.
    """
    subprocess.run(
        [sys.executable, "-c", SERVER],
        check=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    )


def needs(launcher):
    """Skip where it is not installed, or there is no cluster to ask."""
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    if launcher == "submitit_slurm" and (
        not shutil.which("sinfo") or subprocess.run(["sinfo"]).returncode
    ):
        pytest.skip("needs Slurm: .ci/slurm FOLDER starts one where slurm-wlm is installed")


def launch(runs, launcher, *arguments):
    command = [
        sys.executable,
        str(ROOT / "launch.py"),
        "-m",
        f"hydra/launcher={launcher}",
        f"runs_dir={runs}",
    ]
    return subprocess.run(
        [*command, *arguments], cwd=runs.parent, capture_output=True, text=True, timeout=400
    )


def elsewhere(runs, launcher, *arguments):
    """A sweep of three predictions by another launcher, of which the first is refused."""
    needs(launcher)
    own = [
        "scenario=predict",
        "hardware=h100",
        "target=llama-3.1-8b",
        "scenario.alpha=0.8",
        "wandb.mode=disabled",
    ]
    return launch(runs, launcher, *own, "draft.gamma=300,1,2", *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local", "submitit_slurm", "ray"])
def test_other_launchers(tmp_path, launcher):
    """A job that is refused does not hide the others, and a dry run has queued nothing."""
    runs = tmp_path / "runs"
    listed = elsewhere(runs, launcher, "sweep.dry_run=true")
    assert (listed.returncode, listed.stdout.count(" new ")) == (cli.USER_ERROR, 2)
    assert not list(tmp_path.iterdir())
    sweep = elsewhere(runs, launcher)
    assert sweep.returncode == cli.USER_ERROR, sweep.stderr
    assert {run["config"]["draft"]["gamma"]: run["status"] for run in iter_runs(runs)} == {
        1: "done",
        2: "done",
    }
    (sweep_dir,) = (runs / "sweeps").iterdir()
    assert sorted(job["id"] is None for job in jobs(sweep_dir)) == [False] * 2 + [True]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_slurm"])
def test_other_launchers_that_fail_fast(tmp_path, launcher):
    one_at_a_time = {
        "joblib": "hydra.launcher.n_jobs=1",
        "submitit_slurm": "hydra.launcher.array_parallelism=1",
    }
    sweep = elsewhere(tmp_path / "runs", launcher, one_at_a_time[launcher], "sweep.fail_fast=true")
    assert sweep.returncode == cli.USER_ERROR, sweep.stderr
    assert not list(iter_runs(tmp_path / "runs"))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "ray"])
def test_a_task_of_another_launcher_is_a_group_of_jobs_that_share_a_prefill(
    tmp_path, launcher, monkeypatch
):
    """Jobs alternate between two texts; the second job of each text takes over the prefill of the
    first.
    """
    needs(launcher)
    monkeypatch.setenv("RAY_TMPDIR", tempfile.gettempdir())  # whose sockets need a short path
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # and so locks of its own
    threads = {
        "joblib": "hydra.launcher.n_jobs=1",
        "ray": f"+hydra.launcher.ray.remote.num_cpus={usual()}",
    }
    runs = tmp_path / "runs"
    own = ["attention=sdpa", "scenario.repeats=1", "scenario.profile_repeats=1", "cache.budget=24"]
    own += [threads[launcher], "draft.gamma=1,2,3", "data.seed=1,2", "sweep.jobs_per_task=2"]
    sweep = launch(runs, launcher, *COMMON, *own)
    assert sweep.returncode == 0, sweep.stderr
    assert f"hydra/launcher={launcher}: 6 jobs in 4 tasks" in sweep.stderr
    found = list(iter_runs(runs))
    settings = {
        (run["config"]["draft"]["gamma"], run["config"]["data"]["seed"]): run for run in found
    }
    grid = [(gamma, seed) for gamma in (1, 2, 3) for seed in (1, 2)]
    assert {key: run["prefill/shared"] for key, run in settings.items()} == {
        key: key[0] == 2 for key in grid
    }
    (sweep_dir,) = (runs / "sweeps").iterdir()
    assert [job["id"] for job in jobs(sweep_dir)] == [settings[key]["id"] for key in grid]


@pytest.mark.slow
def test_optuna_goes_on_after_a_trial_that_fails(tmp_path, starts):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    runs = tmp_path / "runs"
    sweep = finished(
        start(runs, "+sweeps=optuna", "hydra.sweeper.n_trials=3", "sweep.objective=speedup")
    )
    assert sweep.code == 0, sweep.err
    found = list(iter_runs(runs))
    assert sorted(run["status"] for run in found) == [
        "done",
        "done",
        "failed",
    ], "its seed begins with gamma 7"
    (best,) = (runs / "sweeps").glob("*_optuna/optimization_results.yaml")
    assert OmegaConf.load(best).best_value == max(
        run["speedup"] for run in found if run["status"] == "done"
    )


# What needs no second process: `cli.main` with a scenario that takes a moment


@pytest.fixture
def here(quick, monkeypatch, capfd, tmp_path, hydra_logging):

    def with_arguments(*arguments, runs="runs"):
        monkeypatch.setattr(
            sys, "argv", ["launch.py", *arguments, f"runs_dir='{tmp_path / runs}'", *COMMON]
        )
        code = cli.main()
        return SimpleNamespace(code=code, **capfd.readouterr()._asdict())

    return with_arguments


@pytest.mark.parametrize("own", [_sweeper.WITHOUT_TASKS, ()], ids=["jobs", "a task"])
def test_fail_fast(here, starts, monkeypatch, own):
    monkeypatch.setattr(_sweeper, "WITHOUT_TASKS", own)
    sweep = here("-m", "hydra/launcher=basic", "sweep.fail_fast=true", "draft.gamma=6,1,2")
    assert sweep.code == 1
    assert re.findall("job (.) is not started", sweep.err) == ["1", "2"]
    assert len(list(starts.iterdir())) == 1


def order(starts):
    """The gammas of the runs, in the order in which they were begun."""
    names = sorted(
        (path.name.split("-") for path in starts.iterdir()), key=lambda parts: int(parts[2])
    )
    return [int(gamma) for gamma, *_ in names]


@pytest.mark.parametrize(("limit", "firsts"), [("null", [0, 1]), ("2", [0, 4, 1, 5])])
@pytest.mark.slow
def test_a_launcher_of_tasks_runs_the_jobs_of_a_group_in_one(
    here, starts, monkeypatch, tmp_path, limit, firsts
):
    """Each job has its number and result; one that fails is one failed run."""
    tasks, run_all = [], _groups.GroupTask.__call__

    def task(self, first):
        tasks.append(self.groups[len(tasks)][0].number)
        return run_all(self, first)

    monkeypatch.setattr(_sweeper, "WITHOUT_TASKS", ())
    monkeypatch.setattr(_groups.GroupTask, "__call__", task)
    own = ["draft.gamma=1,6,2", "data.seed=1,2", "cache.budget=8", f"sweep.jobs_per_task={limit}"]
    sweep = here("-m", "hydra/launcher=basic", *own)
    assert (sweep.code, tasks) == (1, firsts)
    assert sweep.err.count(f"hydra/launcher=basic: 6 jobs in {len(firsts)} tasks") == 1
    assert order(starts) == [1, 6, 2] * 2
    (sweep_dir,) = (tmp_path / "runs" / "sweeps").iterdir()
    stored = {run["id"]: run for run in iter_runs(tmp_path / "runs")}
    done = [stored[job["id"]] for job in jobs(sweep_dir)]
    assert [(run["config"]["draft"]["gamma"], run["config"]["data"]["seed"]) for run in done] == [
        (gamma, seed) for gamma in (1, 6, 2) for seed in (1, 2)
    ]
    assert [run["status"] for run in done] == ["done"] * 2 + ["failed"] * 2 + ["done"] * 2


@pytest.mark.parametrize("change", ["sweep.share=none", "scenario=predict", "engine=transformers"])
def test_jobs_that_share_nothing_are_tasks_of_their_own(here, starts, monkeypatch, change):
    monkeypatch.setattr(_sweeper, "WITHOUT_TASKS", ())
    sweep = here("-m", "hydra/launcher=basic", change, "draft.gamma=1,2")
    assert sweep.code == 0, sweep.err
    assert " in 1 task" not in sweep.err


def test_a_sweep_ends_with_its_table_its_page_and_its_figures(here, tmp_path, monkeypatch):
    keys = ("sweep.name=mine", "sweep.figures=true", "draft.gamma=1,6")
    sweep = here("-m", "hydra/launcher=basic", *keys, runs="my runs")
    (folder,) = (tmp_path / "my runs" / "sweeps").glob("*_mine")
    assert sweep.code == 1
    assert "2 runs: 1 done, 1 failed\n" in sweep.out
    for name in ("report.html", "speedup.png"):
        assert f"written           {folder / name}\n" in sweep.out
        assert (folder / name).stat().st_size > 1000
    command = shlex.split(re.search(r"magicdec report (.*)", sweep.out)[1])
    assert report.main(command) == 0
    monkeypatch.setattr(Path, "write_bytes", refuse)
    sweep = here("-m", "hydra/launcher=basic", "draft.gamma=1")
    assert (sweep.code, sweep.out.count("not written       ")) == (0, 1)


@pytest.mark.parametrize("launcher", ["basic", "magicdec"])
@pytest.mark.slow
def test_a_sweep_tells_of_jobs_that_were_no_runs(here, starts, tmp_path, launcher):
    if launcher == "basic":
        sweep = here("-m", "hydra/launcher=basic", "scenario=predict", "draft.gamma=1,1000")
    else:  # not in this process, whose fork server may have the stderr of an earlier test
        sweep = finished(start(tmp_path / "runs", "draft.gamma=1,1000"))
    assert sweep.code == cli.USER_ERROR
    assert sweep.err.count("draft.gamma=1000: must be below") == 1
    assert "1 job ended before there was a run: see the errors above\n" in sweep.out
    assert "1 run: 1 done\n" in sweep.out
    sweep = here("-m", "hydra/launcher=basic", "scenario=predict", "draft.gamma=1,2")
    assert (sweep.code, sweep.err.count("done already")) == (0, 1), "with whichever launcher"
    assert sorted(run["attempt"] for run in iter_runs(tmp_path / "runs")) == [1, 1]


def test_a_sweep_that_cannot_write_says_so(here, tmp_path):
    (tmp_path / "runs").write_text("a file, where a folder should be")
    sweep = here("-m", "hydra/launcher=basic", "draft.gamma=1,2")
    assert sweep.code == cli.USER_ERROR
    (line,) = [line for line in sweep.err.splitlines() if line.startswith("error: ")]
    assert f"runs_dir={tmp_path / 'runs'}: cannot write {tmp_path / 'runs'}" in line
    assert line.endswith("choose a folder with runs_dir=FOLDER")
    assert "Traceback" not in sweep.err


def refuse(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_dry_run_lists_and_leaves_nothing(here, tmp_path, starts):
    assert here("-m", "hydra/launcher=basic", "draft.gamma=1,6").code == 1
    before = sorted((tmp_path / "runs").rglob("*"))
    sweep = here("-m", "sweep.dry_run=true", "draft.gamma=1,2,6")
    assert sweep.code == 0
    lines = [line.split() for line in sweep.out.splitlines() if " GiB " in line]
    assert [line[1:4] for line in lines] == [
        [state, "3.00", "GiB"] for state in ("done", "new", "crashed")
    ]
    assert [" ".join(line[4:6]) for line in lines] == ["0 s", "2 min", "2 min"]
    assert "about 3 min in all" in sweep.out
    assert (
        here("-m", "hydra/launcher=basic", "sweep.dry_run=true", "draft.gamma=1,1000").code
        == cli.USER_ERROR
    )
    assert sorted((tmp_path / "runs").rglob("*")) == before
    assert len(list(starts.iterdir())) == 2


def test_a_single_run_that_another_process_is_running_is_refused(here, tmp_path):
    assert here().code == 0
    (path,) = (tmp_path / "runs").glob("*/result.json")
    with locked(path.parent):
        refused = here()
    assert refused.code == cli.USER_ERROR
    assert f"error: run {path.parent.name} is being run by process {os.getpid()}" in refused.err


def test_a_sweep_skips_what_the_same_code_has_done(here, starts, tmp_path, monkeypatch):
    sweep = ["-m", "hydra/launcher=basic", "draft.gamma=1"]
    assert here(*sweep).code == 0
    assert ": done already, skipped (resume=false" in here(*sweep).err
    assert " done " in here(*sweep, "sweep.dry_run=true").out
    monkeypatch.setattr("magicdec.tracking.store.PACKAGE_HASH", "edited")
    assert ": done already with other source, skipped" in here(*sweep, "resume=any_version").err
    assert " other version " in here(*sweep, "sweep.dry_run=true").out
    assert len(list(starts.iterdir())) == 1
    after = here(*sweep, "sweep.name=after")
    assert "done already" not in after.err
    assert len(list(starts.iterdir())) == 2
    first, second = iter_runs(tmp_path / "runs")
    assert second["id"] == f"{first['id']}-2"
    assert first["source"] != second["source"] == "edited"
    members = [
        {line["id"] for line in jobs(path)}
        for path in sorted((tmp_path / "runs" / "sweeps").iterdir())
    ]
    assert members == [{first["id"]}] * 3 + [{second["id"]}], (
        "each sweep keeps the attempts that it has shown"
    )


# The process launcher's queue, with processes that only wait


class Queue(ProcessLauncher):
    def __init__(self, fates, sweep, limit=None):
        super().__init__(limit)
        self.fates, self.seen, self.most = fates, [], 0
        settings = {
            "fail_fast": False,
            "dry_run": False,
            "objective": "speedup",
            "share": "prefill",
        } | sweep
        places = {"runs_dir": "", "hydra": {"sweep": {"dir": ""}}, "engine": {"name": "native"}}
        self.config = OmegaConf.create(
            {"sweep": settings, "scenario": {"name": "predict"}, **places}
        )
        self.processes = []

    def _begin(self, worker, job):
        self.seen.append(job.number)
        self.processes.append(worker.process.pid)
        self.most = max(
            self.most, sum(child.is_alive() for child in multiprocessing.active_children())
        )
        worker.begin(job, *self.fates.pop(0))


@pytest.fixture
def waiting_processes(monkeypatch):
    """The jobs of a Queue only wait: a fate is the seconds and the exit code, or the signal that
    ends the process.
    """

    def work(pipe):
        with contextlib.suppress(EOFError):
            while True:
                seconds, code = pipe.recv()
                time.sleep(seconds)
                if code < 0:
                    os.kill(os.getpid(), -code)
                pipe.send(code)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(
        "hydra_plugins.magicdec._launcher._started", lambda _, pipe: started(work, pipe)
    )
    # A forked process holds both ends of its pipe, so that it does not notice when the launcher
    # closes its own.
    monkeypatch.setattr("hydra_plugins.magicdec._launcher.GRACE_S", 0.2)


def test_as_many_jobs_at_once_as_visible_gpus(waiting_processes, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5,7")
    queue = Queue([(0.3, 0)] * 5, {})
    results = queue.launch([["{}"]] * 5, 10)
    assert queue.seen == [10, 11, 12, 13, 14]
    assert queue.most == 3
    assert len(set(queue.processes)) == 3, "one group, of which each takes a part"
    assert [result.return_value for result in results] == [None] * 5


def test_jobs_of_a_group_follow_one_another_in_one_process(waiting_processes, capfd):
    grid = itertools.product("ab", (1, 2), (1, 2))
    jobs = [
        [f"batch.size={rows}", f"cache={policy}", f"draft.gamma={gamma}"]
        for policy, rows, gamma in grid
    ]
    queue = Queue([(0, 0)] * 8, {})
    assert len(queue.launch(jobs, 0)) == 8
    assert queue.seen == [0, 1, 4, 5, 2, 3, 6, 7]
    assert queue.processes == [queue.processes[0]] * 4 + [queue.processes[4]] * 4
    queue = Queue([(0, 0)] * 3, {"share": "none"})
    queue.launch(jobs[:3], 0)
    assert (queue.seen, len(set(queue.processes))) == ([0, 1, 2], 3)
    queue = Queue([(0, 0), (0, 1), (0, -signal.SIGKILL), (0, 0)], {})
    results = queue.launch([["cache=a"]] * 4, 0)
    first, second, third, last = queue.processes
    assert first == second, "a process goes on after a job that is done"
    assert len({second, third, last}) == 3, (
        "and is replaced after one that failed, or that was killed"
    )
    done, failed = JobStatus.COMPLETED, JobStatus.FAILED
    assert [result.status for result in results] == [done, failed, failed, done]
    assert "job 2 (cache=a): killed by SIGKILL" in capfd.readouterr().err


def test_a_queue_without_gpus_that_fails_fast(waiting_processes, capsys):
    queue = Queue([(0, 0), (0, 1), (0, 0)], {"fail_fast": True})
    results = queue.launch([["{}"]] * 4, 0)
    assert queue.seen == [0, 1]
    assert [result.status for result in results] == [JobStatus.COMPLETED, JobStatus.FAILED]
    assert "2 jobs are not started" in capsys.readouterr().err


def test_a_run_that_another_sweep_is_running_is_left_to_the_end(waiting_processes, monkeypatch):
    monkeypatch.setattr("hydra_plugins.magicdec._launcher.RETRY_S", 0.1)
    queue = Queue([(0, BUSY), (0, 0), (0, 0)], {})
    results = queue.launch([["{}"]] * 2, 0)
    assert queue.seen == [0, 1, 0]
    assert len(results) == 2
