"""Describe the machine, sample its load during a run, and detect what has slowed a GPU down.

Reads processors and memory from Linux's /proc, and GPUs through NVML (the extra `monitor`). Leaves
out what is unknown. A run shorter than a period has no samples.
"""

import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from magicdec.measure.memory_use import proc_bytes
from magicdec.measure.trust import TOOK
from magicdec.units import GIB

PERIOD_S = 5.0
DISTURBED = 0.1  # share of all processors' time that other programs take while a repeat is measured
FEWEST_TICKS = 100  # of all processors together: in less time, /proc/stat is too coarse to say
DRIVER = Path("/proc/driver/nvidia/version")
SLOWED_BY = {"thermal": "NVML_PERF_POLICY_THERMAL", "power": "NVML_PERF_POLICY_POWER"}
Row = dict[str, float]
log = logging.getLogger(__name__)


@contextmanager
def sampled(period_s: float = PERIOD_S) -> Iterator[list[Row]]:
    """Yield the list of samples, which grows while the block runs; `system/seconds` counts from its
    beginning.
    """
    rows: list[Row] = []
    over, start = threading.Event(), time.perf_counter()
    sources = [_processors(), _memory, *_gpus()]

    def sample() -> None:
        while not over.wait(period_s):
            row = {"system/seconds": time.perf_counter() - start}
            if row["system/seconds"] < (len(rows) + 1) * period_s:
                continue  # waits end at once where the clock is wrong
            for source in sources:
                with suppress(Exception):  # of the system's, or of the driver's library
                    row |= source()
            rows.append(row)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield rows
    finally:
        over.set()
        thread.join()


def driver_version() -> str:
    """Return the version of NVIDIA's driver; an empty text where none is loaded."""
    first = DRIVER.read_text().split("\n")[0] if DRIVER.exists() else ""
    return next((word for word in first.split() if word[0].isdigit()), "")


class Interference:
    """The other work of a machine, from the creation of this object on: what a repeat is judged by.

    It is judged without a look at the repeat's own times: leaving out what was slow would make the
    rest look better.
    """

    def __init__(self, device: torch.device, num_ranks: int = 1):
        """Begin to observe, in one of `num_ranks` processes that do the same work."""
        self._num_ranks = num_ranks
        self._before, self._own = _processor_times(), _own_ticks()
        self._gpu = Watch(device)

    def description(self) -> str | None:
        """Return what has disturbed the work so far, in words; None if nothing is known."""
        now = _processor_times()
        ours = self._num_ranks * (_own_ticks() - self._own)
        total = now[0] - self._before[0]
        idle = now[1] - self._before[1]
        others = (total - idle - ours) / total if total >= FEWEST_TICKS else 0.0
        if others > DISTURBED:
            return TOOK.format(f"{others:.0%}")
        return "other programs used the GPU" if self._gpu.metrics().get("gpu/shared") else None


def _own_ticks() -> float:
    """Return the processor time of this process, in the ticks of /proc/stat."""
    if not hasattr(os, "sysconf"):
        return 0.0
    return time.process_time() * os.sysconf("SC_CLK_TCK")


def _processors() -> Callable[[], Row]:
    """Return a source of `system/cpu`: the share of all processors' time that was not idle, since
    the last sample.
    """
    before = _processor_times()

    def busy() -> Row:
        nonlocal before
        now = _processor_times()
        total = now[0] - before[0]
        idle = now[1] - before[1]
        before = now
        return {"system/cpu": 1 - idle / total} if total else {}

    return busy


def _processor_times() -> tuple[int, int]:
    """Return the time passed and the part that was idle or waiting for a disk, in ticks; zeros
    without /proc.
    """
    try:
        with open("/proc/stat") as lines:
            times = [int(part) for part in lines.readline().split()[1:9]]
    except OSError:
        return 0, 0
    return sum(times), times[3] + times[4]


def _memory() -> Row:
    """Return `system/memory_gib`: the memory of all processes, without what can be reclaimed."""
    total = proc_bytes("meminfo", "MemTotal")
    available = proc_bytes("meminfo", "MemAvailable")
    return {"system/memory_gib": (total - available) / GIB} if total else {}


def _gpus() -> list[Callable[[], Row]]:
    """Return a source for each GPU of the machine."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
    except Exception:  # no library, no driver, no right to ask
        return []
    return [partial(_gpu, pynvml, index, handle) for index, handle in enumerate(handles)]


def _gpu(nvml: Any, index: int, handle: Any) -> Row:
    prefix = f"system/gpu.{index}"
    return {
        f"{prefix}.busy": nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        f"{prefix}.memory_gib": nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB,
        f"{prefix}.power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        f"{prefix}.temperature_c": float(
            nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        ),
    }


class Watch:
    """Observation of a GPU, from its creation on. The driver counts the time in which a GPU is
    slowed down: nothing is polled.
    """

    def __init__(self, device: torch.device):
        self._nvml: Any = None
        if device.type == "cuda" and (opened := _nvml(device)):
            self._nvml, self._handle = opened
        self._start = time.perf_counter()
        self._before: dict[str, float] = {}
        self._shared = 0
        if self._nvml is not None:
            self._before = self._slowed_s()
            self._shared = self._others()

    def metrics(self) -> Row:
        """Return `gpu/throttled/thermal` and `/power`, shares of the time, and `gpu/shared`, other
        processes on the GPU.
        """
        if self._nvml is None:
            return {}
        elapsed = time.perf_counter() - self._start
        after = self._slowed_s()
        shares: Row = {
            f"gpu/throttled/{why}": (after[why] - self._before[why]) / elapsed
            for why in self._before
        }
        return shares | {"gpu/shared": max(self._shared, self._others())}

    def _slowed_s(self) -> dict[str, float]:
        """Return the seconds of slow-down since the driver was loaded, by reason, without reasons
        that this GPU does not count.
        """
        seconds = {}
        for why, policy in SLOWED_BY.items():
            try:
                status = self._nvml.nvmlDeviceGetViolationStatus(
                    self._handle, getattr(self._nvml, policy)
                )
                seconds[why] = status.violationTime / 1e9
            except self._nvml.NVMLError as error:
                log.info("slow-downs by %s are not known: %s", why, error)
        return seconds

    def _others(self) -> int:
        """Return the number of other computing processes. A container may see this process under
        another number, or not at all.
        """
        try:
            return max(0, len(self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)) - 1)
        except self._nvml.NVMLError as error:
            log.info("other processes on the GPU are not known: %s", error)
            return 0


def _nvml(device: torch.device) -> tuple[Any, Any] | None:
    """Return NVML and its handle of a GPU, or None if it does not know the GPU (such as a MIG
    slice).
    """
    try:
        import pynvml
    except ImportError:
        log.info("whether the GPU throttles is not known: pip install 'magicdec[monitor]'")
        return None
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(
            f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        )
    except pynvml.NVMLError as error:
        log.info("whether the GPU throttles is not known: %s", error)
        return None


def cpu_name() -> str:
    """Return the processor's name and the widest instructions that PyTorch's kernels use, by which
    machines of one name differ.
    """
    instructions = torch.backends.cpu.get_cpu_capability()
    return (
        f"{_model_name()} with {instructions}" if instructions.startswith("AVX") else _model_name()
    )


def _model_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
