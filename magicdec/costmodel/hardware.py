"""Machines as the cost model sees them: the datasheet's figures, and how much of them is achieved.

A name is a count and a device: `8xA100`, `4xl40`, `h200_nvl`. Where no calibration exists for a
device, the datasheet is combined with the achieved fractions of the most similar calibrated one,
and the note says so.
"""

import re
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf, log
from pathlib import Path
from typing import NamedTuple

import yaml

from magicdec.config.folders import CONF
from magicdec.config.groups import Efficiency
from magicdec.costmodel.kernel_costs import KernelCosts
from magicdec.costmodel.matmuls import Shares, shares_of
from magicdec.costmodel.stacks import OWN_STACK, STACKS, Stack, stack_named
from magicdec.errors import UserError
from magicdec.units import GIB

CALIBRATED = Path(__file__).parent / "calibrated"
OPTIONS = CONF / "hardware"
# The name of any: there are no datasheets, and its fractions are of figures that a run measures.
CPU = "cpu"
NAME = r"(?:(\d+)x)?([a-z]\w*)"  # a count and a device


@dataclass(frozen=True)
class Link:
    """The link between the GPUs of a machine."""

    name: str
    bandwidth: float  # bytes per second that a GPU sends, and as many that it receives
    # One of an all-reduce's log2(ranks) hops, in microseconds. NVLink: 8, 14 and 17 us on 2, 4 and
    # 8 H100s (vLLM's kernel at 256 KB and 1 MB, extrapolated to 0; sgl-project/sglang#2904). PCIe:
    # 43 us on 8 GPUs (NVIDIA/nccl#1530).
    hop_us: float
    # The share of the bandwidth that all-reduces reach, without calibration. NVLink, at the
    # megabyte or so of a decode step: see magicdec/costmodel/calibration.py. PCIe: 28 of 64 GB/s on
    # 8 GPUs (PCIe 5.0, NVIDIA/nccl#1639).
    fraction: float


NVLINK3 = Link("NVLink 3", 300e9, 5.0, 0.25)
NVLINK4 = Link("NVLink 4", 450e9, 5.0, 0.25)
PCIE4 = Link("PCIe 4.0 x16", 32e9, 14.0, 0.44)
PCIE5 = Link("PCIe 5.0 x16", 64e9, 14.0, 0.44)


@dataclass(frozen=True)
class Device:
    """One accelerator, by its datasheet (dense matmuls). The driver's name for it contains every
    word of `name`.
    """

    name: str
    bandwidth: float  # bytes per second of its memory
    flops: float  # per second, bf16 with fp32 accumulation
    memory: float  # bytes
    # None where attention is not scheduled in tiles on streaming multiprocessors.
    num_sms: int | None = None
    link: Link = PCIE4
    vector_flops: float = 0.0  # per second, fp32 outside tensor cores; 0: not known

    @property
    def ridge(self) -> float:
        """Return the FLOPs per byte above which it is bound by compute."""
        return self.flops / self.bandwidth


DEVICES = {
    device.name: device
    for device in (
        Device("A100", 2039e9, 312e12, 80 * GIB, 108, NVLINK3),  # A100-SXM4-80GB
        Device("A100 40GB", 1555e9, 312e12, 40 * GIB, 108, NVLINK3),  # A100-SXM4-40GB
        Device("A100 PCIe", 1935e9, 312e12, 80 * GIB, 108, PCIE4),
        Device("A100 PCIe 40GB", 1555e9, 312e12, 40 * GIB, 108, PCIE4),
        Device("H100", 3350e9, 989e12, 80 * GIB, 132, NVLINK4),  # H100-SXM5
        # Bridges join cards of these in pairs or fours; several ranks are predicted over PCIe.
        Device("H100 PCIe", 2000e9, 756e12, 80 * GIB, 114, PCIE5),
        Device("H100 NVL", 3900e9, 835e12, 94 * GIB, 132, PCIE5),
        Device("H200", 4800e9, 989e12, 141 * GIB, 132, NVLINK4),  # H200-SXM
        Device("H200 NVL", 4800e9, 835e12, 141 * GIB, 132, PCIE5),
        Device("L40", 864e9, 181e12, 48 * GIB, 142, PCIE4),
        Device("L40S", 864e9, 362e12, 48 * GIB, 142, PCIE4),
    )
}


