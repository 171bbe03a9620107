"""Timed points and the machine that they were timed on, wherever they come from."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from magicdec.architectures import ModelConfig
from magicdec.config.schema import Efficiency
from magicdec.costmodel.hardware import CPU, OWN_STACK, Hardware, configured, device_in
from magicdec.costmodel.roofline import BF16
from magicdec.costmodel.tables import Row

ELEMENT_BYTES = {"float32": 4.0, "bfloat16": BF16, "float16": 2.0}
FIGURES = ("bandwidth_gbs", "tflops")
KEYS = ("device", "tensor_parallel", *FIGURES, "memory_gib")  # of the group hardware, in the option


def timed_row(
    point: Mapping[str, Any],
    target: str,
    draft: str,
    policy: str,
    hardware: str,
    budget: int,
    element_bytes: float,
    **more: Any,
) -> Row:
    """Return a point of a profile as a row to fit. A profile accepts no proposals: a round counts as one token."""
    return Row(
        target,
        draft,
        policy,
        hardware,
        **{key: point[key] for key in ("context_len", "batch_size", "gamma")},
        kv_budget=budget,
        draft_ms=point["gamma"] * point["time/draft_ms"],
        verify_ms=point["time/verify_ms"],
        omega=1.0,
        autoregressive_ms=point["time/target_decode_ms"],
        speculative_ms=point["time/round_ms"],
        element_bytes=element_bytes,
        **more,
    )


class Measured(NamedTuple):
    """Timed points, and the machine to fit, not calibrated yet."""

    rows: list[Row]
    models: dict[str, ModelConfig]
    machine: Hardware
    source: str  # what was measured, in words
    values: dict[str, Any]  # of the group hardware
    is_served: bool = False  # measured by requests to an engine


def measured(
    rows: Iterable[Row],
    models: dict[str, ModelConfig],
    hardware: Mapping[str, Any],
    source: str,
    device_name: str = "",
    rates: tuple[float, float] | None = None,
    is_served: bool = False,
) -> Measured:
    """Return points of the machine that a group `hardware` describes.

    `device_name` says which machine `hardware=auto` was. `rates` are the bytes and FLOPs per second that a device
    without a datasheet reaches. Raise UserError if neither says what the machine could do.
    """
    known, name = device_in(device_name), str(hardware["name"])
    if name == "auto":
        name = known.name if known else CPU if hardware.get("device") == "cpu" else device_name or name
    reached = zip(FIGURES, (round(rates[0] / 1e9, 2), round(rates[1] / 1e12, 4)), strict=True) if rates else ()
    values: dict[str, Any] = {"name": name} | (dict(reached) if known is None else {})
    values |= {key: hardware[key] for key in KEYS if hardware.get(key) is not None}
    start = None if name == CPU else Efficiency()  # of a CPU: its fractions so far, which have no tensor cores
    figures = {key: values.get(key) for key in (*FIGURES, "memory_gib")}
    machine = configured(name, values.get("tensor_parallel", 1), **figures, efficiency=start, stack=OWN_STACK)
    if start is not None:
        start = replace(start, allreduce_hop_us=machine.device.link.hop_us)
        machine = replace(machine, efficiency=start)
    return Measured([replace(row, hardware=name) for row in rows], models, machine, source, values, is_served)
