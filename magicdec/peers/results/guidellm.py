"""GuideLLM's benchmarks.json (its inter token latency is our time per output token; its own counts the first one).

https://github.com/vllm-project/guidellm, docs/guides/metrics.md and docs/guides/outputs.md
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from magicdec.errors import UserError
from magicdec.peers.results.base import Format, LoadResult, latency
from magicdec.rules import JSON, parse


@dataclass(frozen=True, config=JSON)
class Summary:
    """A distribution."""

    mean: float
    percentiles: dict[str, float] = field(default_factory=dict)

    def latency(self, name: str, scale: float = 1.0) -> dict[str, float]:
        """Return the metrics of a latency; `scale` makes milliseconds of it."""
        known = {percent: self.percentiles.get(f"p{percent}") for percent in (50, 90, 99)}
        return latency(name, self.mean, known, scale)


@dataclass(frozen=True, config=JSON)
class ByStatus:
    """A distribution over the requests that were answered; there are others."""

    successful: Summary


@dataclass(frozen=True, config=JSON)
class Totals:
    """Numbers of requests."""

    successful: int


@dataclass(frozen=True, config=JSON)
class Metrics:
    """The metrics of a benchmark that are read."""

    request_totals: Totals
    requests_per_second: ByStatus
    output_tokens_per_second: ByStatus
    prompt_token_count: ByStatus
    output_token_count: ByStatus
    request_latency: ByStatus  # in seconds
    time_to_first_token_ms: ByStatus
    inter_token_latency_ms: ByStatus


@dataclass(frozen=True, config=JSON)
class Strategy:
    """The load."""

    type_: str
    max_concurrency: int | None = None
    rate: float | None = None


@dataclass(frozen=True, config=JSON)
class Backend:
    """The server."""

    model: str | None = None


@dataclass(frozen=True, config=JSON)
class Config:
    """The configuration of a benchmark."""

    strategy: Strategy
    backend: Backend = field(default_factory=Backend)


@dataclass(frozen=True, config=JSON)
class Benchmark:
    """One level of load."""

    config: Config
    metrics: Metrics
    duration: float


@dataclass(frozen=True, config=JSON)
class Metadata:
    """The version of the report's form."""

    version: Literal[2]  # of GuideLLM 0.8


@dataclass(frozen=True, config=JSON)
class Report:
    """The file."""

    metadata: Metadata
    benchmarks: list[Benchmark]


def levels(content: Mapping[str, Any], where: str) -> list[LoadResult]:
    """Return the levels of a report."""
    found = [_level(one) for one in parse(Report, content, where=where).benchmarks if _answered(one)]
    if not found:
        raise UserError(f"{where}: no request was answered")
    return found


def _answered(one: Benchmark) -> int:
    return one.metrics.request_totals.successful


def _level(one: Benchmark) -> LoadResult:
    metrics, strategy = one.metrics, one.config.strategy
    figures = {
        "tokens_per_second": metrics.output_tokens_per_second.successful.mean,
        "requests_per_second": metrics.requests_per_second.successful.mean,
        "wall_s": one.duration,
    }
    figures |= metrics.time_to_first_token_ms.successful.latency("time_to_first_token_ms")
    figures |= metrics.inter_token_latency_ms.successful.latency("time_per_output_token_ms")
    figures |= metrics.request_latency.successful.latency("request_latency_ms", 1e3)
    return LoadResult(
        one.config.backend.model,
        metrics.prompt_token_count.successful.mean,
        metrics.output_token_count.successful.mean,
        1 if strategy.type_ == "synchronous" else strategy.max_concurrency,
        strategy.rate,
        figures,
    )


def is_own(content: Mapping[str, Any]) -> bool:
    """Return whether a JSON object is a report of this tool."""
    return {"benchmarks", "metadata"} <= content.keys()


FORMAT = Format("GuideLLM", "GuideLLM's benchmarks.json", is_own, levels)
