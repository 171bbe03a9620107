"""The machine's load during a run."""

import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from magicdec.measure import system

PERIOD_S = 0.05


def rows_of(seconds, at_least=0):
    """Sample for so long or, on a machine that is busy with other work, until there are rows
    enough.
    """
    with system.sampled(period_s=PERIOD_S) as rows:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or (
            len(rows) < at_least and time.perf_counter() < end + 60
        ):
            pass
    return rows


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_busy_machine_with_memory_taken():
    rows = rows_of(0.5, at_least=3)
    assert 2 < len(rows) <= rows[-1]["system/seconds"] / PERIOD_S
    assert sorted(row["system/seconds"] for row in rows) == [row["system/seconds"] for row in rows]
    assert 0 < sum(row.get("system/cpu", 0) for row in rows) <= len(rows)
    assert all(row["system/memory_gib"] > 0.05 for row in rows)
    before = len(rows)
    time.sleep(0.1)
    assert len(rows) == before, "nothing is sampled any more"


def test_a_clock_that_ends_waits_at_once_gives_no_more_rows(monkeypatch):
    wait = threading.Event.wait
    monkeypatch.setattr(threading.Event, "wait", lambda event, end=None: wait(event, end and 0))
    rows = rows_of(0.5, at_least=3)
    assert 2 < len(rows) <= rows[-1]["system/seconds"] / PERIOD_S


def test_a_short_run_has_none():
    with system.sampled() as rows:
        pass
    assert rows == []


def test_gpus_and_one_that_refuses(monkeypatch):
    def power(handle):
        if handle == 1:
            raise RuntimeError("Not Supported")
        return 350_000

    nvml = SimpleNamespace(NVML_TEMPERATURE_GPU=0, nvmlInit=lambda: None)
    answers = {
        "Count": 2,
        "UtilizationRates": SimpleNamespace(gpu=50),
        "MemoryInfo": SimpleNamespace(used=3 << 30),
    }
    for name, answer in (answers | {"Temperature": 60}).items():
        setattr(nvml, f"nvmlDeviceGet{name}", lambda *_, answer=answer: answer)
    nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetPowerUsage = lambda index: index, power
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    row = rows_of(0.2)[0]
    expected = {"busy": 0.5, "memory_gib": 3.0, "power_w": 350.0, "temperature_c": 60.0}
    assert {key: value for key, value in row.items() if "gpu" in key} == {
        f"system/gpu.0.{name}": value for name, value in expected.items()
    }


@pytest.mark.parametrize(
    ("instructions", "end"), [("AVX2", " with AVX2"), ("AVX512", " with AVX512"), ("NO AVX", "")]
)
def test_processors_of_one_name_are_told_apart_by_their_instructions(
    monkeypatch, instructions, end
):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    name = system.cpu_name().removesuffix(end)
    assert name
    assert system.cpu_name() == f"{name}{end}"
    assert "AVX" not in name


@pytest.mark.parametrize(("num_ranks", "found"), [(1, "other programs took 50%"), (2, None)])
def test_ranks_are_not_other_programs(monkeypatch, num_ranks, found):
    """Two ranks keep two processors busy; each sees its own time alone."""
    times = iter([(0, 0), (1000, 0)])
    own = iter([0.0, 500.0])
    monkeypatch.setattr(system, "_processor_times", lambda: next(times))
    monkeypatch.setattr(system, "_own_ticks", lambda: next(own))
    description = system.Interference(torch.device("cpu"), num_ranks).description()
    assert description == (found and f"{found} of the processors")
