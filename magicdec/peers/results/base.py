"""One level of load as a load generator has measured it, and the interface of a format."""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from magicdec.serving.load_generator import PERCENTILES


@dataclass(frozen=True)
class LoadResult:
    """A level of load on a server. Metrics are named as in serving/load_generator.py, those of
    speculation as for a run.
    """

    model: str | None
    context_len: float  # prompt tokens, on average
    generate_len: float  # new tokens, on average
    concurrency: int | None  # at most so many requests at a time
    # Requests per second that arrive; None: one arrives as soon as another is answered.
    rate: float | None
    metrics: Mapping[str, float]
    # Empty where the file reports none.
    speculation: Mapping[str, float] = field(default_factory=dict)

    @property
    def load(self) -> dict[str, float]:
        """Return the load as the history of a run names it; empty where nothing bounds it."""
        if self.rate is not None:
            return {"rate": self.rate}
        return {} if self.concurrency is None else {"concurrency": self.concurrency}


class Format(NamedTuple):
    """The files of one tool."""

    tool: str
    files: str  # for messages
    keys: Set[str]  # by which a JSON object is known to be one
    # Of a JSON object; the text is its place in errors.
    levels: Callable[[Mapping[str, Any], str], list[LoadResult]]


def latency(
    name: str, mean: float | None, percentiles: Mapping[int, float | None], scale: float = 1.0
) -> dict:
    """Return a latency in milliseconds as metrics: its mean and the percentiles that are known."""
    figures = {name: mean} | {
        f"{name}_p{percent}": percentiles.get(percent) for percent in PERCENTILES
    }
    return {key: scale * value for key, value in figures.items() if value is not None}
