"""Time a few steps of our engine on this machine."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

from magicdec.architectures import ModelConfig
from magicdec.calibrate.measured import Measured, measured, timed_row
from magicdec.config.load import compose
from magicdec.costmodel.hardware import CPU
from magicdec.costmodel.roofline import BF16
from magicdec.costmodel.tables import Row
from magicdec.measure.ceilings import matmul_rate, read_bandwidth
from magicdec.planning import build
from magicdec.planning.resolve import Plan, resolve
from magicdec.scenarios.profile import time_points
from magicdec.tracking.progress import progress

REPEATS = 5
BUDGET = 256
# Small and large models, because a small one's steps say little about weights. Rows, contexts, gammas.
TARGETS = {
    "cpu": (["target=tiny"], ["target=smollm2-135m", "target.weights=random"]),
    "cuda": (["target=llama-3.2-1b", "target.weights=random"], ["target=llama-3.1-8b", "target.weights=random"]),
}
GRIDS = {"cpu": ((1, 4, 8), (1024, 4096), (2,)), "cuda": ((1, 8, 32), (2048, 8192), (1, 4))}


def measure_here(overrides: Sequence[str]) -> Measured:
    """Time a few steps on this machine, with the models of TARGETS or the target that `overrides` name."""
    rows: list[Row] = []
    models: dict[str, ModelConfig] = {}
    rates = []
    device = this_machine(overrides).device.type
    own = any(text.startswith("target") for text in overrides)
    for target in [[]] if own else TARGETS[device]:
        points = list(product(*GRIDS[device]))
        sizes = [f"batch.size={max(GRIDS[device][0])}", f"batch.context_len={max(GRIDS[device][1])}"]
        plan = resolve(compose(["scenario=profile", f"cache.budget={BUDGET}", *sizes, *target, *overrides]))
        models[plan.config.target.name] = plan.target.config
        with progress() as bars, bars.task(f"timing {plan.config.target.name}", total=len(points)) as task:
            rates.append(rates_of(plan))
            for point in time_plan(plan, bars, points):
                rows.append(row_of(plan.config.target.name, point, BUDGET))
                task.advance(1)
            rates.append(rates_of(plan))
    bandwidth, flops = (max(rate) for rate in zip(*rates, strict=True))
    return measured(rows, models, asdict(plan.config.hardware), plan.device_name, plan.device_name, (bandwidth, flops))


def this_machine(overrides: Sequence[str]) -> Plan:
    """Return a plan for this machine. Overrides of the target are ignored."""
    return resolve(compose(["target=tiny", *(text for text in overrides if not text.startswith("target"))]))


def rates_of(plan: Plan) -> tuple[float, float]:
    """Measure the bytes and FLOPs per second that this device reaches."""
    return read_bandwidth(plan.device), matmul_rate(plan.device, plan.dtype)


def time_plan(plan: Plan, bars: Any, points: Iterable[tuple[int, int, int]]) -> Iterator[dict[str, Any]]:
    """Yield the times of a round's steps over caches of noise, with the bytes of the plan's elements and weights."""
    stored = BF16 if plan.in_bfloat16(plan.target) else None
    for point in time_points(build.engine(plan, bars), points, REPEATS):
        yield point | {"element_bytes": plan.dtype.itemsize, "weight_bytes": stored}


def row_of(model: str, point: Mapping[str, Any], budget: int) -> Row:
    """Return a timed point of self-speculation over a streaming cache as a row to fit."""
    size, weight = point["element_bytes"], point["weight_bytes"]
    return timed_row(point, model, "self", "streaming", CPU, budget, size, weight_bytes=weight)
