"""Jobs that share the GPUs of a machine, each in a process of its own."""

import itertools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from magicdec import threads
from magicdec.errors import UserError
from magicdec.tracking import gpus
from tests.programs import python

MACHINE = "3,GPU-5,7"


def wants(tensor_parallel=1, device="auto", scenario="compare"):
    hardware = SimpleNamespace(tensor_parallel=tensor_parallel, device=device)
    return SimpleNamespace(
        hardware=hardware, scenario=SimpleNamespace(predicts=scenario in ("predict", "plan"))
    )


FORK = multiprocessing.get_context("fork")


class SweepJob:
    """A job in a process of its own: `begun` is set once it has its GPUs, which it keeps until
    `end` is set.
    """

    def __init__(self, path, config, own_process=True):
        self.path, self.begun, self.end = path, FORK.Event(), FORK.Event()
        self.process = FORK.Process(target=self._work, args=(config, own_process))
        self.process.start()

    def _work(self, config, own_process):
        with gpus.gpus_of_its_own(config, own_process):
            facts = {"gpus": os.environ[gpus.VISIBLE].split(","), "begin": time.monotonic()}
            self.begun.set()
            self.end.wait(60)
            self.path.write_text(json.dumps(facts | {"end": time.monotonic()}))

    def finish(self):
        """Let it end. Return its GPUs, and when it had them."""
        self.end.set()
        self.process.join(20)
        return json.loads(self.path.read_text())


