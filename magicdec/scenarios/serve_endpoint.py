"""scenario=serve on a server with OpenAI's API: one that runs already (engine=openai), or another
engine's own.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any, cast

import torch

from magicdec.config.schema import Serve
from magicdec.data import Prompts
from magicdec.errors import to_stderr
from magicdec.measure.contexts import Speculated, context_acceptance
from magicdec.measure.metrics import Metrics, by_category, short_acceptance
from magicdec.peers.answer import EndpointFailed, EndpointRequest
from magicdec.peers.base import Counts, Servable
from magicdec.peers.endpoint import Endpoint, described
from magicdec.planning import build
from magicdec.planning.resolved import Plan
from magicdec.scenarios.levels import (
    jobs_of,
    levels_of,
    prompts_of,
    speed_metrics,
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


@dataclass
class Level:
    """One level of load in one way: all requests, those that failed among them."""

    requests: list[EndpointRequest]
    seconds: float
    before: Counts  # the server's own counters
    after: Counts

    @property
    def answered(self) -> list[EndpointRequest]:
        """Return the requests that were answered."""
        return [request for request in self.requests if request.error is None]

    @property
    def speculated(self) -> list[Speculated]:
        """Return the speculation of each request whose answer tells it."""
        told = [(len(one.prompt), one.counts) for one in self.answered if one.counts is not None]
        return [Speculated(length, counts.rounds, counts.num_accepted) for length, counts in told]

    @property
    def acceptance(self) -> tuple[Counts, str]:
        """Return the counts of speculation, and what reports them: the answers, /metrics or
        nothing.
        """
        counts = [request.counts for request in self.answered]
        if counts and None not in counts:
            return sum(cast(list[Counts], counts), Counts()), "usage"
        if not self.after.rounds:
            return Counts(), "unknown"
        reported = self.after - self.before
        if not (reported.proposed or reported.accepted):  # SGLang counts rounds alone
            tokens = sum(request.num_tokens - 1 for request in self.answered)
            reported = Counts(reported.rounds, unplaced=max(0, tokens - reported.rounds))
        return reported, "/metrics"


@dataclass
class Measurement:
    """Everything that a run has measured so far."""

    plan: Plan
    run: Run
    prompts: Prompts
    jobs: list[RequestSpec]
    progress: Progress
    levels: dict[Load, dict[str, Level]] = field(default_factory=dict)
    facts: Metrics = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)

    async def measure(self, endpoint: Endpoint, way: str, level: Load) -> Metrics:
        """Measure a level of load after a short request; return its metrics. Raise EndpointFailed
        if nothing was answered.
        """
        # A server may reject the longer ones.
        shortest = min(self.jobs, key=lambda job: len(job.prompt))
        warm_up = warm_up_of([shortest])
        request = endpoint.generate(warm_up.prompt, warm_up.params).request
        await endpoint.receive(request)
        if request.error is not None:
            raise endpoint.failure(request.error)
        before = await endpoint.counters()
        with self.progress.task(f"{way}, {level}", total=len(self.jobs)) as task:
            seed = self.plan.config.data.seed
            requests, seconds = await under_load(endpoint, self.jobs, level, seed, task.advance)
        measured = Level(
            cast(list[EndpointRequest], requests), seconds, before, await endpoint.counters()
        )
        self._warn_of_retries(f"{way}, {level}", measured)
        errors = (request.error for request in measured.requests if request.error is not None)
        reasons = Counter(described(error, endpoint.address.time_limit_s) for error in errors)
        for reason, number in reasons.most_common(1):
            failed = f"{way}, {level}: {reasons.total()} of {len(requests)} requests failed"
            if not measured.answered:
                raise EndpointFailed(f"{endpoint.address.name}: {failed}: {reason}")
            lengths = _lengths_in_words(measured)
            to_stderr(f"warning: {failed}: {reason} ({number} times){lengths}")
        self.levels.setdefault(level, {})[way] = measured
        self.history[:] = [
            {load.kind: load.value} | self.metrics(ways) for load, ways in self.levels.items()
        ]
        self.run.write_lines("history", self.history)
        return self.metrics({way: measured})

    def _warn_of_retries(self, where: str, level: Level) -> None:
        """Say how many requests were sent again: the time until then is not in their latencies."""
        if number := sum(request.num_retries > 0 for request in level.requests):
            to_stderr(
                f"warning: {where}: {number} of {len(level.requests)} requests were sent again;"
                " their times begin with the last attempt"
            )

    def metrics(self, ways: dict[str, Level]) -> Metrics:
        """Return the metrics of a level. Requests that failed in either way are left out of
        both.
        """
        scenario, sampling = self.plan.config.settings(Serve), self.plan.config.sampling
        kept = [
            all(way.requests[n].error is None for way in ways.values())
            for n in range(len(self.jobs))
        ]
        result: Metrics = {}
        if any(kept):
            pairs = {
                name: ([r for r, keep in zip(way.requests, kept, strict=True) if keep], way.seconds)
                for name, way in ways.items()
            }
            places = [place for place, keep in enumerate(kept) if keep]
            categories = [
                self.prompts.categories[place] for place in places if self.prompts.categories
            ]
            result = speed_metrics(pairs, scenario, categories)
            if "speculative" in pairs:
                result |= by_category(categories, partial(_acceptance, pairs["speculative"][0]))
        for name, way in ways.items():
            failed = [request for request in way.requests if request.error is not None]
            result[f"{name}/failed_requests"] = len(failed)
            if failed:
                result[f"{name}/failed_context_len_mean"] = _mean_length(failed)
                result[f"{name}/answered_context_len_mean"] = _mean_length(way.answered)
            result[f"{name}/retried_requests"] = sum(one.num_retries > 0 for one in way.requests)
        if "speculative" in ways:
            counts, source = ways["speculative"].acceptance
            gamma = counts.proposed // counts.rounds if counts.rounds else 0
            result |= counts.metrics(gamma) | {"acceptance/source": source}
            result |= context_acceptance(ways["speculative"].speculated)
        if len(ways) == len(WAYS) and sampling.greedy and any(kept):
            plain = [request.tokens for request in pairs["autoregressive"][0]]
            fast = [request.tokens for request in pairs["speculative"][0]]
            result |= self._lossless(plain == fast)
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
    """Measure every level; a line of the history for each, and the last one's figures as the run's
    own.
    """
    tokenizer = build.tokenizer(plan)
    prompts = prompts_of(plan, tokenizer)
    work = Measurement(plan, run, prompts, jobs_of(plan, prompts), progress)
    asyncio.run(_measure_all(work, load(plan), tokenizer))
    results: Metrics = {**prompts.facts, "device": plan.device_name, **plan.sources, **work.facts}
    chosen = [*work.levels, *levels_of(plan.config.settings(Serve))][-1]
    last = work.levels[chosen]
    results |= work.metrics(last)
    written = {way: [request.tokens for request in level.requests] for way, level in last.items()}
    unknown: list[list[int]] = [[] for _ in prompts.tokens]
    outputs = Outputs(
        prompts, written.get("autoregressive", unknown), written.get("speculative", [])
    )
    rows = outputs.rows(plan.config.data.save_prompts)
    for row, request in zip(rows, last[WAYS[1]].requests if WAYS[1] in last else [], strict=False):
        if request.counts is not None:
            row["acceptance_length"] = request.counts.acceptance_length
    shown = view(plan, results, work.history, work.facts["engine/served"])
    return Outcome(results, rows, work.history, view=shown)


def _mean_length(requests: Sequence[EndpointRequest]) -> float:
    return fmean(len(request.prompt) for request in requests) if requests else 0.0


def _lengths_in_words(level: Level) -> str:
    """Return that the figures are of shorter prompts, where the longer ones have failed."""
    failed = _mean_length([request for request in level.requests if request.error is not None])
    answered = _mean_length(level.answered)
    if not level.answered or failed <= answered:
        return ""
    return (
        f"; they have {failed:,.0f} prompt tokens on average and those that were answered"
        f" {answered:,.0f}: all figures are of shorter prompts"
    )


def _acceptance(requests: Sequence[EndpointRequest], rows: Sequence[int]) -> Metrics:
    """Return the acceptance of some requests; {} if the answers do not tell it."""
    counts = [requests[row].counts for row in rows]
    return (
        {}
        if None in counts
        else short_acceptance(sum(cast(list[Counts], counts), Counts()).metrics(0))
    )


async def _measure_all(work: Measurement, servers: Servable, tokenizer: object | None) -> None:
    """Measure all levels in all ways: in turns at each level, where the servers of both ways run at
    once.
    """
    scenario = work.plan.config.settings(Serve)
    for ways in [servers.ways] if servers.in_turns else [(way,) for way in servers.ways]:
        async with AsyncExitStack() as stack:
            endpoints: dict[str, Endpoint] = {}
            for way in ways:
                address = await stack.enter_async_context(servers.serving(way))
                endpoint = await stack.enter_async_context(Endpoint(address, tokenizer))
                warm_up = warm_up_of(work.jobs)
                speculates = await endpoint.learn(warm_up.prompt, warm_up.params)
                endpoints[way or WAYS[speculates]] = endpoint
            work.facts["engine/served"] = (
                f"{endpoint.model} at {address.url}, prompts as {endpoint.takes}"
            )
            for level in levels_of(scenario):
                for way, endpoint in endpoints.items():
                    await work.measure(endpoint, way, level)
            for way, endpoint in endpoints.items() if scenario.slo else ():
                search = LoadSearch(way, scenario)
                while search.level is not None:
                    search.tell(await work.measure(endpoint, way, search.level))
                work.facts |= search.metrics
