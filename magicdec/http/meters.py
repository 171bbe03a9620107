"""The counters that Prometheus reads from `/metrics`."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from magicdec.serving.engine import AsyncEngine, Stream


class Meters:
    """Counts and times of all requests."""

    def __init__(self, engine: AsyncEngine):
        self._registry = CollectorRegistry()
        named: Any = {"registry": self._registry, "namespace": "magicdec"}
        Gauge("requests_running", "Requests that have a slot", **named).set_function(lambda: engine.num_running)
        Gauge("requests_waiting", "Requests without a slot", **named).set_function(lambda: engine.num_waiting)
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
            "request_latency_s": Histogram("request_latency_seconds", "From arrival to the last token", **named),
        }

    def count(self, stream: Stream, end: str | None) -> None:
        """Count a request and how it ended; None if its client left."""
        request, stats = stream.request, stream.stats
        self.requests.labels(end or "cancelled").inc()
        amounts = (stats.prompt_tokens, stats.tokens, stats.proposed, stats.accepted)
        for counter, amount in zip(self.tokens.values(), amounts, strict=True):
            counter.inc(amount)
        for (_, accepted), number in request.rounds.items():
            self.rounds.inc(number)
            for position in range(accepted):
                self.accepted.labels(position).inc(number)
        for name, histogram in self.seconds.items():
            if (seconds := getattr(stats, name)) is not None:
                histogram.observe(seconds)

    def text(self) -> bytes:
        """Return all counters in Prometheus' format."""
        return generate_latest(self._registry)
