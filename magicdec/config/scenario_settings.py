"""The group `scenario`: a class for each scenario, with its keys and what it needs."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, TypeVar, get_args, get_type_hints

from pydantic import Field
from pydantic.dataclasses import dataclass
from typing_extensions import override

from magicdec.config.choices import CacheConfig, DraftConfig
from magicdec.config.groups import AutoOrCount, BatchConfig, Figure
from magicdec.inputs.rules import (
    STRICT,
    Count,
    Counts,
    FileName,
    Fraction,
    Gamma,
    Gammas,
    Percentage,
    Share,
    must,
)

SomeCounts = Annotated[Counts, Field(min_length=1)]
Tolerance = Annotated[float, Field(ge=0, lt=1), must("must be at least 0 and below 1")]


class Needs:
    """The needs of a kind of run, with those of most as defaults."""

    name: str
    predicts: ClassVar[bool] = False  # it loads no weights, and measures nothing
    searches: ClassVar[bool] = False  # for drafts and caches of its own
    reads_text: ClassVar[bool] = True
    measures_acceptance: ClassVar[bool] = True
    prefills_batches: ClassVar[bool] = False  # those of the data, which jobs of a sweep share
    serves: ClassVar[bool] = False  # requests that come and go
    audits: ClassVar[bool] = False  # the logits of what was written
    stores_units: ClassVar[bool] = False  # parts of the work, each when it ends
    # Its result depends on other runs in the store, so that no sweep skips it.
    reads_store: ClassVar[bool] = False
    # Keys of its own that name a file, whose content decides the result.
    files: ClassVar[tuple[str, ...]] = ()
    # The keys that say how many prompts it needs.
    row_keys: ClassVar[tuple[str, ...]] = ("batch.size", "batch.num_batches")
    # Keys of its own that replace general ones.
    at: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def replaced(self, draft: DraftConfig, cache: CacheConfig) -> Mapping[str, str]:
        """Return the keys, or whole groups, that have no effect, each with the choice that is the
        reason and, after a semicolon, what to do instead.
        """
        return {general: f"{self.choice}; set {own}" for general, own in self.at.items()}

    @property
    def choice(self) -> str:
        """Return the choice of this scenario, as it is typed."""
        return f"scenario={self.name}"

    def key_of(self, general: str) -> str:
        """Return the key that this scenario has in place of a general one, or the general one."""
        return self.at.get(general, general)

    def largest(self, batch: BatchConfig) -> tuple[int, int]:
        """Return the rows and the context of the largest batch; `batch.size` is resolved."""
        return int(batch.size), self.longest(batch)

    def longest(self, batch: BatchConfig) -> int:
        """Return the longest context."""
        return batch.context_len


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


@dataclass(frozen=True, config=STRICT)
class Assumed(Needs):
    """An assumed acceptance: alpha itself, or what an engine reported at a gamma of its own."""

    predicts: ClassVar[bool] = True
    reads_text: ClassVar[bool] = False
    measures_acceptance: ClassVar[bool] = False
    reads_store: ClassVar[bool] = True

    alpha: Share | None
    acceptance_rate: Share | None
    acceptance_length: Annotated[float | None, Field(ge=1), must("must be at least 1, or null")]
    acceptance_gamma: Gamma | None
    stack: str | None
    match_share: Share | None
    routing: str | None

    @override
    def replaced(self, draft: DraftConfig, cache: CacheConfig) -> Mapping[str, str]:
        unread = {"batch.num_batches": self.choice}
        if self.looks_nothing_up(draft):
            reason = f"draft={draft.name}: it is the share of a lookup's rounds"
            unread["scenario.match_share"] = reason
        return unread

    def looks_nothing_up(self, draft: DraftConfig) -> bool:
        """Return whether no predicted draft is a lookup, which `match_share` is of."""
        return draft.is_model

    def assumes(self, draft: DraftConfig) -> bool:
        """Return whether the acceptance of the run's own draft is given."""
        given = (self.alpha, self.length, draft.acceptance, draft.synthetic_acceptance)
        return any(value is not None for value in given)

    def mistakes(self) -> Iterator[str]:
        """Yield what contradicts itself."""
        given = [
            key
            for key in ("alpha", "acceptance_rate", "acceptance_length")
            if getattr(self, key) is not None
        ]
        if len(given) > 1:
            yield f"scenario.{given[0]} and scenario.{given[1]} say the same thing twice; give one"
        reported = [key for key in given if key != "alpha"]
        if reported and self.acceptance_gamma is None:
            yield (
                f"scenario.{reported[0]} needs scenario.acceptance_gamma: how many tokens were"
                " proposed per round when it was measured (vLLM's num_speculative_tokens)"
            )
        if self.acceptance_gamma is not None and not reported:
            yield (
                "scenario.acceptance_gamma has no effect without scenario.acceptance_rate or"
                " acceptance_length"
            )
        if (
            self.length is not None
            and self.acceptance_gamma
            and self.length > self.acceptance_gamma + 1
        ):
            most = self.acceptance_gamma + 1
            yield (
                f"scenario.acceptance_length={self.length} is above scenario.acceptance_gamma + 1 ="
                f" {most}"
            )

    @property
    def length(self) -> float | None:
        """Return the reported tokens per round, bonus token included; None where nothing was
        reported.
        """
        if self.acceptance_rate is not None and self.acceptance_gamma is not None:
            return 1 + self.acceptance_gamma * self.acceptance_rate
        return self.acceptance_length


