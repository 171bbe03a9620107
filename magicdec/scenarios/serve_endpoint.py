"""scenario=serve on a server with OpenAI's API: one that runs already (engine=openai), or another
engine's own.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any, cast

import torch

from magicdec.config.scenario_settings import Serve
from magicdec.data import Prompts
from magicdec.errors import to_stderr
from magicdec.measure.contexts import context_acceptance
from magicdec.measure.metrics import Metrics, by_category, short_acceptance
from magicdec.peers.answer import EndpointFailed, EndpointRequest
from magicdec.peers.base import AcceptanceCounts, Address, Servable, sum_of_counts
from magicdec.peers.endpoint import Endpoint, described
from magicdec.peers.lateness import Lateness
from magicdec.planning import build
from magicdec.planning.resolved import Plan
from magicdec.scenarios.level_units import LevelUnit, LevelUnits, ServedRequest, answered_pairs
from magicdec.scenarios.levels import (
    jobs_of,
    level_metrics,
    levels_of,
    prompts_of,
    view,
    warm_up_of,
)
from magicdec.scenarios.outcome import Outcome
from magicdec.scenarios.outputs import Outputs
from magicdec.scenarios.peer import load
from magicdec.serving.load_generator import Load, LoadSearch, RequestSpec, under_load
from magicdec.tracking.progress import Progress
from magicdec.tracking.store import Run
from magicdec.units import WAYS

SERVED = "engine/served"  # the model, its address and how it is asked


@dataclass
class Measurement:
    """Everything that a run has measured so far."""

    plan: Plan
    units: LevelUnits
    prompts: Prompts
    jobs: list[RequestSpec]
    progress: Progress
    levels: dict[Load, dict[str, LevelUnit]] = field(default_factory=dict)
    limits: Metrics = field(default_factory=dict)  # that a search has ended with
    history: list[dict[str, Any]] = field(default_factory=list)

    async def measure(self, servers: "Servers", way: str, load: Load) -> Metrics:
        """Measure a level of load in one way, unless the run has it, and return its metrics."""
        unit = self.units.take(load, way)
        if unit is None:
            unit = await self._send(await servers.endpoint(way), way, load)
            self.units.add(unit, "level")
        self.levels.setdefault(load, {})[way] = unit
        self.history[:] = [
            {level.kind: level.value} | self.metrics(ways) for level, ways in self.levels.items()
        ]
        self.units.run.write_lines("history", self.history)
        return self.metrics({way: unit})

    async def _send(self, endpoint: Endpoint, way: str, load: Load) -> LevelUnit:
        """Send all requests after a short one. Raise EndpointFailed if nothing was answered."""
        # A server may reject the longer ones.
        shortest = min(self.jobs, key=lambda job: len(job.prompt))
        warm_up = warm_up_of([shortest])
        request = endpoint.generate(warm_up.prompt, warm_up.params).request
        await endpoint.receive(request)
        if request.error is not None:
            raise endpoint.failure(request.error)
        endpoint.prepare(job.prompt for job in self.jobs)
        before = await endpoint.counters()
        with self.progress.task(f"{way}, {load}", total=len(self.jobs)) as task:
            seed = self.plan.config.data.seed
            async with Lateness() as lateness:
                answers, seconds = await under_load(endpoint, self.jobs, load, seed, task.advance)
        at_once = load.value if load.kind == "concurrency" else None
        lateness.check(answers, f"{way}, {load}", at_once)
        after = await endpoint.counters()
        requests = [
            _kept(answer, endpoint.address) for answer in cast(list[EndpointRequest], answers)
        ]
        reported = after - before if after.rounds else None
        facts = {SERVED: f"{endpoint.model} at {endpoint.address.url}, prompts as {endpoint.takes}"}
        unit = LevelUnit(load, way, seconds, requests, facts, reported, lateness.ms)
        _check_answers(unit, endpoint.address)
        return unit

    def metrics(self, ways: Mapping[str, LevelUnit]) -> Metrics:
        """Return the metrics of a level. Those of a way are of the requests that it has answered,
        comparisons of those that both have.
        """
        categories = self.prompts.categories
        result = level_metrics(ways, self.plan.config.settings(Serve), categories)
        if "speculative" in ways:
            result |= by_category(categories, partial(_acceptance, ways["speculative"]))
        for way, unit in ways.items():
            result |= {f"{way}/{name}": value for name, value in _failures(unit).items()}
            if unit.client_late_ms is not None:
                result[f"{way}/client_late_ms"] = unit.client_late_ms
        if "speculative" in ways:
            counts, source = _reported_acceptance(ways["speculative"])
            gamma = counts.proposed // counts.rounds if counts.rounds else 0
            result |= counts.metrics(gamma) | {"acceptance/source": source}
            answered = ways["speculative"].answered
            told = [request.speculated for request in answered if request.counts is not None]
            result |= context_acceptance(told)
        pairs = answered_pairs(ways) if len(ways) == len(WAYS) else []
        if pairs and self.plan.config.sampling.greedy:
            result |= self._lossless(all(plain.tokens == fast.tokens for plain, fast in pairs))
        return result

    def _lossless(self, same: bool) -> Metrics:
        """Return whether the tokens are the same. In reduced precision, or an unknown one, they may
        differ.
        """
        is_exact = self.plan.dtype == torch.float32 and not self.plan.config.engine.is_remote
        passed = True if same else None
        if not same and is_exact:
            passed = False
        return {"lossless/identical": same, "lossless/passed": passed}


def run(plan: Plan, run: Run, progress: Progress) -> Outcome:
    """Measure every level that the run lacks; a line of the history for each, and the last one's
    figures as the run's own.
    """
    tokenizer = build.tokenizer(plan)
    prompts = prompts_of(plan, tokenizer)
    work = Measurement(plan, LevelUnits(run), prompts, jobs_of(plan, prompts), progress)
    asyncio.run(_measure_all(work, load(plan), tokenizer))
    results: Metrics = {**prompts.facts, "device": plan.device_name, **plan.sources, **work.limits}
    results |= work.units.units[-1].facts
    if plan.config.engine.has_our_drafts:
        results["weights/bytes"] = plan.weight_bytes
    chosen = [*work.levels, *levels_of(plan.config.settings(Serve))][-1]
    last = work.levels[chosen]
    results |= work.metrics(last)
    written = {way: unit.tokens for way, unit in last.items()}
    unknown: list[list[int]] = [[] for _ in prompts.tokens]
    outputs = Outputs(
        prompts, written.get("autoregressive", unknown), written.get("speculative", [])
    )
    rows = outputs.rows(plan.config.data.save_prompts)
    for row, request in zip(rows, last[WAYS[1]].requests if WAYS[1] in last else [], strict=False):
        if request.counts is not None:
            row["acceptance_length"] = request.counts.acceptance_length
    shown = view(plan, results, work.history, results[SERVED])
    return Outcome(results, rows, work.history, view=shown)


def _kept(request: EndpointRequest, address: Address) -> ServedRequest:
    """Return what is kept of a request to a server."""
    kept = ServedRequest.of(request)
    kept = replace(kept, counts=request.counts, num_retries=request.num_retries)
    if request.error is None:
        return kept
    return replace(kept, error=described(request.error, address.time_limit_s))


def _check_answers(unit: LevelUnit, address: Address) -> None:
    """Warn about requests that were sent again, whose times begin with the last attempt, and about
    those that failed. Raise EndpointFailed if nothing was answered.
    """
    where = f"{unit.way}, {unit.load}"
    total = len(unit.requests)
    if number := sum(request.num_retries > 0 for request in unit.requests):
        to_stderr(
            f"warning: {where}: {number} of {total} requests were sent again; their times begin"
            " with the last attempt"
        )
    reasons = Counter(request.error for request in unit.requests if request.error is not None)
    for reason, number in reasons.most_common(1):
        failed = f"{where}: {reasons.total()} of {total} requests failed"
        if not unit.answered:
            raise EndpointFailed(f"{address.name}: {failed}: {reason}")
        to_stderr(f"warning: {failed}: {reason} ({number} times){_lengths_in_words(unit)}")


def _failures(unit: LevelUnit) -> Metrics:
    """Return how many requests failed and were sent again, and the lengths of those that failed."""
    failed = [request for request in unit.requests if request.error is not None]
    result: Metrics = {"failed_requests": len(failed)}
    if failed:
        result["failed_context_len_mean"] = _mean_length(failed)
        result["answered_context_len_mean"] = _mean_length(unit.answered)
    result["retried_requests"] = sum(request.num_retries > 0 for request in unit.requests)
    return result


def _mean_length(requests: Sequence[ServedRequest]) -> float:
    return fmean(request.stats.prompt_tokens for request in requests) if requests else 0.0


def _lengths_in_words(unit: LevelUnit) -> str:
    """Return that the figures are of shorter prompts, where the longer ones have failed."""
    failed = _mean_length([request for request in unit.requests if request.error is not None])
    answered = _mean_length(unit.answered)
    if not unit.answered or failed <= answered:
        return ""
    return (
        f"; they have {failed:,.0f} prompt tokens on average and those that were answered"
        f" {answered:,.0f}: all figures are of shorter prompts"
    )


def _reported_acceptance(unit: LevelUnit) -> tuple[AcceptanceCounts, str]:
    """Return the counts of speculation, and what reports them: the answers, /metrics or nothing."""
    counts = sum_of_counts(request.counts for request in unit.answered)
    if unit.answered and counts is not None:
        return counts, "usage"
    if unit.reported is None:
        return AcceptanceCounts(), "unknown"
    after_first = sum(request.stats.tokens - 1 for request in unit.answered)
    return unit.reported.completed(after_first), "/metrics"


def _acceptance(unit: LevelUnit, rows: Sequence[int]) -> Metrics:
    """Return the acceptance of those of some requests that were answered; {} if the answers do not
    tell it.
    """
    requests = [unit.requests[row] for row in rows]
    counts = sum_of_counts(request.counts for request in requests if request.error is None)
    return {} if counts is None else short_acceptance(counts.metrics(0))


@dataclass
class Servers:
    """The servers of several ways of decoding, each started when it is first needed."""

    servable: Servable
    tokenizer: object | None
    warm_up: RequestSpec
    stack: AsyncExitStack  # which ends them
    endpoints: dict[str, Endpoint] = field(default_factory=dict)

    async def start(self, way: str) -> str:
        """Start the server of a way. Return its way, which a server without a baseline shows by
        whether it speculates.
        """
        address = await self.stack.enter_async_context(self.servable.serving(way))
        endpoint = await self.stack.enter_async_context(Endpoint(address, self.tokenizer))
        speculates = await endpoint.learn(self.warm_up.prompt, self.warm_up.params)
        self.endpoints[way or WAYS[speculates]] = endpoint
        return way or WAYS[speculates]

    async def endpoint(self, way: str) -> Endpoint:
        """Return the server of a way, started."""
        if way not in self.endpoints:
            await self.start(way)
        return self.endpoints[way]


async def _measure_all(work: Measurement, servable: Servable, tokenizer: object | None) -> None:
    """Measure all levels in all ways: in turns at each level, where the servers of both ways run at
    once.
    """
    scenario = work.plan.config.settings(Serve)
    for group in [servable.ways] if servable.in_turns else [(way,) for way in servable.ways]:
        async with AsyncExitStack() as stack:
            servers = Servers(servable, tokenizer, warm_up_of(work.jobs), stack)
            # One that runs already costs nothing, and a mistake in its address shows at once.
            ways = [await servers.start(way) for way in group] if servable.in_turns else group
            for level in levels_of(scenario):
                for way in ways:
                    await work.measure(servers, way, level)
            for way in ways if scenario.slo else ():
                search = LoadSearch(way, scenario)
                while search.level is not None:
                    search.tell(await work.measure(servers, way, search.level))
                work.limits |= search.metrics
