"""Time a few steps of our engine on this machine; timed points, wherever they come from, and the
machine of them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Any, NamedTuple

from magicdec.architectures.model_config import ModelConfig
from magicdec.config.groups import Efficiency
from magicdec.config.load import compose
from magicdec.config.registry import POLICIES
from magicdec.costmodel.hardware import CPU, Hardware, configured, device_in
from magicdec.costmodel.roofline import BF16
from magicdec.costmodel.stacks import OWN_STACK
from magicdec.costmodel.tables import Row
from magicdec.errors import UserError
from magicdec.inputs.rules import parse
from magicdec.measure.ceilings import matmul_rate, read_bandwidth
from magicdec.measure.system import Interference
from magicdec.measure.trust import disturbance
from magicdec.planning import build
from magicdec.planning.resolve import resolve
from magicdec.planning.resolved import Plan
from magicdec.scenarios.profile import time_points
from magicdec.tracking.progress import progress

ELEMENT_BYTES = {"float32": 4.0, "bfloat16": BF16, "float16": 2.0}
FIGURES = ("bandwidth_gbs", "tflops")
KEYS = ("device", "tensor_parallel", *FIGURES, "memory_gib")  # of the group hardware, in the option
REPEATS = 5
BUDGET = 256
# Small and large models, because a small one's steps say little about weights. Rows, contexts,
# gammas.
TARGETS = {
    "cpu": (["target=tiny"], ["target=smollm2-135m", "target.weights=random"]),
    "cuda": (
        ["target=llama-3.2-1b", "target.weights=random"],
        ["target=llama-3.1-8b", "target.weights=random"],
    ),
}
GRIDS = {
    "cpu": ((1, 4, 8), (1024, 4096), (2,)),
    "cuda": ((1, 8, 32), (2048, 8192), (1, 4)),
}


def timed_row(point: Mapping[str, Any], **facts: Any) -> Row:
    """Return a point of a profile as a row to fit, with other facts of it. A profile accepts no
    proposals: a round counts as one token.
    """
    return Row(
        **{key: point[key] for key in ("context_len", "batch_size", "gamma")},
        draft_ms=point["gamma"] * point["time/draft_ms"],
        verify_ms=point["time/verify_ms"],
        omega=1.0,
        autoregressive_ms=point["time/target_decode_ms"],
        speculative_ms=point["time/round_ms"],
        **facts,
    )


def profile_rows(
    config: Mapping[str, Any],
    history: Iterable[Mapping[str, Any]],
    weight_bytes: float | None = None,
) -> list[Row]:
    """Return a row for every point that was timed with a configuration: a parsed config.yaml, and
    lines as in the history.jsonl of scenario=profile.

    `weight_bytes` are those of a weight; None: as activations. Raise UserError for a draft that a
    row cannot describe.
    """
    draft, cache = config["draft"], config["cache"]
    if draft["name"] not in ("self", "model") or draft["quantization"] != "none":
        raise UserError(
            f"draft={draft['name']} with draft.quantization={draft['quantization']}: a calibration"
            " needs draft=self or draft=model, unquantized"
        )
    facts = POLICIES[cache["policy"]].facts
    keys = [key for key in ("policy", "budget", *facts.own_keys()) if key in cache]
    common = {
        "target": config["target"]["name"],
        "draft": draft["model"]["name"] if draft["name"] == "model" else draft["name"],
        "policy": cache["policy"],
        "hardware": config["hardware"]["name"],
        "kv_budget": cache["budget"],
        "cache": parse(facts, {key: cache[key] for key in keys}, "cache"),
        "element_bytes": ELEMENT_BYTES[config["hardware"]["dtype"]],
        "weight_bytes": weight_bytes,
    }
    return [timed_row(point, **common, table="profile") for point in history]


class Measured(NamedTuple):
    """Timed points, and the machine to fit, not calibrated yet."""

    rows: list[Row]
    models: dict[str, ModelConfig]
    machine: Hardware
    source: str  # what was measured, in words
    values: dict[str, Any]  # of the group hardware
    is_served: bool = False  # measured by requests to an engine
    diagnosis: str = ""  # of a server that speculates
    disturbed: str | None = None  # what else the machine was doing, in words


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

    `device_name` says which machine `hardware=auto` was. `rates` are the bytes and FLOPs per second
    that a device without a datasheet reaches. Raise UserError if neither says what the machine
    could do.
    """
    listed = device_in(device_name)
    name = str(hardware["name"])
    if name == "auto":
        unlisted = CPU if hardware.get("device") == "cpu" else device_name or name
        name = listed.name if listed else unlisted
    reached = (
        zip(FIGURES, (round(rates[0] / 1e9, 2), round(rates[1] / 1e12, 4)), strict=True)
        if rates
        else ()
    )
    values: dict[str, Any] = {"name": name} | (dict(reached) if listed is None else {})
    values |= {key: hardware[key] for key in KEYS if hardware.get(key) is not None}
    # Of a CPU: its fractions so far, which have no tensor cores.
    start = None if name == CPU else Efficiency()
    figures = {key: values.get(key) for key in (*FIGURES, "memory_gib")}
    machine = configured(
        name, values.get("tensor_parallel", 1), **figures, efficiency=start, stack=OWN_STACK
    )
    if start is not None:
        start = replace(start, allreduce_hop_us=machine.device.link.hop_us)
        machine = replace(machine, efficiency=start)
    return Measured(
        [replace(row, hardware=name) for row in rows], models, machine, source, values, is_served
    )


