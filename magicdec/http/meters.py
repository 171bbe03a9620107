"""The counts and times of all requests, as `/metrics` gives them to Prometheus."""

from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from magicdec.measure.metrics import Rounds, num_accepted, num_proposed
from magicdec.serving.engine import AsyncEngine
from magicdec.serving.request import Stats


class Meters:
    """Counts and times of all requests."""

    def __init__(self, engine: AsyncEngine):
        self._registry = CollectorRegistry()
        named: Any = {"registry": self._registry, "namespace": "magicdec"}
        Gauge("requests_running", "Requests that have a slot", **named).set_function(
            lambda: engine.num_running
        )
        Gauge("requests_waiting", "Requests without a slot", **named).set_function(
            lambda: engine.num_waiting
        )
        self.requests = Counter("requests", "Requests by how they ended", ["end"], **named)
        self.tokens = {
            name: Counter(f"{name}_tokens", f"Tokens: {name}", **named)
            for name in ("prompt", "generation", "proposed", "accepted")
        }
        self.rounds = Counter("rounds", "Rounds of speculation, as acceptance counts them", **named)
        position = "Rounds that accepted the proposal at this position"
        self.accepted = Counter("accepted_tokens_per_position", position, ["position"], **named)
        self.seconds = {
            "time_to_first_token_s": Histogram("time_to_first_token_seconds", "TTFT", **named),
            "time_per_output_token_s": Histogram("time_per_output_token_seconds", "TPOT", **named),
            "request_latency_s": Histogram(
                "request_latency_seconds", "From arrival to the last token", **named
            ),
        }

    def count(self, stats: Stats, amounts: "Amounts", end: str | None) -> None:
        """Count a request and how it ended; None if its client left."""
        self.requests.labels(end or "cancelled").inc()
        counted = (amounts.prompt, amounts.tokens, amounts.proposed, amounts.accepted)
        for counter, amount in zip(self.tokens.values(), counted, strict=True):
            counter.inc(amount)
        for (_, accepted), number in amounts.rounds.items():
            self.rounds.inc(number)
            for position in range(accepted):
                self.accepted.labels(position).inc(number)
        for name, histogram in self.seconds.items():
            if (seconds := getattr(stats, name)) is not None:
                histogram.observe(seconds)

    def text(self) -> bytes:
        """Return all counters in Prometheus' format."""
        return generate_latest(self._registry)


@dataclass(frozen=True)
class Amounts:
    """The tokens and rounds of an answer, up to its end: the engine may be further."""

    prompt: int
    tokens: int
    rounds: Rounds

    @property
    def proposed(self) -> int:
        """Return the proposed tokens."""
        return num_proposed(self.rounds)

    @property
    def accepted(self) -> int:
        """Return the accepted tokens."""
        return num_accepted(self.rounds)

    @property
    def usage(self) -> dict[str, Any]:
        """Return the `usage` of an answer, with proposals under the names of OpenAI's predicted
        outputs.
        """
        details = {
            "accepted_prediction_tokens": self.accepted,
            "rejected_prediction_tokens": self.proposed - self.accepted,
            "rounds": self.rounds.total(),
        }
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.tokens,
            "total_tokens": self.prompt + self.tokens,
            "completion_tokens_details": details,
        }
