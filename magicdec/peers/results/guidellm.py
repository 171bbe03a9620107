"""GuideLLM's benchmarks.json (its inter token latency is our time per output token; its own counts
the first one).

https://github.com/vllm-project/guidellm, docs/guides/metrics.md and docs/guides/outputs.md
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from pydantic import AliasPath, Field
from pydantic.dataclasses import dataclass

from magicdec.errors import UserError
from magicdec.inputs.rules import JSON, parse
from magicdec.peers.results.base import Format, LoadResult, latency


def _metric(name: str) -> Any:
    """Return the field of a metric: its distribution over the requests that were answered; there
    are others.
    """
    return Field(validation_alias=AliasPath("metrics", name, "successful"))


@dataclass(frozen=True, config=JSON)
class Summary:
    """A distribution."""

    mean: float
    percentiles: dict[str, float] = field(default_factory=dict)

    def latency(self, name: str, scale: float = 1.0) -> dict[str, float]:
        """Return the metrics of a latency; `scale` makes milliseconds of it."""
        percentiles = {percent: self.percentiles.get(f"p{percent}") for percent in (50, 90, 99)}
        return latency(name, self.mean, percentiles, scale)


@dataclass(frozen=True, config=JSON)
class Strategy:
    """The load."""

    type_: str
    max_concurrency: int | None = None
    rate: float | None = None


@dataclass(frozen=True, config=JSON)
class Benchmark:
    """One level of load: the keys that are read."""

    duration: float
    strategy: Strategy = Field(validation_alias=AliasPath("config", "strategy"))
    answered: int = _metric("request_totals")
    requests_per_second: Summary = _metric("requests_per_second")
    output_tokens_per_second: Summary = _metric("output_tokens_per_second")
    prompt_token_count: Summary = _metric("prompt_token_count")
    output_token_count: Summary = _metric("output_token_count")
    request_latency: Summary = _metric("request_latency")  # in seconds
    time_to_first_token_ms: Summary = _metric("time_to_first_token_ms")
    inter_token_latency_ms: Summary = _metric("inter_token_latency_ms")
    model: str | None = Field(
        default=None, validation_alias=AliasPath("config", "backend", "model")
    )

    @property
    def level(self) -> LoadResult:
        """Return the level under our names."""
        figures = {
            "tokens_per_second": self.output_tokens_per_second.mean,
            "requests_per_second": self.requests_per_second.mean,
            "wall_s": self.duration,
        }
        figures |= self.time_to_first_token_ms.latency("time_to_first_token_ms")
        figures |= self.inter_token_latency_ms.latency("time_per_output_token_ms")
        figures |= self.request_latency.latency("request_latency_ms", 1e3)
        users = 1 if self.strategy.type_ == "synchronous" else self.strategy.max_concurrency
        lengths = (self.prompt_token_count.mean, self.output_token_count.mean)
        return LoadResult(self.model, *lengths, users, self.strategy.rate, figures)


@dataclass(frozen=True, config=JSON)
class Report:
    """The file."""

    benchmarks: list[Benchmark]
    # Of its form: GuideLLM 0.8's.
    version: Literal[2] = Field(validation_alias=AliasPath("metadata", "version"))


def levels(content: Mapping[str, Any], where: str) -> list[LoadResult]:
    """Return the levels of a report."""
    answered = [
        benchmark.level
        for benchmark in parse(Report, content, where=where).benchmarks
        if benchmark.answered
    ]
    if not answered:
        raise UserError(f"{where}: no request was answered")
    return answered


FORMAT = Format("GuideLLM", "GuideLLM's benchmarks.json", {"benchmarks", "metadata"}, levels)
