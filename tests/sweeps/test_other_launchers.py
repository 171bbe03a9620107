"""Sweeps by launchers and sweepers that are not ours."""

import shutil
import subprocess
import sys
import tempfile

import pytest
from omegaconf import OmegaConf

from magicdec import cli
from magicdec.threads import usual
from magicdec.tracking.reader import iter_runs
from magicdec.tracking.sweep import jobs
from tests.programs import ROOT
from tests.sweeps.grid import COMMON, finished, start

SUBMITIT = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("submitit_local", "submitit_slurm")
]
# Ray's own servers take minutes. A sweep that fails fast shows joblib, too.
SOAKS = [pytest.param(name, marks=pytest.mark.soak) for name in ("joblib", "ray")]


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


@pytest.mark.parametrize("launcher", [*SUBMITIT, *SOAKS])
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


@pytest.mark.parametrize("launcher", SOAKS)
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
