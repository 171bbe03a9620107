"""The highest load that keeps bounds on latency, by doubling and then bisecting."""

import math
from collections.abc import Generator, Mapping
from typing import Any

from magicdec.config.schema import Serve
from magicdec.serving.load import Load

NEAR = 1.1  # rates whose ratio is at most this are not told apart
LOWEST_RATE = 1 / 64  # requests per second, below which no rate is tried


class Search:
    """A search in one way of decoding: measure `level` and `tell` its metrics, until it is None; then `highest` is the
    answer, or 0 if no level keeps the bounds.
    """

    def __init__(self, way: str, scenario: Serve):
        assert scenario.slo is not None
        self._way, self._scenario, self.highest = way, scenario, 0.0
        self._levels = highest(scenario.slo, scenario.slo_most)
        self.level: Load | None = next(self._levels)

    def tell(self, metrics: Mapping[str, Any]) -> None:
        """Go on with the metrics of the level."""
        scenario = self._scenario
        try:
            self.level = self._levels.send(keeps(metrics, self._way, scenario.slo_percentile, scenario.bounds))
        except StopIteration as end:
            self.level, self.highest = None, end.value

    @property
    def metrics(self) -> dict[str, float]:
        """Return what was found."""
        return {f"{self._way}/slo_{self._scenario.slo}": self.highest}


def highest(kind: str, most: float) -> Generator[Load, bool, float]:
    """Yield levels of load, and receive whether each keeps the bounds; return the highest that does, or 0.

    Numbers of users are found exactly, rates to a tenth. A level above one that breaks a bound is taken to break it.
    """
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


def keeps(metrics: Mapping[str, Any], way: str, percentile: int, bounds: Mapping[str, float | None]) -> bool:
    """Return whether every request was answered, and the percentile of each latency is within its bound."""
    if metrics.get(f"{way}/failed_requests"):
        return False
    figures = {name: metrics.get(f"{way}/{name}_p{percentile}") for name in bounds}
    return all(bound is None or (figures[name] or math.inf) <= bound for name, bound in bounds.items())
