"""The same requests under load, autoregressively and speculatively, at each level of concurrency or arrival rate."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch.distributed as dist
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from magicdec.config.checks import refuse_unread
from magicdec.config.load import compose, to_dict
from magicdec.config.schema import Serve
from magicdec.data import Prompts
from magicdec.data.tokenizer import load_tokenizer
from magicdec.engine.native import NativeEngine
from magicdec.errors import UserError, to_stderr
from magicdec.measure import memory
from magicdec.measure.intervals import acceptance_intervals
from magicdec.measure.metrics import Metrics, Rounds, acceptance
from magicdec.planning import build
from magicdec.planning.resolve import Plan, resolve
from magicdec.scenarios.outcome import Outcome, keeping
from magicdec.scenarios.outputs import Outputs, lossless
from magicdec.serving.engine import AsyncEngine
from magicdec.serving.load import Load, RequestSpec, load_metrics, under_load
from magicdec.serving.request import Params, Request
from magicdec.serving.scheduler import Scheduler
from magicdec.serving.shared import SharedSlots
from magicdec.serving.slots import Slots
from magicdec.tracking.cells import new_table, three_digits
from magicdec.tracking.progress import Progress
from magicdec.tracking.table import described_context, described_models, described_place, losslessness
from magicdec.units import GIB, WAYS
from magicdec.verification.sampling import Sampling

prepare = resolve
WARMUP_TOKENS = 8  # of a request before each measurement, which is not counted
# On the terminal; a latency is shown as its median and its 99th percentile.
LATENCIES = {
    "time_to_first_token_ms": ("TTFT, ms", 1.0),
    "time_per_output_token_ms": ("TPOT, ms", 1.0),
    "request_latency_ms": ("request, s", 1e-3),
    "goodput_rps": ("good/s", 1.0),
}


def run(plan: Plan, progress: Progress) -> Outcome:
    """Measure every level; a line of the history for each, and the last one's figures as the run's own."""
    config = plan.config
    scenario, batch = config.settings(Serve), config.batch
    build.check_memory(plan, int(batch.size), batch.context_len)
    prompts = _prompts(plan)
    peak = memory.Peak(plan.device)
    engine = build.engine(plan, progress)
    jobs = _jobs(plan, engine, prompts)
    levels = [Load("concurrency", users) for users in scenario.concurrencies]
    levels += [Load("rate", rate) for rate in scenario.rates]
    kind = SharedSlots if plan.num_ranks > 1 else Slots
    ways = WAYS if engine.draft.name != "none" else WAYS[:1]
    history: list[dict[str, Any]] = []
    with keeping(history):
        for level in levels:
            # A row without a request costs its share of the matmuls: no more slots than users.
            rows = min(int(level.value), int(batch.size)) if level.kind == "concurrency" else int(batch.size)
            slots = kind(engine, rows, batch.context_len + batch.generate_len)
            if isinstance(slots, SharedSlots) and dist.get_rank() > 0:
                slots.follow()
                continue
            measured = {way: _measure(slots, way, level, jobs, plan, progress) for way in ways}
            history.append({level.kind: level.value} | _level_metrics(measured, plan))
            held = _memory(slots, peak)
            slots.close()  # or the caches of two levels would be held at once
    if not history:  # a rank that has followed
        return Outcome({})
    results: Metrics = {**prompts.facts, "device": plan.device_name, **plan.sources}
    results |= {key: value for key, value in history[-1].items() if key not in ("concurrency", "rate")}
    if engine.draft.name != "none":
        results["acceptance/source"] = "measured" if config.draft.synthetic_acceptance is None else "synthetic"
    results |= held
    written = {way: [request.tokens for request in requests] for way, (requests, _) in measured.items()}
    outputs = Outputs(prompts, written["autoregressive"], written.get("speculative", []))  # of the last level
    return Outcome(results, outputs.rows(config.data.save_prompts), history, view=_view(plan, results, history))


def served(overrides: Sequence[str], progress: Progress) -> tuple[Plan, Slots, Any]:
    """Return the plan of scenario=serve with these overrides, batch.size slots on loaded weights, and the tokenizer.

    Raise UserError for mistakes, overrides without effect, and what cannot serve text from this process.
    """
    config = compose(["scenario=serve", *overrides])
    refuse_unread(config, overrides)
    plan = resolve(config)
    for warning in plan.warnings():
        to_stderr(f"warning: {warning}")
    batch = plan.config.batch
    if plan.target.folder is None:
        raise UserError("target.weights=random: there is no tokenizer to serve text with")
    if plan.num_ranks > 1:
        raise UserError(f"hardware.tensor_parallel={plan.num_ranks}: one device serves text; set it to 1")
    build.check_memory(plan, int(batch.size), batch.context_len)
    tokenizer = load_tokenizer(plan.target.folder)
    slots = Slots(build.engine(plan, progress), int(batch.size), batch.context_len + batch.generate_len)
    return plan, slots, tokenizer


def _prompts(plan: Plan) -> Prompts:
    """Return a prompt per request: all lengths in turn, shuffled."""
    config = plan.config
    tokenizer, count = build.tokenizer(plan), config.settings(Serve).num_requests
    longest = config.batch.context_len
    shares = config.settings(Serve).length_shares if config.data.name != "prompts" else [1.0]
    lengths = [max(1, round(share * longest)) for share in shares][:count]
    rows: list[tuple[list[int], str]] = []
    for index, length in enumerate(lengths):
        loaded = build.prompts(plan, tokenizer, len(range(index, count, len(lengths))), length)
        rows += zip(loaded.tokens, loaded.sources, strict=True)
    random.Random(config.data.seed).shuffle(rows)
    return Prompts([tokens for tokens, _ in rows], [source for _, source in rows])


def _jobs(plan: Plan, engine: NativeEngine, prompts: Prompts) -> list[RequestSpec]:
    """Return a request for each prompt, with random numbers of its own."""
    jobs = []
    for number, prompt in enumerate(prompts.tokens):
        sampling = Sampling.of(engine.sampling, number)
        params = Params(plan.config.batch.generate_len, sampling, ignore_eos=plan.config.sampling.ignore_eos)
        jobs.append(RequestSpec(prompt, params))
    return jobs


def _measure(
    slots: Slots, way: str, level: Load, jobs: list[RequestSpec], plan: Plan, progress: Progress
) -> tuple[list[Request], float]:
    """Send all jobs under one level of load; return their requests and the seconds that it took."""
    warm_up = RequestSpec(
        jobs[0].prompt, Params(min(WARMUP_TOKENS, jobs[0].params.max_tokens), jobs[0].params.sampling)
    )

    async def measured() -> tuple[list[Request], float]:
        async with AsyncEngine(Scheduler(slots, way == "speculative")) as engine:
            await under_load(engine, [warm_up], Load("concurrency", 1), 0, lambda _: None)
            with progress.task(f"{way}, {level}", total=len(jobs)) as task:
                return await under_load(engine, jobs, level, plan.config.data.seed, task.advance)

    return asyncio.run(measured())


def _level_metrics(measured: Mapping[str, tuple[list[Request], float]], plan: Plan) -> Metrics:
    """Return the metrics of both ways and their comparison, named as in scenario=compare."""
    scenario = plan.config.settings(Serve)
    result: Metrics = {}
    for way, (requests, seconds) in measured.items():
        figures = load_metrics(requests, seconds, scenario.latency_ms, scenario.first_token_ms)
        result |= {f"{way}/{name}": value for name, value in figures.items()}
    if "speculative" not in measured:
        return result
    plain, fast = (measured[way] for way in WAYS)
    times = [
        a.stats.time_per_output_token_s / s.stats.time_per_output_token_s
        for a, s in zip(plain[0], fast[0], strict=True)
        if a.stats.time_per_output_token_s and s.stats.time_per_output_token_s
    ]
    if times:
        result["speedup"] = median(times)
    result["speedup_duration"] = plain[1] / fast[1]
    rounds = Rounds()
    for request in fast[0]:
        rounds.update(request.rounds)
    before, after = ([request.tokens for request in requests] for requests, _ in (plain, fast))
    result |= acceptance(rounds) | acceptance_intervals([request.rounds for request in fast[0]])
    return result | lossless(plan, before, after)


def _memory(slots: Slots, peak: memory.Peak) -> Metrics:
    batches = (slots.batch, slots.single)
    return {
        "memory/peak_gib": peak.num_bytes / GIB,
        "memory/target_kv_gib": sum(batch.decoder.cache.num_bytes for batch in batches) / GIB,
        "memory/draft_kv_gib": sum(batch.draft.cache_bytes for batch in batches if batch.draft) / GIB,
    }


def _view(plan: Plan, results: Metrics, history: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return what the terminal shows: both ways at each level of load."""
    config, described = plan.config, to_dict(plan.config)
    lengths = f"{described_context(described, results)}, {config.batch.generate_len} new tokens each"
    lines = [
        Text(f"serve: {described_models(described)}", style="bold"),
        Text(f"{config.settings(Serve).num_requests} requests a level, {lengths}"),
        Text(f"data: {config.data.name}; {described_place(described, plan.device_name)}"),
    ]
    if config.draft.synthetic_acceptance is not None:
        lines.append(Text("SYNTHETIC acceptance: drawn, not measured; only the times are real", style="bold yellow"))
    ways = [way for way in WAYS if f"{way}/tokens_per_second" in history[0]]
    parts: list[RenderableType] = [*lines, Text(), _speeds(history, ways), Text(), _latencies(history, ways)]
    if "lossless/identical" in history[0]:
        worst = min(history, key=lambda row: row["lossless/identical"] is not False)
        parts.append(Text.assemble("\nlossless          ", losslessness(described, worst)))
    return Group(*parts)


