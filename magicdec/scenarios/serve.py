"""The same requests under load, autoregressively and speculatively, at each level of concurrency or
arrival rate.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from magicdec.config.checks import refuse_group, refuse_unread
from magicdec.config.load import compose
from magicdec.config.scenario_settings import Serve
from magicdec.data.tokenizer import load_tokenizer
from magicdec.engine.native import NativeEngine
from magicdec.errors import UserError, to_stderr
from magicdec.measure import memory_use
from magicdec.measure.contexts import context_acceptance
from magicdec.measure.intervals import acceptance_intervals
from magicdec.measure.metrics import Metrics, Rounds, acceptance, category_acceptance
from magicdec.planning import build, fits
from magicdec.planning.resolve import resolve
from magicdec.planning.resolved import Plan
from magicdec.planning.shared import SHARED
from magicdec.scenarios.level_units import LevelUnit, LevelUnits, ServedRequest
from magicdec.scenarios.levels import (
    jobs_of,
    level_metrics,
    levels_of,
    prompts_of,
    view,
    warm_up_of,
)
from magicdec.scenarios.outcome import Outcome
from magicdec.scenarios.outputs import Outputs, lossless
from magicdec.serving.engine import AsyncEngine
from magicdec.serving.load_generator import Load, LoadSearch, RequestSpec, under_load
from magicdec.serving.request import Request
from magicdec.serving.scheduler import Scheduler
from magicdec.serving.shared_slots import SharedSlots
from magicdec.serving.slots import Slots
from magicdec.tracking.progress import Progress
from magicdec.tracking.store import Run
from magicdec.units import GIB, LOADS, WAYS

PEAK = "memory/peak_gib"


def run(plan: Plan, run: Run, progress: Progress) -> Outcome:
    """Measure every level that the run lacks; a line of the history for each, and the last one's
    figures as the run's own.
    """
    config = plan.config
    scenario = config.settings(Serve)
    prompts = prompts_of(plan, build.tokenizer(plan))
    if run.writes:  # of several ranks, the first
        build.warn_about(plan, prompts)
    units = LevelUnits(run)
    peak = memory_use.Peak(plan.device)
    engine = build.engine(plan, progress)
    jobs = jobs_of(plan, prompts)
    levels = Levels(plan, units, engine, jobs, prompts.categories, progress, peak)
    ways = WAYS if engine.draft.name != "none" else WAYS[:1]
    limits: Metrics = {}
    for level in levels_of(scenario):
        levels.measure(level, ways)
    last = levels.history[-1:]
    written = levels.written
    for way in ways if scenario.slo else ():
        search = LoadSearch(way, scenario)
        while search.level is not None:
            search.tell(levels.measure(search.level, (way,)))
        limits |= search.metrics
    if not levels.history:  # a rank that has followed
        return Outcome({})
    results: Metrics = {**prompts.facts, "device": plan.device_name, **plan.sources, **limits}
    results["weights/bytes"] = plan.weight_bytes
    for row in last:
        results |= {key: value for key, value in row.items() if key not in LOADS}
    if engine.draft.name != "none":
        results["acceptance/source"] = (
            "measured" if config.draft.synthetic_acceptance is None else "synthetic"
        )
    results |= units.units[-1].facts
    results[PEAK] = max(unit.facts[PEAK] for unit in units.units)
    # Of the last level.
    outputs = Outputs(prompts, written.get("autoregressive", []), written.get("speculative", []))
    rows = outputs.rows(config.data.save_prompts) if last else []
    return Outcome(results, rows, levels.history, view=view(plan, results, levels.history))


@dataclass
class Levels:
    """Levels of load on our engine, and their measurements."""

    plan: Plan
    units: LevelUnits
    engine: NativeEngine
    jobs: list[RequestSpec]
    categories: Sequence[str]  # of the jobs; empty: they have none
    progress: Progress
    peak: memory_use.Peak
    history: list[dict[str, Any]] = field(default_factory=list)
    # The tokens of the last level, by way.
    written: dict[str, list[list[int]]] = field(default_factory=dict)

    def measure(self, level: Load, ways: Sequence[str]) -> Metrics:
        """Measure a level in the ways in which the run lacks it, and return its line of the
        history; {} on a rank that has followed.
        """
        stored = {way: self.units.take(level, way) for way in ways}
        units = {way: unit for way, unit in stored.items() if unit is not None}
        missing = [way for way in ways if way not in units]
        if missing:
            measured = self._measure(level, missing)
            if not measured:
                return {}
            units = {way: units.get(way) or measured[way] for way in ways}
        self.history.append(
            {level.kind: level.value} | _level_metrics(units, self.plan, self.categories)
        )
        self.units.run.write_lines("history", self.history)
        self.written = {way: unit.tokens for way, unit in units.items()}
        return self.history[-1]

    def _measure(self, level: Load, ways: Sequence[str]) -> dict[str, LevelUnit]:
        """Measure a level on slots of its own, and write a unit for each way; {} on a rank that has
        followed.
        """
        batch = self.plan.config.batch
        kind = SharedSlots if self.plan.num_ranks > 1 else Slots
        # A row without a request costs its share of the matmuls: no more slots than users.
        rows = (
            min(int(level.value), int(batch.size))
            if level.kind == "concurrency"
            else int(batch.size)
        )
        slots = kind(self.engine, rows, batch.context_len + batch.generate_len)
        if isinstance(slots, SharedSlots) and dist.get_rank() > 0:
            slots.follow()
            return {}
        measured: dict[str, LevelUnit] = {}
        for way in ways:
            answered, seconds = _send(slots, way, level, self.jobs, self.plan, self.progress)
            requests = [ServedRequest.of(request) for request in answered]
            facts = _memory(slots, self.peak)
            measured[way] = LevelUnit(level, way, seconds, requests, facts)
            self.units.add(measured[way], "level")
        slots.close()  # or the caches of two levels would be held at once
        return measured


def served(overrides: Sequence[str], progress: Progress) -> tuple[Plan, Slots, Any]:
    """Return the plan of scenario=serve with these overrides, batch.size slots on loaded weights,
    and the tokenizer.

    Raise UserError for mistakes, overrides without effect, and what cannot serve text from this
    process.
    """
    config = compose(["scenario=serve", *overrides])
    refuse_group("data", overrides, "requests bring their own prompts")
    for line in refuse_unread(config, overrides):
        to_stderr(f"warning: {line}")
    if config.engine.name != "native":
        raise UserError(
            f"engine={config.engine.name}: text is served by our own engine; leave it out, or start"
            " that engine's server"
        )
    plan = fits.fitting(resolve(config), config.batch)
    for warning in plan.warnings():
        to_stderr(f"warning: {warning}")
    batch = plan.config.batch
    if plan.target.folder is None:
        raise UserError("target.weights=random: there is no tokenizer to serve text with")
    if plan.num_ranks > 1:
        raise UserError(
            f"hardware.tensor_parallel={plan.num_ranks}: one device serves text; set it to 1"
        )
    SHARED.begin("none")  # whatever a sweep has kept in this process: no job follows
    fits.check(plan, int(batch.size), batch.context_len)
    tokenizer = load_tokenizer(plan.target.folder)
    slots = Slots(
        build.engine(plan, progress), int(batch.size), batch.context_len + batch.generate_len
    )
    return plan, slots, tokenizer


def _send(
    slots: Slots, way: str, level: Load, jobs: list[RequestSpec], plan: Plan, progress: Progress
) -> tuple[list[Request], float]:
    """Send all jobs under one level of load; return their requests and the seconds that it took."""

    async def measured() -> tuple[list[Request], float]:
        async with AsyncEngine(Scheduler(slots, way == "speculative")) as engine:
            await under_load(engine, [warm_up_of(jobs)], Load("concurrency", 1), 0)
            with progress.task(f"{way}, {level}", total=len(jobs)) as task:
                return await under_load(engine, jobs, level, plan.config.data.seed, task.advance)

    return asyncio.run(measured())


def _level_metrics(
    units: Mapping[str, LevelUnit], plan: Plan, categories: Sequence[str]
) -> Metrics:
    """Return the metrics of both ways and their comparison."""
    result = level_metrics(units, plan.config.settings(Serve), categories)
    if "speculative" not in units:
        return result
    fast = units["speculative"]
    rounds = [request.rounds for request in fast.requests]
    result |= (
        acceptance(sum(rounds, Rounds()))
        | acceptance_intervals(rounds)
        | category_acceptance(categories, rounds)
        | context_acceptance([request.speculated for request in fast.requests])
    )
    if len(units) < len(WAYS):
        return result
    return result | lossless(plan, units["autoregressive"].tokens, fast.tokens)


def _memory(slots: Slots, peak: memory_use.Peak) -> Metrics:
    batches = (slots.batch, slots.single)
    return {
        PEAK: peak.num_bytes / GIB,
        "memory/target_kv_gib": sum(batch.decoder.cache.num_bytes for batch in batches) / GIB,
        "memory/draft_kv_gib": sum(batch.draft.cache_bytes for batch in batches if batch.draft)
        / GIB,
    }
