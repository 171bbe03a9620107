"""Jobs that share the GPUs of a machine, each in a process of its own."""

import json
import multiprocessing
import os
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest

from magicdec.tracking import gpus

MACHINE = "3,GPU-5,7"


def wants(tensor_parallel=1, device="auto", scenario="compare"):
    hardware = SimpleNamespace(tensor_parallel=tensor_parallel, device=device)
    return SimpleNamespace(hardware=hardware, scenario=SimpleNamespace(name=scenario))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Start a job that keeps its GPUs for a while; it leaves a file that says which, from when and till when."""
    monkeypatch.setattr(gpus, "LOCKS", tmp_path / "locks")
    monkeypatch.setattr(gpus, "POLL_S", 0.01)
    monkeypatch.setenv(gpus.VISIBLE, MACHINE)

    def work(number, config, seconds):
        with gpus.gpus_of_its_own(config):
            begin = time.monotonic()
            (tmp_path / f"{number}.began").touch()
            time.sleep(seconds)
            facts = {"gpus": os.environ[gpus.VISIBLE].split(","), "begin": begin, "end": time.monotonic()}
            (tmp_path / f"{number}.json").write_text(json.dumps(facts))

    def start(number, config, seconds=0.2):
        process = multiprocessing.get_context("fork").Process(target=work, args=(number, config, seconds))
        process.start()
        return process

    return SimpleNamespace(
        start=start,
        began=lambda number: (tmp_path / f"{number}.began").exists(),
        used=lambda number: json.loads((tmp_path / f"{number}.json").read_text()),
    )


def test_none_shares_a_gpu_and_each_has_what_it_wants(machine):
    wanted = [1, 2, 1, 3, 1, 1, 8, 2]
    processes = [machine.start(number, wants(count)) for number, count in enumerate(wanted)]
    for process in processes:
        process.join(20)
    used = [machine.used(number) for number in range(len(wanted))]
    assert [len(job["gpus"]) for job in used] == [1, 2, 1, 3, 1, 1, 3, 2]
    for i, one in enumerate(used):
        for other in used[:i]:
            apart = one["end"] <= other["begin"] or other["end"] <= one["begin"]
            assert apart or not set(one["gpus"]) & set(other["gpus"])
    assert {gpu for job in used for gpu in job["gpus"]} == set(MACHINE.split(","))
    assert max(job["end"] for job in used) - min(job["begin"] for job in used) < 0.2 * 8, "some at once"


def test_a_run_on_the_cpu_has_the_machine_to_itself_and_a_prediction_asks_for_nothing(machine):
    holder = machine.start(0, wants(device="cpu"), seconds=0.6)
    while not machine.began(0):
        time.sleep(0.01)
    prediction, run = machine.start(1, wants(8, scenario="predict"), seconds=0), machine.start(2, wants())
    for process in (holder, prediction, run):
        process.join(20)
    assert machine.used(0)["gpus"] == machine.used(1)["gpus"] == MACHINE.split(",")
    assert machine.used(1)["end"] < machine.used(0)["end"] <= machine.used(2)["begin"]


def test_the_gpus_of_a_killed_job_are_free_and_who_waits_says_so(machine, monkeypatch, capfd):
    monkeypatch.setattr(gpus, "SILENT_S", 0.05)
    holder = machine.start(0, wants(3), seconds=60)
    while not machine.began(0):
        time.sleep(0.01)
    waiting = machine.start(1, wants(2), seconds=0)
    time.sleep(0.3)
    assert not machine.began(1)
    os.kill(holder.pid, signal.SIGKILL)
    waiting.join(20)
    assert len(machine.used(1)["gpus"]) == 2
    assert capfd.readouterr().err.splitlines() == ["waiting for 2 of 3 GPUs"]


LISTED = """GPU 0: NVIDIA H200 (UUID: GPU-4ce)
GPU 1: NVIDIA H200 (UUID: GPU-b01)
"""


def test_gpus_are_known_by_what_does_not_depend_on_who_asks(monkeypatch):
    """In a container or under Slurm, two processes may each call another GPU number 0."""
    monkeypatch.setattr(gpus.shutil, "which", lambda name: name)
    monkeypatch.setattr(gpus.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, LISTED))
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    assert gpus.visible_gpus() == {"0": "GPU-4ce", "1": "GPU-b01"}
    monkeypatch.setenv(gpus.VISIBLE, "1, GPU-4ce")
    assert gpus.visible_gpus() == {"1": "GPU-b01", "GPU-4ce": "GPU-4ce"}
    monkeypatch.setenv(gpus.VISIBLE, "-1")
    assert gpus.visible_gpus() == {}