def _speeds(history: Sequence[Mapping[str, Any]], ways: Sequence[str]) -> Table:
    """Return a table with a line per level: the throughput of each way, and both speedups."""
    speedups = {"speedup": "speedup per request", "speedup_duration": "per level"} if len(ways) > 1 else {}
    table = new_table("tokens/s", *ways, *speedups.values())
    for row in history:
        rates = (three_digits(row[f"{way}/tokens_per_second"]) for way in ways)
        table.add_row(_load(row), *rates, *(f"{row[key]:.2f}x" if key in row else "" for key in speedups))
    return table


def _latencies(history: Sequence[Mapping[str, Any]], ways: Sequence[str]) -> Table:
    """Return a table with a line per level and way. A latency is its median and its 99th percentile."""
    present = {key: column for key, column in LATENCIES.items() if f"{ways[0]}/{key}" in history[0]}
    table = new_table("median | 99%", *(label for label, _ in present.values()))
    table.padding = (0, 1, 0, 0)
    for row in history:
        table.add_row(Text(_load(row), style="bold"))
        for way in ways:
            table.add_row(
                f"  {way}", *(_percentiles(row, f"{way}/{key}", scale) for key, (_, scale) in present.items())
            )
    return table


def _load(row: Mapping[str, Any]) -> str:
    return f"{row['concurrency']:g} at once" if "concurrency" in row else f"{row['rate']:g} a second"


def _percentiles(row: Mapping[str, Any], name: str, scale: float) -> str:
    values = [row[f"{name}_p50"], row[f"{name}_p99"]] if f"{name}_p50" in row else [row[name]]
    return " | ".join(three_digits(scale * value) for value in values)