@dataclass(frozen=True)
class Hardware:
    """A machine as the cost model sees it: `count` devices, what they achieve, and the software
    that achieved it.
    """

    name: str
    device: Device
    count: int
    efficiency: Efficiency
    stack: Stack
    note: str = ""
    is_calibrated: bool = False  # on this machine, with this software
    kernels: KernelCosts = field(default_factory=KernelCosts)
    # Of published tables, for software that has the matmuls of engines.
    shares: Shares | None = None

    @property
    def is_cpu(self) -> bool:
        """Return whether it is a CPU, whose kernels are bound by what they move."""
        return self.name == CPU

    @property
    def bandwidth(self) -> float:
        """Return the achieved bytes per second of one device."""
        return self.device.bandwidth * self.efficiency.bandwidth_fraction

    def matmul_rate(self, rows: float) -> float:
        """Return the achieved FLOPs per second of one device, for matmuls of `rows` rows: it
        saturates.
        """
        return (
            self.device.flops
            * self.efficiency.matmul_fraction
            * rows
            / (rows + self.efficiency.matmul_half_rows)
        )

    def allreduce_time(self, num_bytes: float, ranks: int) -> float:
        """Return the seconds of an all-reduce: log2(ranks) hops, and 2 (n - 1) / n of the bytes
        over the link.
        """
        if ranks == 1:
            return 0.0
        rate = self.device.link.bandwidth * self.efficiency.allreduce_bandwidth_fraction
        return (
            self.efficiency.allreduce_hop_us * 1e-6 * log(ranks, 2)
            + 2 * (ranks - 1) / ranks * num_bytes / rate
        )


def parse_name(name: str) -> tuple[int, Device]:
    """Return (8, A100) for `8xA100`; without a count one device. Case does not matter."""
    count, device = _named(name)
    if device is None or not count:
        valid = ", ".join(map(_key, DEVICES))
        raise UserError(
            f"hardware={name} is not known; name a count and one of {valid}, such as 8xa100"
        )
    return count, device


def hardware_named(name: str, stack: str | None = None) -> Hardware:
    """Return the machine of that name; `stack` replaces the software that its calibration
    describes.
    """
    return configured(name, parse_name(name)[0], stack=stack)


def configured(
    name: str,
    count: int = 1,
    bandwidth_gbs: float | None = None,
    tflops: float | None = None,
    memory_gib: float | None = None,
    efficiency: Efficiency | None = None,
    stack: str | None = None,
) -> Hardware:
    """Return the machine of a `hardware` group, whose figures replace those of the named device's
    datasheet.

    `count` is the number of devices that share the model; the count in the name does not matter.
    Without an `efficiency` it is the device's own calibration, or that of the most similar device.
    """
    listed = _named(name)[1]
    base = listed or Device(name, 0.0, 0.0, inf)
    device = _changed(base, listed is not None, bandwidth_gbs, tflops, memory_gib)
    measured = _calibrations().get(device.name)
    kernels = measured.kernels if measured else KernelCosts()
    if efficiency is not None:  # as it was measured
        note, used = "calibrated by its configuration", stack_named(stack or OWN_STACK)
        return Hardware(name, device, count, efficiency, used, note, True, kernels)
    source = CPU if name == CPU and CPU in _calibrations() else _most_similar(device)
    calibration = _calibrations()[source]
    achieved, note = _adapted(calibration, source, device)
    used = stack_named(stack or calibration.stack)
    shares = None
    is_calibrated = source == device.name and used.name == calibration.stack
    if used.layer_us is not None:
        if source == CPU:
            of_any = ", ".join(stack.name for stack in STACKS.values() if stack.layer_us is None)
            raise UserError(
                f"scenario.stack={used.name}: its matmuls are known of GPUs alone; with"
                f" hardware={CPU} choose one of {of_any}, or null"
            )
        shares = shares_of(base.name, base.ridge / device.ridge) if listed else None
        shares = shares or shares_of(source, DEVICES[source].ridge / device.ridge)
        achieved = replace(achieved, layer_overhead_us=used.layer_us, round_overhead_us=0.0)
        note += f"; matmuls and launches of {used.name}"
    elif used.name != calibration.stack:
        note += f" with {calibration.stack}, not {used.name}"
    return Hardware(name, device, count, achieved, used, note, is_calibrated, kernels, shares)


