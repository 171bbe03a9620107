"""Time a few steps of our engine on this machine."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Any

from magicdec.architectures import ModelConfig
from magicdec.calibrate.measured import Measured, measured
from magicdec.config.load import compose
from magicdec.costmodel.hardware import CPU
from magicdec.costmodel.roofline import BF16
from magicdec.costmodel.tables import Row
from magicdec.data import PromptRequest, load_prompts
from magicdec.engine.native import warm_up
from magicdec.measure.ceilings import matmul_rate, read_bandwidth
from magicdec.measure.profile import profile_round
from magicdec.planning import build
from magicdec.planning.resolve import Plan, resolve
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
            for point in time_points(plan, bars, points):
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


def time_points(plan: Plan, bars: Any, points: Iterable[tuple[int, int, int]]) -> Iterable[dict[str, Any]]:
    """Yield the times of a round's steps over caches of noise, at each point (rows, context, gamma)."""
    engine = build.engine(plan, bars)
    for rows, context, gamma in points:
        prompts = load_prompts("random", PromptRequest(rows, context, plan.target.config.vocab_size))
        batch = replace(engine, draft=replace(engine.draft, gamma=gamma)).open(prompts.tokens)
        batch.simulate_prefill()
        warm_up(batch)
        point = {"rows": rows, "context": context, "gamma": gamma, **profile_round(batch, REPEATS)}
        batch.close()
        stored = BF16 if plan.in_bfloat16(plan.target) else None
        yield point | {"element_bytes": plan.dtype.itemsize, "weight_bytes": stored}


def row_of(model: str, point: Mapping[str, Any], budget: int) -> Row:
    """Return a timed point of self-speculation over a streaming cache as a row to fit."""
    return Row(
        target=model,
        draft="self",
        policy="streaming",
        hardware=CPU,
        context_len=point["context"],
        batch_size=point["rows"],
        gamma=point["gamma"],
        kv_budget=budget,
        draft_ms=point["gamma"] * point["draft_ms"],
        verify_ms=point["verify_ms"],
        omega=1.0,
        autoregressive_ms=point["target_decode_ms"],
        speculative_ms=point["round_ms"],
        element_bytes=point["element_bytes"],
        weight_bytes=point["weight_bytes"],
    )
