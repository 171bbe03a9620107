"""Load on an engine and its latencies: a closed loop (a number of users) or an open one (a rate of
arrivals, or those of a trace). The highest load that keeps bounds on latency, by doubling and then
bisecting.
"""

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from typing_extensions import override

from magicdec.config.scenario_settings import LOWEST_RATE, Serve
from magicdec.serving.request import Params, Request, Stats

PERCENTILES = (50, 90, 99)
NEAR = 1.1  # rates whose ratio is at most this are not told apart


@dataclass(frozen=True)
class RequestSpec:
    """A request that users will send, once at each level of load."""

    prompt: list[int]
    params: Params
    arrival_s: float = 0.0  # in a trace, since the first


# Sends a request and waits for its end.
Answered = Callable[[RequestSpec], Coroutine[Any, Any, Request]]


@dataclass(frozen=True)
class Load:
    """A level of load: `concurrency` users, requests that arrive at a `rate` per second, or the
    `replay` of a trace at a multiple of its speed.
    """

    kind: str
    value: float

    @override
    def __str__(self) -> str:
        words = {
            "concurrency": "concurrency {:g}",
            "rate": "{:g} requests/s",
            "replay": "the trace at {:g}x",
        }
        return words[self.kind].format(self.value)


class Answering(Protocol):
    """An engine that can be under load: ours, or a server."""

    def generate(self, prompt: list[int], params: Params) -> Any:
        """Return an asynchronous iterator over chunks, whose `request` is what was sent."""


