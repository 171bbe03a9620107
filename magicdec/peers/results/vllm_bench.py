"""JSON of `vllm bench serve --save-result` or `--append-result`.

https://docs.vllm.ai/en/latest/cli/bench/serve.html. Latencies are those of the client, TPOT without
the first token.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import FiniteFloat
from pydantic.dataclasses import dataclass

from magicdec.errors import UserError
from magicdec.inputs.rules import JSON, parse, parse_values
from magicdec.peers.results.base import Format, LoadResult, latency

LATENCIES = {
    "ttft": "time_to_first_token_ms",
    "tpot": "time_per_output_token_ms",
    "e2el": "request_latency_ms",
}


@dataclass(frozen=True, config=JSON)
class BenchResult:
    """The keys of a result that are read, besides its latencies."""

    completed: int
    duration: float
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    model_id: str | None = None
    max_concurrency: int | None = None
    request_rate: float | Literal["inf"] = "inf"
    spec_decode_acceptance_length: float | None = None
    spec_decode_acceptance_rate: float | None = None  # in percent


def levels(content: Mapping[str, Any], where: str) -> list[LoadResult]:
    """Return the level of a result."""
    bench = parse(BenchResult, content, where=where)
    if bench.completed < 1:
        raise UserError(f"{where}: completed={bench.completed}: no request was answered")
    metrics = {
        "tokens_per_second": bench.output_throughput,
        "requests_per_second": bench.request_throughput,
        "wall_s": bench.duration,
    }
    times = {
        key: value for key, value in content.items() if key.endswith("_ms") and value is not None
    }
    statistics = parse_values(FiniteFloat, times, where)
    for short, name in LATENCIES.items():
        names = {50: f"median_{short}_ms", 90: f"p90_{short}_ms", 99: f"p99_{short}_ms"}
        percentiles = {percent: statistics.get(key) for percent, key in names.items()}
        metrics |= latency(name, statistics.get(f"mean_{short}_ms"), percentiles)
    speculation = {}
    if bench.spec_decode_acceptance_length is not None:
        speculation["acceptance_length"] = bench.spec_decode_acceptance_length
    if bench.spec_decode_acceptance_rate is not None:
        speculation["acceptance_rate"] = bench.spec_decode_acceptance_rate / 100
    lengths = (
        bench.total_input_tokens / bench.completed,
        bench.total_output_tokens / bench.completed,
    )
    rate = None if bench.request_rate == "inf" else bench.request_rate
    return [LoadResult(bench.model_id, *lengths, bench.max_concurrency, rate, metrics, speculation)]


KEYS = {"completed", "total_input_tokens", "output_throughput"}
FORMAT = Format("vllm bench serve", "JSON of vllm bench serve --save-result", KEYS, levels)
