"""The process that forks the jobs of a sweep: its death loses no job, and it uses no GPU."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hydra_plugins.magicdec._launcher import SweepJob, lost_code
from magicdec.tracking.reader import iter_runs
from magicdec.tracking.store import Run
from magicdec.tracking.sweep import BUSY, record
from tests.programs import ROOT
from tests.sweeps.grid import finished, start
from tests.tracking.sample import CONFIG, finished_run, result_of


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