async def under_load(
    engine: Answering,
    jobs: Sequence[RequestSpec],
    level: Load,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> tuple[list[Request], float]:
    """Send all jobs; return their requests, in the order of the jobs, and the seconds until the
    last answer.
    """

    async def answered(job: RequestSpec) -> Request:
        """Send one request and wait for its end; raise the error that it failed with."""
        stream = engine.generate(job.prompt, job.params)
        try:
            async for _ in stream:
                pass
        except RuntimeError as error:
            raise stream.request.error or error from None
        if progress is not None:
            progress(1)
        return stream.request

    start = perf_counter()
    if level.kind == "concurrency":
        requests = await _closed(jobs, int(level.value), answered)
    else:
        requests = await _open(jobs, _arrivals(jobs, level, seed), answered)
    return requests, perf_counter() - start


async def _closed(jobs: Sequence[RequestSpec], users: int, answered: Answered) -> list[Request]:
    """Let each user send the next job as soon as the previous one is answered."""
    done: dict[int, Request] = {}
    left = iter(enumerate(jobs))

    async def user() -> None:
        for number, job in left:
            done[number] = await answered(job)

    await asyncio.gather(*(user() for _ in range(users)))
    return [done[number] for number in range(len(jobs))]


async def _open(
    jobs: Sequence[RequestSpec], arrivals_s: Sequence[float], answered: Answered
) -> list[Request]:
    """Send jobs at their times, however many are still being answered."""
    start = asyncio.get_running_loop().time()

    async def sent(job: RequestSpec, arrival_s: float) -> Request:
        await asyncio.sleep(start + arrival_s - asyncio.get_running_loop().time())
        return await answered(job)

    return list(await asyncio.gather(*map(sent, jobs, arrivals_s)))


def _arrivals(jobs: Sequence[RequestSpec], level: Load, seed: int) -> list[float]:
    """Return when jobs arrive, in seconds since the first: as recorded, or as a Poisson process."""
    if level.kind == "replay":
        return [job.arrival_s / level.value for job in jobs]
    generator = random.Random(seed)
    return [0.0, *accumulate(generator.expovariate(level.value) for _ in jobs[1:])]


def load_metrics(
    stats: Sequence[Stats],
    seconds: float,
    latency_ms: float | None = None,
    first_token_ms: float | None = None,
) -> dict[str, float]:
    """Return throughput and latencies of one level from its requests' figures, without a prefix.

    A latency is its mean, and `<name>_p50`, `_p90`, `_p99`. `time_per_output_token_ms` is vLLM's
    TPOT and AIPerf's inter token latency; `inter_chunk_latency_ms`, over all chunks of all
    requests, is vLLM's ITL and AIPerf's inter chunk latency. `tokens_per_second_per_user` is the
    mean of 1 / TPOT. `goodput_rps`, with a bound, counts requests whose TPOT and time to first
    token keep within the bounds.
    """
    times = [s.time_per_output_token_s for s in stats if s.time_per_output_token_s]
    metrics = {
        "tokens_per_second": sum(s.tokens for s in stats) / seconds,
        "tokens_per_second_per_user": fmean(1 / time for time in times) if times else math.nan,
        "requests_per_second": len(stats) / seconds,
        "wall_s": seconds,
        **latency_metrics(stats),
    }
    if latency_ms is not None or first_token_ms is not None:
        metrics["goodput_rps"] = (
            sum(_is_good(s, latency_ms, first_token_ms) for s in stats) / seconds
        )
    return metrics


def latency_metrics(stats: Sequence[Stats]) -> dict[str, float]:
    """Return the latencies of some requests, each as its mean and percentiles."""
    latencies = {
        "time_to_first_token_ms": [
            s.time_to_first_token_s for s in stats if s.time_to_first_token_s is not None
        ],
        "time_per_output_token_ms": [
            s.time_per_output_token_s for s in stats if s.time_per_output_token_s
        ],
        "inter_chunk_latency_ms": [gap for s in stats for gap in s.inter_chunk_s],
        "request_latency_ms": [
            s.request_latency_s for s in stats if s.request_latency_s is not None
        ],
    }
    metrics: dict[str, float] = {}
    for name, values in latencies.items():
        measured = values or [math.nan]
        metrics[name] = 1e3 * fmean(measured)
        for percentile in PERCENTILES:
            metrics[f"{name}_p{percentile}"] = 1e3 * float(np.percentile(measured, percentile))
    return metrics


def _is_good(stats: Stats, latency_ms: float | None, first_token_ms: float | None) -> bool:
    bounded = (
        (stats.time_per_output_token_s, latency_ms),
        (stats.time_to_first_token_s, first_token_ms),
    )
    return all(
        bound is None or seconds is None or 1e3 * seconds <= bound for seconds, bound in bounded
    )


class LoadSearch:
    """A search in one way of decoding: measure `level` and `tell` its metrics, until it is None;
    then `highest` is the answer, or 0 if no level keeps the bounds.
    """

    def __init__(self, way: str, scenario: Serve):
        assert scenario.slo is not None
        self._way, self._scenario = way, scenario
        self.highest = 0.0
        self._levels = highest(scenario.slo, scenario.slo_most)
        self.level: Load | None = next(self._levels, None)

    def tell(self, metrics: Mapping[str, Any]) -> None:
        """Go on with the metrics of the level."""
        scenario = self._scenario
        try:
            self.level = self._levels.send(
                keeps(metrics, self._way, scenario.slo_percentile, scenario.bounds)
            )
        except StopIteration as end:
            self.level, self.highest = None, end.value

    @property
    def metrics(self) -> dict[str, float]:
        """Return what was found."""
        return {f"{self._way}/slo_{self._scenario.slo}": self.highest}


def highest(kind: str, most: float) -> Generator[Load, bool, float]:
    """Yield levels of load, and receive whether each keeps the bounds; return the highest that
    does, or 0.

    Numbers of users are found exactly, rates to a tenth. A level above one that breaks a bound is
    taken to break it.
    """
    most = math.floor(most) if kind == "concurrency" else most
    low, high, value = 0.0, math.inf, 1.0
    while value <= most and high == math.inf:
        kept = yield Load(kind, value)
        if kept:
            low, value = value, 2 * value
        else:
            high = value
    high = min(high, most + 1 if kind == "concurrency" else most)
    while (between := _between(kind, low, high)) is not None:
        kept = yield Load(kind, between)
        if kept:
            low = between
        else:
            high = between
    return low


def _between(kind: str, low: float, high: float) -> float | None:
    if kind == "concurrency":
        return (low + high) // 2 if high - low > 1 else None
    if low == 0:
        return high / 2 if high / 2 >= LOWEST_RATE else None
    return math.sqrt(low * high) if high / low > NEAR else None


def keeps(
    metrics: Mapping[str, Any], way: str, percentile: int, bounds: Mapping[str, float | None]
) -> bool:
    """Return whether every request was answered, and the percentile of each latency is within its
    bound. A latency that no request has, such as the TPOT of a single token, breaks none.
    """
    if metrics.get(f"{way}/failed_requests"):
        return False
    for name, bound in bounds.items():
        # Of no request: not a number or, as it is stored, null.
        figure = metrics.get(f"{way}/{name}_p{percentile}", math.inf)
        if bound is not None and figure is not None and figure > bound:
            return False
    return True
