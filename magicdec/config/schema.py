"""The configuration of a whole run."""

from typing import Annotated, Literal

from pydantic.dataclasses import dataclass

from magicdec.config.choices import CacheConfig, ModelChoice
from magicdec.config.groups import (
    BatchConfig,
    HardwareConfig,
    SamplingConfig,
    SweepConfig,
    WandbConfig,
)
from magicdec.config.registry import AttentionName, Cache, Data, Draft, Engine
from magicdec.config.scenario_settings import Compare, S, Scenario
from magicdec.inputs.rules import STRICT, must


@dataclass(frozen=True, config=STRICT)
class Config:
    """A whole run."""

    target: ModelChoice
    draft: Draft
    cache: Cache
    hardware: HardwareConfig
    batch: BatchConfig
    data: Data
    sampling: SamplingConfig
    attention: AttentionName
    engine: Engine
    scenario: Scenario
    wandb: WandbConfig
    sweep: SweepConfig
    tracker: Annotated[str | list[str], must("must be a name or a list of names, as in [a,b]")]
    plugins: list[str]
    runs_dir: str
    resume: Annotated[
        bool | Literal["any_version", "noisy"], must("must be true, false, any_version or noisy")
    ]

    def settings(self, kind: type[S]) -> S:
        """Return the group `scenario`, which must be of this kind."""
        assert isinstance(self.scenario, kind), f"scenario={self.scenario.name}"
        return self.scenario

    @property
    def reads_text(self) -> bool:
        """Return whether the run reads the data: a server cannot be profiled without prompts."""
        is_asked = self.engine.name != "native" and not self.scenario.predicts
        return self.scenario.reads_text or is_asked

    @property
    def speculates(self) -> bool:
        """Return whether the run has a draft."""
        return self.draft.name != "none"

    @property
    def stores_units(self) -> bool:
        """Return whether the parts of a run are stored one by one, so that others can be added."""
        return self.scenario.stores_units

    @property
    def compares_natively(self) -> bool:
        """Return whether our own engine decodes both ways, which the cost model can predict."""
        return isinstance(self.scenario, Compare) and self.engine.name == "native"

    @property
    def has_slots(self) -> bool:
        """Return whether requests are prefilled one by one while others run: under load, and by a
        server of ours.
        """
        is_own_server = self.engine.has_our_drafts and self.engine.name != "native"
        return self.scenario.serves or is_own_server

    @property
    def gammas(self) -> tuple[int, ...]:
        """Return the gammas that a run may use."""
        return self.draft.gammas(self.cache)

    @property
    def budgeted(self) -> dict[str, CacheConfig]:
        """Return the caches whose `budget` bounds what the draft reads, by key."""
        return self.draft.budgeted(self.cache)

    def budgets_of_at_least(self, num_tokens: int) -> list[str]:
        """Return the budgets that evict nothing of so many tokens, as key=value."""
        return [
            f"{key}.budget={limited.budget}"
            for key, limited in self.budgeted.items()
            if limited.budget >= num_tokens
        ]

    @property
    def models(self) -> dict[str, ModelChoice]:
        """Return the models of a run by the keys that choose them."""
        return {"target": self.target} | (
            {"draft.model": self.draft.model} if self.draft.model else {}
        )