def test_tests_wait_for_no_sweep_of_a_user_or_of_each_other():
    """Their locks, and those of the programs they start, are not in the system's folder."""
    done = python("-c", "from magicdec.tracking import gpus; print(gpus.locks())")
    assert done.stdout.strip() == str(gpus.locks())
    assert gpus.locks().parent == Path(tempfile.gettempdir())
    assert str(gpus.locks().parent) != os.environ["PYTEST_DEBUG_TEMPROOT"]


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start a job on a machine of three GPUs."""
    monkeypatch.setattr(gpus, "locks", lambda: tmp_path / "locks")
    monkeypatch.setattr(gpus, "POLL_S", 0.01)
    monkeypatch.setenv(gpus.VISIBLE, MACHINE)
    paths = (tmp_path / f"{number}.json" for number in itertools.count())
    return lambda config, own_process=True: SweepJob(next(paths), config, own_process)


def test_none_shares_a_gpu_and_each_has_what_it_wants(start):
    wanted = [1, 2, 1, 3, 1, 1, 8, 2]
    jobs = [start(wants(count)) for count in wanted]
    for job in jobs:
        job.end.set()
    used = [job.finish() for job in jobs]
    assert [len(job["gpus"]) for job in used] == [1, 2, 1, 3, 1, 1, 3, 2]
    for one, other in itertools.combinations(used, 2):
        apart = one["end"] <= other["begin"] or other["end"] <= one["begin"]
        assert apart or not set(one["gpus"]) & set(other["gpus"])
    assert {gpu for job in used for gpu in job["gpus"]} == set(MACHINE.split(","))


def test_as_many_jobs_at_once_as_gpus(start):
    jobs = [start(wants()) for _ in range(3)]
    assert all(job.begun.wait(20) for job in jobs)
    fourth = start(wants())
    assert not fourth.begun.wait(0.1)
    (freed,) = jobs[1].finish()["gpus"]
    assert fourth.begun.wait(20)
    assert fourth.finish()["gpus"] == [freed]
    assert {*jobs[0].finish()["gpus"], freed, *jobs[2].finish()["gpus"]} == set(MACHINE.split(","))


def test_a_run_on_the_cpu_has_the_machine_to_itself_and_a_prediction_asks_for_nothing(start):
    holder = start(wants(device="cpu"))
    assert holder.begun.wait(20)
    prediction, run = start(wants(8, scenario="predict")), start(wants())
    assert prediction.finish()["gpus"] == MACHINE.split(","), "while the other holds them"
    assert not run.begun.wait(0.1)
    held = holder.finish()
    assert held["gpus"] == MACHINE.split(",")
    assert held["end"] <= run.finish()["begin"]


def test_the_gpus_of_a_killed_job_are_free_and_who_waits_says_so(start, monkeypatch, capfd):
    monkeypatch.setattr(gpus, "SILENT_S", 0.05)
    holder = start(wants(3))
    assert holder.begun.wait(20)
    waiting = start(wants(2))
    assert not waiting.begun.wait(0.3)
    os.kill(holder.process.pid, signal.SIGKILL)
    assert len(waiting.finish()["gpus"]) == 2
    assert capfd.readouterr().err.splitlines() == ["waiting for 2 of 3 GPUs"]


@pytest.mark.parametrize("own_process", [True, False])
def test_a_machine_without_gpus_is_one_jobs(start, monkeypatch, capfd, own_process):
    """With any launcher: jobs of a pool of workers share no machine either."""
    monkeypatch.setattr(gpus, "SILENT_S", 0.05)
    monkeypatch.setenv(gpus.VISIBLE, "")
    holder = start(wants(), own_process)
    assert holder.begun.wait(20)
    prediction, run = start(wants(scenario="plan"), own_process), start(wants(2), own_process)
    assert prediction.finish()["end"], "while the other holds it"
    assert not run.begun.wait(0.2)
    assert holder.finish()["end"] <= run.finish()["begin"]
    assert capfd.readouterr().err.splitlines() == ["waiting for the machine, which another job has"]


def test_workers_of_another_launcher_share_the_gpus_that_they_see(start):
    jobs = [start(wants(), own_process=False) for _ in range(2)]
    assert all(job.begun.wait(20) for job in jobs)
    assert [job.finish()["gpus"] for job in jobs] == [MACHINE.split(",")] * 2


RAY = {"ray": {"remote": {}}}


@pytest.mark.parametrize(
    ("launcher", "settings", "visible", "wanted", "remedy"),
    [
        ("ray", RAY, "", wants(), "add +hydra.launcher.ray.remote.num_cpus=4"),
        ("ray", {"ray": {"remote": {"num_cpus": 3}}}, "0", wants(device="cpu"), "num_cpus=4"),
        ("ray", {"ray": {"remote": {"num_cpus": 4}}}, "", wants(), None),
        ("ray", RAY, "0", wants(), None),
        ("ray", RAY, "", wants(scenario="predict"), None),
        ("joblib", {"n_jobs": -1}, "", wants(), "set hydra.launcher.n_jobs=1"),
        ("joblib", {"n_jobs": 1}, "", wants(), None),
        ("process", {"jobs": None}, "", wants(), None),
    ],
)
def test_a_launcher_that_gives_a_job_some_of_the_threads_is_refused(
    monkeypatch, launcher, settings, visible, wanted, remedy
):
    monkeypatch.setattr(threads, "usual", lambda: 4)
    monkeypatch.setenv(gpus.VISIBLE, visible)
    said = (
        rf"^hydra/launcher={launcher}: gives each job some of the 4 threads;"
        rf" .*{re.escape(remedy or '')}$"
    )
    with pytest.raises(UserError, match=said) if remedy else nullcontext():
        gpus.refuse_a_share(wanted, launcher, settings)


def test_gpus_are_known_by_what_does_not_depend_on_who_asks(monkeypatch):
    """In a container or under Slurm, two processes may each call another GPU number 0."""
    listed = "GPU 0: NVIDIA H200 (UUID: GPU-4ce)\nGPU 1: NVIDIA H200 (UUID: GPU-b01)\n"
    monkeypatch.setattr(gpus.shutil, "which", lambda name: name)
    monkeypatch.setattr(
        gpus.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, listed)
    )
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    assert gpus.visible_gpus() == {"0": "GPU-4ce", "1": "GPU-b01"}
    monkeypatch.setenv(gpus.VISIBLE, "1, GPU-4ce")
    assert gpus.visible_gpus() == {"1": "GPU-b01", "GPU-4ce": "GPU-4ce"}
    monkeypatch.setenv(gpus.VISIBLE, "-1")
    assert gpus.visible_gpus() == {}