@dataclass(frozen=True, config=STRICT)
class Predict(Assumed):
    """A prediction by the cost model."""

    name: Literal["predict"]
    gammas: Gammas
    critical_batches: Annotated[
        Counts, must("must be a smaller and a larger batch", lambda b: len(b) == 2 and b[0] < b[1])
    ]


@dataclass(frozen=True, config=STRICT)
class Search(Assumed):
    """A search for the best configuration by the cost model."""

    searches: ClassVar[bool] = True

    name: Literal["plan"]
    drafts: Annotated[list[str], Field(min_length=1)]
    policies: Annotated[list[str], Field(min_length=1)]
    gammas: Gammas
    batch_sizes: Counts
    context_lens: Counts
    workload: Annotated[
        list[list[Count]],
        must(
            "must hold pairs of prompt and output tokens, as in [[4000,500]]",
            lambda v: all(len(p) == 2 for p in v),
        ),
    ]
    latency_ms: Figure | None
    schedule: Literal["vllm", "vllm_by_context", "sglang", "tensorrt_llm", "llamacpp"] | None
    tolerance: Tolerance
    least_gamma: Literal[0, 1]
    save_as: FileName

    @override
    def replaced(self, draft: DraftConfig, cache: CacheConfig) -> Mapping[str, str]:
        unread = dict(super().replaced(draft, cache))
        if draft.synthetic_acceptance is None:
            unread["draft.gamma"] = f"{self.choice}; set scenario.gammas"
        if self.is_of_own_draft(draft):
            return unread
        unread["cache.budget"] = (
            f"{self.choice}; it tries budgets of its own: give scenario.alpha to fix one"
        )
        if draft.name != "none" and not self.searches_for(draft):
            unread["draft"] = f"{self.choice}; set scenario.drafts=[{draft.name}]"
        if cache.policy not in self.policies:
            unread["cache"] = f"{self.choice}; set scenario.policies=[{cache.policy}]"
        return unread

    @override
    def looks_nothing_up(self, draft: DraftConfig) -> bool:
        return False  # drafts of its own are named, and may be lookups

    def is_of_own_draft(self, draft: DraftConfig) -> bool:
        """Return whether the run's own draft is searched alone: its acceptance is given, or a
        schedule is made for it.
        """
        return self.schedule is not None or self.assumes(draft)

    def searches_for(self, draft: DraftConfig) -> bool:
        """Return whether the run's own draft is among those that are searched, by its name or that
        of its model.
        """
        return draft.name in self.drafts or (
            draft.model is not None and draft.model.name in self.drafts
        )


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