def measure_here(overrides: Sequence[str]) -> Measured:
    """Time a few steps on this machine, with the models of TARGETS or the target that `overrides`
    name.
    """
    rows: list[Row] = []
    models: dict[str, ModelConfig] = {}
    rates = []
    disturbances = []
    device = this_machine(overrides).device.type
    names_target = any(text.startswith("target") for text in overrides)
    for target in [[]] if names_target else TARGETS[device]:
        points = list(product(*GRIDS[device]))
        sizes = [
            f"batch.size={max(GRIDS[device][0])}",
            f"batch.context_len={max(GRIDS[device][1])}",
        ]
        plan = resolve(
            compose(["scenario=profile", f"cache.budget={BUDGET}", *sizes, *target, *overrides])
        )
        models[plan.config.target.name] = plan.target.config
        with (
            progress() as bars,
            bars.task(f"timing {plan.config.target.name}", total=len(points)) as task,
        ):
            interference = Interference(plan.device, plan.num_ranks)
            rates.append(rates_of(plan))
            for point in time_plan(plan, bars, points):
                rows += profile_rows(asdict(plan.config), [point], plan.weight_bytes)
                task.advance(1)
            rates.append(rates_of(plan))
            disturbances.append(interference.description())
    bandwidth, flops = [max(rate) for rate in zip(*rates, strict=True)]
    found = measured(
        rows,
        models,
        asdict(plan.config.hardware),
        plan.device_name,
        plan.device_name,
        (bandwidth, flops),
    )
    return found._replace(disturbed=disturbance([disturbances]))


def this_machine(overrides: Sequence[str]) -> Plan:
    """Return a plan for this machine. Overrides of the target are ignored."""
    return resolve(
        compose(["target=tiny", *(text for text in overrides if not text.startswith("target"))])
    )


def rates_of(plan: Plan) -> tuple[float, float]:
    """Measure the bytes and FLOPs per second that this device reaches."""
    return read_bandwidth(plan.device), matmul_rate(plan.device, plan.dtype)


def time_plan(
    plan: Plan, bars: Any, points: Iterable[tuple[int, int, int]]
) -> Iterator[dict[str, Any]]:
    """Yield the times of a round's steps over caches of noise, with the bytes of the plan's
    elements and weights.
    """
    sizes = {"element_bytes": plan.dtype.itemsize, "weight_bytes": plan.weight_bytes}
    for point in time_points(build.engine(plan, bars), points, REPEATS):
        yield point | sizes


def row_of(model: str, point: Mapping[str, Any], budget: int) -> Row:
    """Return a timed point of self-speculation over a streaming cache as a row to fit."""
    facts = {
        "target": model,
        "draft": "self",
        "policy": "streaming",
        "hardware": CPU,
        "kv_budget": budget,
    }
    return timed_row(
        point, **facts, element_bytes=point["element_bytes"], weight_bytes=point["weight_bytes"]
    )
