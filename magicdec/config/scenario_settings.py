"""The group `scenario`: a class for each scenario, with its keys and what it needs; those that
predict are in prediction_settings.py.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, TypeVar, get_args, get_type_hints

from pydantic import Field
from pydantic.dataclasses import dataclass
from typing_extensions import override

from magicdec.config.choices import CacheConfig, DraftConfig
from magicdec.config.groups import AutoOrCount, BatchConfig, Figure, Tolerance
from magicdec.config.prediction_settings import Predict, Search
from magicdec.config.scenario_needs import Needs
from magicdec.inputs.rules import (
    STRICT,
    Count,
    Counts,
    Fraction,
    Gammas,
    Percentage,
    Share,
    must,
)

SomeCounts = Annotated[Counts, Field(min_length=1)]


class MeasuresGrid(Needs):
    """The needs of a kind of run that measures a grid."""

    row_keys: ClassVar[tuple[str, ...]] = ("scenario.batch_sizes",)
    at: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "batch.size": "scenario.batch_sizes",
            "batch.context_len": "scenario.context_lens",
            "draft.gamma": "scenario.gammas",
        }
    )

    @override
    def replaced(self, draft: DraftConfig, cache: CacheConfig) -> Mapping[str, str]:
        # A point is a single batch.
        return {**super().replaced(draft, cache), "batch.num_batches": self.choice}


@dataclass(frozen=True, config=STRICT)
class Compare(Needs):
    """Speculative next to autoregressive decoding of the same prompts."""

    prefills_batches: ClassVar[bool] = True
    audits: ClassVar[bool] = True
    stores_units: ClassVar[bool] = True

    name: Literal["compare"]
    repeats: AutoOrCount
    profile_repeats: Count
    precision: Percentage = 0.02
    max_minutes: Figure = 10.0


@dataclass(frozen=True, config=STRICT)
class Profile(MeasuresGrid):
    """The times of a round's parts over a grid."""

    reads_text: ClassVar[bool] = False
    measures_acceptance: ClassVar[bool] = False
    stores_units: ClassVar[bool] = True
    files: ClassVar[tuple[str, ...]] = ("forward",)

    name: Literal["profile"]
    profile_repeats: Count
    batch_sizes: SomeCounts
    context_lens: SomeCounts
    gammas: Gammas
    expected_alpha: Share | None = None
    forward: str | None = None

    @override
    def largest(self, batch: BatchConfig) -> tuple[int, int]:
        return max(self.batch_sizes), self.longest(batch)

    @override
    def longest(self, batch: BatchConfig) -> int:
        return max(self.context_lens)


@dataclass(frozen=True, config=STRICT)
class Verify(MeasuresGrid):
    """A schedule of gammas next to every fixed gamma over a grid."""

    files: ClassVar[tuple[str, ...]] = ("file",)

    name: Literal["verify"]
    file: str | None
    steps: Literal["predicted", "measured"]
    batch_sizes: SomeCounts
    context_lens: SomeCounts
    gammas: Gammas
    repeats: Count
    tolerance: Tolerance

    @override
    def longest(self, batch: BatchConfig) -> int:
        return max(self.context_lens)


LOWEST_RATE = 1 / 64  # requests per second, below which a search tries none


@dataclass(frozen=True, config=STRICT)
class Serve(Needs):
    """Requests that come and go."""

    serves: ClassVar[bool] = True
    stores_units: ClassVar[bool] = True

    row_keys: ClassVar[tuple[str, ...]] = ("scenario.num_requests",)
    at: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"batch.num_batches": "scenario.num_requests"}
    )

    name: Literal["serve"]
    concurrencies: Counts
    rates: Annotated[list[Figure], must("must hold numbers from 1e-09 to 1e+12")]
    replays: Annotated[list[Figure], must("must hold numbers from 1e-09 to 1e+12")]
    num_requests: Count
    length_shares: Annotated[
        list[Fraction], must("must hold numbers above 0 and at most 1"), Field(min_length=1)
    ]
    latency_ms: Figure | None
    first_token_ms: Figure | None
    slo: Literal["concurrency", "rate"] | None
    slo_percentile: Literal[50, 90, 99]
    slo_most: Figure

    @property
    def bounds(self) -> dict[str, float | None]:
        """Return the bounds of latencies, by metric."""
        return {
            "time_per_output_token_ms": self.latency_ms,
            "time_to_first_token_ms": self.first_token_ms,
        }


S = TypeVar("S", Compare, Profile, Verify, Predict, Search, Serve)
Scenario = Annotated[
    Compare | Profile | Verify | Predict | Search | Serve, Field(discriminator="name")
]
# Their classes by name.
SCENARIOS: dict[str, type] = {
    get_args(get_type_hints(kind)["name"])[0]: kind for kind in S.__constraints__
}
