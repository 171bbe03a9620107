"""Drafts without PyTorch: the keys of each in the group `draft`, and the facts about what it needs.

A draft is a dataclass: its fields are its keys, with their rules; its class variables and methods are its facts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from omegaconf import MISSING

from magicdec.architectures import ModelConfig
from magicdec.errors import UserError
from magicdec.policies import CacheConfig
from magicdec.rules import at_least, one_of, ruled

# The most rows of a matmul for which a GPU reads codes. With more, decoding once costs less than rereading the input.
CODE_ROWS = 64


@dataclass(frozen=True)
class ModelChoice:
    """A model: the target, or an independent draft."""

    name: str = MISSING
    path: str | None = None
    weights: str = one_of("checkpoint", "random", default="checkpoint")
    architecture: ModelConfig | None = None


@dataclass(frozen=True)
class DraftConfig:
    """A draft: `name` is none or names a registered draft, which is a subclass.

    A subclass sets the facts below that differ for it, and declares its own keys as fields.
    """

    name: str = MISSING
    gamma: int | str = ruled(
        0, lambda value: value == "auto" or (isinstance(value, int) and value >= 0), "must be auto or at least 1"
    )
    synthetic_acceptance: float | None = ruled(None, lambda value: 0 <= value <= 1, "must be between 0 and 1")
    model: ModelChoice | None = None
    tensor_parallel: int | None = at_least(1, default=None)
    quantization: str = one_of("none", "int8", "int4", default="none")

    is_model: ClassVar[bool] = True  # a model over a KV cache; otherwise it has neither, and `cache` has no effect
    needs_model: ClassVar[bool] = False  # `model` names a model of its own
    shares_target: ClassVar[bool] = False  # `cache` is chosen from the target's own entries
    is_target: ClassVar[bool] = False  # the whole target proposes: with every entry, what it would decide
    serves: ClassVar[bool] = False  # rows can change hands between rounds, as serving needs
    one_rank: ClassVar[bool] = False  # works on one rank only
    is_predicted: ClassVar[bool] = True  # the cost model covers it
    label: ClassVar[str] = "{name}"  # the name under which acceptance is known; keys in braces are filled in
    title: ClassVar[str] = "draft {name}"  # how tables call it

    @classmethod
    def described(cls, text: str, config: Mapping[str, Any]) -> str:
        """Return `label` or `title` for a stored group `draft`."""
        return text.format_map({**config, "model": (config.get("model") or {}).get("name")})

    @property
    def own_model(self) -> ModelConfig | None:
        """Return the architecture of an independent model, as far as it is known."""
        return self.model.architecture if self.needs_model and self.model else None

    @property
    def extra_tokens(self) -> int:
        """Return the tokens beyond gamma that a round may write behind the committed ones."""
        return 0

    def caches(self, cache: CacheConfig) -> dict[str, CacheConfig]:
        """Return the draft's caches by key; `cache` is the group of that name."""
        return {"cache": cache} if self.is_model else {}

    @property
    def own_cache_key(self) -> str:
        """Return the key of the cache that the independent model drafts over."""
        return "draft.cache" if self.shares_target else "cache"

    def round_slots(self, gamma: int) -> int:
        """Return the slots beyond its budget that the independent model's cache needs in a round."""
        return gamma + 1

    def drafter(self, target: ModelConfig) -> ModelConfig:
        """Return the architecture of the model that drafts."""
        return self.own_model or target

    def mistakes(self) -> Iterator[str]:
        """Yield what is wrong with the values together."""
        if self.gamma == 0:
            yield f"draft.gamma=0: must be auto or at least 1 with draft={self.name}"
        if self.needs_model and self.model is None:
            valid = f"draft.name={self.name} needs one; choose draft={self.name} target@draft.model=NAME"
            yield f"draft.model=null: {valid}"
        if not self.is_model and self.quantization != "none":
            yield f"draft.quantization={self.quantization}: draft={self.name} has no weights; choose none"

    def check(self, target: ModelConfig) -> None:
        """Raise UserError where the values do not suit the target."""


@dataclass(frozen=True)
class SelfSpeculation(DraftConfig):
    """Self-speculation: the target over `cache`."""

    name: str = "self"
    shares_target = is_target = serves = True
    title = "self-speculation"


@dataclass(frozen=True)
class IndependentModel(DraftConfig):
    """A smaller model, with a cache of its own."""

    name: str = "model"
    needs_model = serves = True
    label, title = "{model}", "draft {model}"


@dataclass(frozen=True)
class PromptLookup(DraftConfig):
    """Prompt lookup, by suffixes of up to `max_ngram` tokens."""

    name: str = "ngram"
    max_ngram: int = at_least(1, default=8)
    is_model, serves = False, True


@dataclass(frozen=True)
class LayerSkip(DraftConfig):
    """The target's first `num_layers` layers."""

    name: str = "layer_skip"
    num_layers: int = at_least(0, default=0)
    shares_target = serves = True
    label = "{name}-{num_layers}"

    def drafter(self, target: ModelConfig) -> ModelConfig:
        """See DraftConfig.drafter."""
        return target.layers(0, self.num_layers)

    def check(self, target: ModelConfig) -> None:
        """See DraftConfig.check."""
        if not 1 <= self.num_layers < target.num_layers:
            valid = f"must be from 1 to {target.num_layers - 1}, less than the target's {target.num_layers} layers"
            raise UserError(f"draft.num_layers={self.num_layers}: {valid}")


@dataclass(frozen=True)
class Hierarchical(DraftConfig):
    """A small model over a `cache` of its own, which proposes `inner_gamma` tokens at a time to the target."""

    name: str = "hierarchical"
    inner_gamma: int = at_least(0, default=0)
    cache: CacheConfig | None = None
    needs_model = shares_target = serves = one_rank = True
    is_predicted = False
    title = "draft {model} below the target's own"

    @property
    def extra_tokens(self) -> int:
        """See DraftConfig.extra_tokens."""
        return self.inner_gamma

    def caches(self, cache: CacheConfig) -> dict[str, CacheConfig]:
        """See DraftConfig.caches."""
        return super().caches(cache) | ({"draft.cache": self.cache} if self.cache else {})

    def round_slots(self, gamma: int) -> int:
        """See DraftConfig.round_slots: the tokens that the model lacks, and all that a round may write."""
        return (gamma + 1) + gamma + self.inner_gamma + 1

    def mistakes(self) -> Iterator[str]:
        """See DraftConfig.mistakes."""
        yield from super().mistakes()
        if self.cache is None:
            valid = f"draft.name={self.name} needs one; choose draft={self.name} cache@draft.cache=NAME"
            yield f"draft.cache=null: {valid}"
        if self.inner_gamma < 1:
            yield f"draft.inner_gamma={self.inner_gamma}: must be at least 1"