def _changed(
    base: Device,
    is_listed: bool,
    bandwidth_gbs: float | None,
    tflops: float | None,
    memory_gib: float | None,
) -> Device:
    """Return a device with these figures in place of its own. Raise UserError if one that has no
    datasheet lacks any.
    """
    for key, value in (("bandwidth_gbs", bandwidth_gbs), ("tflops", tflops)):
        if not is_listed and value is None:
            names = (path.stem for path in sorted(OPTIONS.glob("*.yaml")))
            valid = ", ".join(name for name in names if _named(name)[1])
            raise UserError(
                f"hardware.{key}=null: predicting for hardware={base.name} needs it; or choose one"
                f" of {valid}"
            )
    return replace(
        base,
        bandwidth=base.bandwidth if bandwidth_gbs is None else bandwidth_gbs * 1e9,
        flops=base.flops if tflops is None else tflops * 1e12,
        memory=base.memory if memory_gib is None else memory_gib * GIB,
    )


def _adapted(calibration: "_Calibration", source: str, device: Device) -> tuple[Efficiency, str]:
    """Return the achieved fractions of a calibrated device, adapted to another one where they
    differ, and what they are in words.
    """
    achieved = calibration.efficiency
    if source in (CPU, device.name):
        return achieved, f"calibrated on {calibration.machine}"
    if device.name == CPU:  # no tensor cores, whose tiles few rows leave half empty
        achieved = replace(achieved, matmul_half_rows=0.0)
    link = device.link
    if link.hop_us != DEVICES[source].link.hop_us:  # a link of another kind
        achieved = replace(
            achieved, allreduce_hop_us=link.hop_us, allreduce_bandwidth_fraction=link.fraction
        )
    note = (
        f"no calibration for {device.name}: its bandwidth and FLOPs, with the achieved fractions of"
        f" {calibration.machine}"
    )
    return achieved, note


def unknown(name: str, count: int) -> Hardware:
    """Return a machine with a known number of devices and no figures: enough to predict memory."""
    return Hardware(name, Device(name, 0.0, 0.0, inf), count, Efficiency(), STACKS[OWN_STACK])


def _key(name: str) -> str:
    """Return a device's name as it is typed: h100_pcie for "H100 PCIe"."""
    return name.strip().lower().replace(" ", "_")


def _named(name: str) -> tuple[int, Device | None]:
    """Return the count and the device of a name, None for a device without a datasheet."""
    match = re.fullmatch(NAME, _key(name))
    count, key = match.groups() if match else (None, "")
    return int(count or 1), next(
        (device for device in DEVICES.values() if _key(device.name) == key), None
    )


def device_in(text: str) -> Device | None:
    """Return the known device named in a driver's text, such as "NVIDIA H100 80GB HBM3"; None for
    others.

    Of several that match, return the one with most words: a card has another bandwidth than a
    module. Return None for a slice of a GPU (MIG).
    """
    words = set(re.findall(r"[a-z0-9]+", text.lower()))
    if "mig" in words:
        return None
    named = (device for device in DEVICES.values() if words.issuperset(_words(device)))
    return max(named, key=lambda device: len(_words(device)), default=None)


def _words(device: Device) -> list[str]:
    return device.name.lower().split()


def _most_similar(device: Device) -> str:
    """Return the calibrated device nearest in bandwidth and FLOPs, by their ratios; itself where it
    is calibrated.
    """
    if device.name in DEVICES and device.name in _calibrations():
        return device.name

    def distance(name: str) -> float:
        other = DEVICES[name]
        return abs(log(other.bandwidth / device.bandwidth)) + abs(log(other.flops / device.flops))

    return min((name for name in _calibrations() if name != CPU), key=distance)


class _Calibration(NamedTuple):
    """The content of a file in `CALIBRATED`."""

    machine: str
    efficiency: Efficiency
    stack: str  # that was measured
    kernels: KernelCosts


@cache
def _calibrations() -> dict[str, _Calibration]:
    """Return the calibration of each device that has one."""
    calibrations = {}
    for path in sorted(CALIBRATED.glob("*.yaml")):
        content = yaml.safe_load(path.read_text())
        name = CPU if content["hardware"] == CPU else parse_name(content["hardware"])[1].name
        achieved = Efficiency(**content["efficiency"])
        kernels = KernelCosts(**content.get("kernels", {}))
        calibrations[name] = _Calibration(content["hardware"], achieved, content["stack"], kernels)
    return calibrations
