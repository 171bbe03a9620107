"""AIPerf's profile_export_aiperf.json (its inter token latency is our time per output token).

https://docs.nvidia.com/aiperf/reference/json-export-schema
"""

from collections.abc import Mapping
from typing import Any

from pydantic import AliasChoices, AliasPath, Field
from pydantic.dataclasses import dataclass

from magicdec.errors import UserError
from magicdec.inputs.rules import JSON, parse
from magicdec.peers.results.base import Format, LoadResult, latency

# Where the first of the models that were asked for is named.
MODEL = (
    AliasPath("input_config", "models", "items", 0, "name"),
    AliasPath("input_config", "endpoint", "model_names", 0),
)


@dataclass(frozen=True, config=JSON)
class Metric:
    """A metric: latencies are in milliseconds, durations in seconds."""

    avg: float
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None

    def latency(self, name: str) -> dict[str, float]:
        """Return the metrics of a latency."""
        return latency(name, self.avg, {50: self.p50, 90: self.p90, 99: self.p99})


@dataclass(frozen=True, config=JSON)
class Phase:
    """A phase of the load."""

    kind: str | None = None
    concurrency: int | None = None
    rate: float | None = Field(default=None, validation_alias=AliasChoices("rate", "request_rate"))


@dataclass(frozen=True, config=JSON)
class Export:
    """The keys of the file that are read. Only a streaming endpoint has the times of tokens.

    Older versions (0.6) have a single phase, `loadgen`, and name the models with the endpoint.
    """

    request_count: Metric
    request_throughput: Metric
    output_token_throughput: Metric
    input_sequence_length: Metric
    output_sequence_length: Metric
    request_latency: Metric | None = None
    time_to_first_token: Metric | None = None
    inter_token_latency: Metric | None = None
    inter_chunk_latency: Metric | None = None
    benchmark_duration: Metric | None = None
    # Rounds by accepted tokens.
    pooled_spec_decode_acceptance_histogram: dict[int, int] | None = None
    total_usage_accepted_prediction_tokens: Metric | None = None  # as servers like ours report them
    total_usage_rejected_prediction_tokens: Metric | None = None
    phases: list[Phase] = Field(
        default_factory=list, validation_alias=AliasPath("input_config", "phases")
    )
    loadgen: Phase | None = Field(
        default=None, validation_alias=AliasPath("input_config", "loadgen")
    )
    model: str | None = Field(default=None, validation_alias=AliasChoices(*MODEL))

    @property
    def phase(self) -> Phase:
        """Return the phase that was measured."""
        measured = [phase for phase in self.phases if phase.kind != "warmup"]
        return measured[-1] if measured else self.loadgen or Phase()


def levels(content: Mapping[str, Any], where: str) -> list[LoadResult]:
    """Return the level of a file."""
    export = parse(Export, content, where=where)
    if export.request_count.avg < 1:
        raise UserError(
            f"{where}: request_count={export.request_count.avg:g}: no request was answered"
        )
    metrics = {
        "tokens_per_second": export.output_token_throughput.avg,
        "requests_per_second": export.request_throughput.avg,
    }
    metrics |= {"wall_s": export.benchmark_duration.avg} if export.benchmark_duration else {}
    latencies = {
        "time_to_first_token_ms": export.time_to_first_token,
        "time_per_output_token_ms": export.inter_token_latency,
        "inter_chunk_latency_ms": export.inter_chunk_latency,
        "request_latency_ms": export.request_latency,
    }
    for name, summary in latencies.items():
        metrics |= summary.latency(name) if summary else {}
    phase = export.phase
    lengths = (export.input_sequence_length.avg, export.output_sequence_length.avg)
    return [
        LoadResult(
            export.model, *lengths, phase.concurrency, phase.rate, metrics, _speculation(export)
        )
    ]


def _speculation(export: Export) -> dict[str, float]:
    """Return the acceptance: by the rounds, or else by the usage of the answers, which counts no
    rounds.
    """
    rounds = export.pooled_spec_decode_acceptance_histogram or {}
    if number := sum(rounds.values()):
        return {
            "acceptance_length": 1
            + sum(accepted * times for accepted, times in rounds.items()) / number
        }
    totals = (
        export.total_usage_accepted_prediction_tokens,
        export.total_usage_rejected_prediction_tokens,
    )
    accepted, rejected = [total.avg if total else 0.0 for total in totals]
    return {"acceptance_rate": accepted / (accepted + rejected)} if accepted + rejected else {}


KEYS = {"request_throughput", "input_sequence_length", "input_config"}
FORMAT = Format("AIPerf", "AIPerf's profile_export_aiperf.json", KEYS, levels)
