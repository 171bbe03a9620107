"""A GPU that is slowed down or shared, with a stand-in for NVML: what is asked of it is what its
documentation says.
"""

import sys
from types import SimpleNamespace

import pytest
import torch

from magicdec.measure import system
from magicdec.measure.trust import gpu_trouble


class Refused(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch):
    library = SimpleNamespace(
        NVMLError=Refused, NVML_PERF_POLICY_THERMAL=1, NVML_PERF_POLICY_POWER=0
    )
    library.slowed, library.processes = {0: 5e9, 1: 7e9}, ["this"]
    library.nvmlInit, library.nvmlDeviceGetHandleByUUID = lambda: None, lambda uuid: uuid
    library.nvmlDeviceGetViolationStatus = lambda handle, why: SimpleNamespace(
        violationTime=library.slowed[why]
    )
    library.nvmlDeviceGetComputeRunningProcesses = lambda handle: library.processes
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34")
    )
    return library


def test_what_happened_while_it_was_watched(nvml, monkeypatch):
    now = iter((100.0, 110.0))
    monkeypatch.setattr(system.time, "perf_counter", lambda: next(now))
    watch = system.Watch(torch.device("cuda"))
    nvml.slowed[0] += 2e9
    nvml.processes = ["this", "another"]
    metrics = watch.metrics()
    assert metrics == {"gpu/throttled/thermal": 0.0, "gpu/throttled/power": 0.2, "gpu/shared": 1}
    assert gpu_trouble(metrics) == [
        "throttled (power) for 20% of the time",
        "shared with 1 other process",
    ]


def test_an_undisturbed_gpu_is_no_trouble(nvml):
    assert gpu_trouble(system.Watch(torch.device("cuda")).metrics()) == []


@pytest.mark.parametrize(
    ("refused", "told"),
    [(["ViolationStatus", "ComputeRunningProcesses"], {"gpu/shared": 0}), (["HandleByUUID"], {})],
)
def test_what_the_driver_does_not_tell_is_left_out(nvml, refused, told):
    """A GPU that it does not know is not watched."""

    def refuse(*_):
        raise Refused("Not Supported")

    for name in refused:
        setattr(nvml, f"nvmlDeviceGet{name}", refuse)
    assert system.Watch(torch.device("cuda")).metrics() == told


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_is_known_on_a_cpu_and_without_the_library(monkeypatch, device):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert system.Watch(torch.device(device)).metrics() == {}


@pytest.mark.gpu
def test_a_real_gpu():
    pytest.importorskip("pynvml")
    metrics = system.Watch(torch.device("cuda")).metrics()
    assert "gpu/shared" in metrics
    shares = [share for name, share in metrics.items() if name.startswith("gpu/throttled/")]
    assert all(0 <= share <= 1 for share in shares)
