"""The scenarios that predict, with their keys and what they need."""

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass
from typing_extensions import override

from magicdec.config.choices import CacheConfig, DraftConfig
from magicdec.config.groups import Figure, Tolerance
from magicdec.config.scenario_needs import Needs
from magicdec.inputs.rules import STRICT, Count, Counts, FileName, Gamma, Gammas, Share, must


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
