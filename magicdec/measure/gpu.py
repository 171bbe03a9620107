"""Detect whether heat or a power limit slowed a GPU down during a run, and whether other processes shared it.

Ask the driver through NVML (the extra `monitor`). Record nothing without it, or on a CPU.
"""

import logging
import time
from typing import Any

import torch

from magicdec.measure.metrics import Metrics

log = logging.getLogger(__name__)

SLOWED_BY = {"thermal": "NVML_PERF_POLICY_THERMAL", "power": "NVML_PERF_POLICY_POWER"}


class Watch:
    """Observation of a GPU, from its creation on. The driver counts the time in which a GPU is slowed down: nothing is
    polled.
    """

    def __init__(self, device: torch.device):
        self._nvml: Any = None
        if device.type == "cuda" and (known := _nvml(device)):
            self._nvml, self._handle = known
        self._start = time.perf_counter()
        self._before: dict[str, float] = {}
        self._shared = 0
        if self._nvml is not None:
            self._before, self._shared = self._slowed_s(), self._others()

    def metrics(self) -> Metrics:
        """Return `gpu/throttled/thermal` and `/power`, shares of the time, and `gpu/shared`, other processes on the
        GPU.
        """
        if self._nvml is None:
            return {}
        elapsed, after = time.perf_counter() - self._start, self._slowed_s()
        shares: Metrics = {f"gpu/throttled/{why}": (after[why] - self._before[why]) / elapsed for why in self._before}
        return shares | {"gpu/shared": max(self._shared, self._others())}

    def _slowed_s(self) -> dict[str, float]:
        """Return the seconds of slow-down since the driver was loaded, by reason, without reasons that this GPU does
        not count.
        """
        found = {}
        for why, policy in SLOWED_BY.items():
            try:
                status = self._nvml.nvmlDeviceGetViolationStatus(self._handle, getattr(self._nvml, policy))
                found[why] = status.violationTime / 1e9
            except self._nvml.NVMLError as error:
                log.info("slow-downs by %s are not known: %s", why, error)
        return found

    def _others(self) -> int:
        """Return the number of other computing processes. A container may see this process under another number, or not
        at all.
        """
        try:
            return max(0, len(self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)) - 1)
        except self._nvml.NVMLError as error:
            log.info("other processes on the GPU are not known: %s", error)
            return 0


def _nvml(device: torch.device) -> tuple[Any, Any] | None:
    """Return NVML and its handle of a GPU, or None if it does not know the GPU (such as a MIG slice)."""
    try:
        import pynvml
    except ImportError:
        log.info("whether the GPU throttles is not known: pip install 'magicdec[monitor]'")
        return None
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError as error:
        log.info("whether the GPU throttles is not known: %s", error)
        return None
