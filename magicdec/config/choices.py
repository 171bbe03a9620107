"""The bases of what is chosen by name: the keys that all choices of a group share, and the facts
that others ask for.

A choice is a frozen dataclass: its fields are its keys, with their rules; its class variables and
methods are its facts. Caches allocate by these facts, and the cost model counts by them. Bytes are
those of one row.
"""

import math
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass as plain_dataclass
from dataclasses import fields
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from magicdec.architectures.model_config import ModelConfig
from magicdec.config.omega import alpha_from_acceptance_length
from magicdec.errors import UserError
from magicdec.inputs.rules import (
    LARGEST,
    MOST_GAMMA,
    STRICT,
    Count,
    Drawn,
    GammaOr0,
    Natural,
    must,
)

# Round: once a round; step: in every draft step.
Selects = Literal["never", "prefill", "round", "step"]
# Step: of every draft step's attention; verification: of a verification that a selection follows.
Scores = Literal["never", "step", "verification"]

FP32, INT32, INT64 = 4, 4, 8  # bytes
AUTO_GAMMAS = (1, 2, 3, 5, 8)  # what draft.gamma=auto chooses among: a captured round each
# The most rows of a matmul for which a GPU reads codes of weights (draft.quantization). With more,
# decoding once costs less than rereading the input.
CODE_ROWS = 64
CODE_GROUP = 32  # weights that share a scale


@dataclass(frozen=True, config=STRICT)
class CacheConfig:
    """The cache of a draft: `policy` names a registered policy, and `budget` is its size in
    committed entries.

    A policy is a subclass. It sets the facts below that differ for it, and declares its own keys as
    fields.
    """

    policy: str = ""
    budget: Annotated[int, Field(le=LARGEST)] = 0

    # Owns a copy of `budget` entries; others keep all, for a self-draft the target's.
    compact: ClassVar[bool] = False
    reads_everything: ClassVar[bool] = False  # the budget does not limit what a draft step reads
    quantized: ClassVar[bool] = False  # a draft step reads codes
    selects: ClassVar[Selects] = "never"  # when it selects entries by their attention
    scores: ClassVar[Scores] = "never"  # what computes the attention of every entry in a round
    # Scores the context by running its tokens again, which recurrent layers cannot.
    replays: ClassVar[bool] = False
    # Works on the target's own cache, so no independent draft can use it.
    needs_target: ClassVar[bool] = False
    # Positions stay within the draft's trained context, however long the text.
    bounds_positions: ClassVar[bool] = False
    has_budget: ClassVar[bool] = True  # `budget` has an effect

    @classmethod
    def own_keys(cls) -> tuple[str, ...]:
        """Return the keys that this policy adds to those of all policies."""
        return tuple(
            entry.name
            for entry in fields(cls)
            if entry.name not in CacheConfig.__dataclass_fields__
        )

    @classmethod
    def unread(cls) -> set[str]:
        """Return the keys without an effect."""
        return set() if cls.has_budget else {"budget"}

    @property
    def settings(self) -> tuple[Any, ...]:
        """Return the values of `own_keys`: with the budget, they decide what the draft sees."""
        return tuple(getattr(self, key) for key in self.own_keys())

    @property
    def form(self) -> str:
        """Return the name of what a draft step reads, for measured times."""
        return self.policy

    @property
    def rounds_per_selection(self) -> int:
        """Return the rounds until the next selection, where a round selects."""
        return 1

    def mistakes(self, key: str) -> Iterator[str]:
        """Yield what is wrong with the values together; `key` is the group's own in the
        configuration.
        """
        if self.budget < 1 and self.has_budget:
            yield f"{key}.budget={self.budget}: must be at least 1"

    def check(
        self, model: ModelConfig, ranks: int, shares_target: bool, key: str = "cache"
    ) -> None:
        """Raise UserError where a draft of this model, divided over `ranks` ranks, cannot use the
        policy as `key`.
        """
        if self.needs_target and not shares_target:
            raise UserError(
                f"{key}.policy={self.policy} reads the target's own cache, which an independent"
                f" draft does not have; choose {key}.policy=streaming, or draft=self with"
                f" cache.policy={self.policy}"
            )
        if self.selects != "never" and ranks > model.num_kv_heads:
            raise UserError(
                f"{key}.policy={self.policy} selects by the attention of all queries of a KV head,"
                f" which more ranks ({ranks}) than KV heads ({model.num_kv_heads}) divide; choose"
                f" {key}.policy=streaming"
            )

    def tokens_read(self, context: int) -> int:
        """Return the entries per sequence and layer that a draft step reads."""
        return context if self.reads_everything else min(self.budget, context)

    def element_bytes(self, model: ModelConfig, exact: float) -> float:
        """Return the bytes of an element of what a draft step reads; `exact` is that of the
        target's entries.
        """
        return exact

    def budgets(self, spec: "CacheSpec", num_layers: int) -> list[int]:
        """Return the budget of each layer, for a compact policy."""
        return [self.budget] * num_layers

    def observed(self, spec: "CacheSpec") -> int:
        """Return how many of the context's last tokens score its entries before the first round."""
        return 0

    def extra_bytes(self, spec: "CacheSpec", model: ModelConfig, element_bytes: float) -> float:
        """Return the bytes stored in addition to keys and values. `model` is that of one rank."""
        return 0.0

    def selection_bytes(self, spec: "CacheSpec", model: ModelConfig, element_bytes: float) -> float:
        """Return the bytes moved to select entries once, where a step or a round does."""
        return 0.0


def mistakes_of_sinks(key: str, budget: int, num_sink: int) -> Iterator[str]:
    """Yield what is wrong with the budget of a policy that keeps first tokens and recent ones."""
    if budget <= num_sink:
        yield (
            f"{key}.budget={budget}: must be above {key}.num_sink={num_sink}, to hold the sinks and"
            " a window of at least 1"
        )


@plain_dataclass(frozen=True)
class CacheSpec:
    """A request for a draft's cache: the configuration group that describes it, and what the run
    adds.

    `cache.budget` counts committed entries per sequence and layer; proposals live in slots beyond
    it. `max_len` is the longest a sequence can become. `in_cache_positions` is set where a sequence
    may outgrow the draft's trained context. `sequence` is the index in the run of row 0's sequence,
    for a policy that draws random numbers.
    """

    cache: CacheConfig
    gamma: int
    max_len: int
    in_cache_positions: bool = False
    sequence: int = 0

    @property
    def kept(self) -> int:
        """Return the committed entries per row and layer within the budget."""
        return min(self.cache.budget, self.max_len)

    @property
    def capacity(self) -> int:
        """Return the slots per row of a cache that keeps every entry."""
        return self.max_len + self.gamma + 1

    def num_recent(self, wanted: int) -> int:
        """Return the slots for recent tokens: at most half the budget, but at least those of a
        round, which evicts older ones.
        """
        return max(min(wanted, (self.cache.budget + 1) // 2), self.gamma + 1)

    def slots(self, num_layers: int, shares_target: bool) -> list[int]:
        """Return the slots of each layer to allocate; `shares_target` where the target drafts for
        itself.
        """
        if not self.cache.compact:
            return [0 if shares_target else self.capacity] * num_layers
        return [
            min(budget, self.max_len) + self.gamma + 1
            for budget in self.cache.budgets(self, num_layers)
        ]

    def stored_bytes(self, model: ModelConfig, element_bytes: float, shares_target: bool) -> float:
        """Return the bytes that a draft's cache takes beyond the target's."""
        per_slot = model.kv_elements_per_token / model.num_layers * element_bytes
        # Slots are in no order: each stores its position.
        if self.cache.compact and model.sliding_window:
            per_slot += model.num_kv_heads * INT32
        entries = sum(self.slots(model.num_layers, shares_target)) * per_slot
        if model.recurrence is not None:
            entries += model.recurrence.state_bytes(element_bytes)
        return entries + self.cache.extra_bytes(self, model, element_bytes)


def all_kv_heads(model: ModelConfig) -> int:
    """Return the KV heads of all layers."""
    return model.num_layers * model.num_kv_heads


@dataclass(frozen=True, config=STRICT)
class ModelChoice:
    """A model: the target, or an independent draft."""

    name: str
    path: str | None = None
    weights: Literal["checkpoint", "random"] = "checkpoint"
    # Our own transformer, transformers' modules, or auto: ours where it covers the model.
    implementation: Literal["auto", "native", "transformers"] = "auto"
    # How recurrent layers take back what a verification rejects (docs/models.md).
    rollback: Literal["auto", "keep", "replay"] = "auto"
    architecture: ModelConfig | None = None
    # The file that `architecture` names, where transformers' modules have to say what it describes.
    config_file: str | None = None


@dataclass(frozen=True, config=STRICT)
class DraftConfig:
    """A draft: `name` is none or names a registered draft, which is a subclass.

    A subclass sets the facts below that differ for it, and declares its own keys as fields.
    """

    name: str = "none"
    gamma: Annotated[
        Literal["auto"] | GammaOr0, must(f"must be auto or a whole number from 1 to {MOST_GAMMA:,}")
    ] = 0
    synthetic_acceptance: Drawn | None = None
    acceptance: str | None = None
    model: ModelChoice | None = None
    tensor_parallel: Count | None = None
    quantization: Literal["none", "int8", "int4"] = "none"

    # A model over a KV cache; otherwise it has neither, and `cache` has no effect.
    is_model: ClassVar[bool] = True
    needs_model: ClassVar[bool] = False  # `model` names a model of its own
    shares_target: ClassVar[bool] = False  # `cache` is selected from the target's own entries
    # The whole target proposes: with every entry, what it would decide.
    is_target: ClassVar[bool] = False
    serves: ClassVar[bool] = False  # rows can change hands between rounds, as serving needs
    # A round without proposals leaves it able to propose in the next one.
    pauses: ClassVar[bool] = True
    one_rank: ClassVar[bool] = False  # works on one rank only
    is_predicted: ClassVar[bool] = True  # the cost model covers it
    listens: ClassVar[bool] = False  # it reads the target's hidden states, from the prefill on
    # It fills a block in one pass: the cost of a proposal does not grow with gamma steps.
    proposes_blocks: ClassVar[bool] = False
    # Where `model` has no path, it is part of the target's own checkpoint.
    ships_with_target: ClassVar[bool] = False
    # Its model has an entry of every token, from which `cache` is selected.
    keeps_entries: ClassVar[bool] = False
    # The name under which acceptance is known; keys in braces are filled in.
    label: ClassVar[str] = "{name}"
    title: ClassVar[str] = "draft {name}"  # how tables call it

    @classmethod
    def unread(cls) -> set[str]:
        """Return the keys without an effect: without a draft, all but its name."""
        if cls is DraftConfig:
            return {entry.name for entry in fields(cls)} - {"name"}
        keys = set() if cls.needs_model else {"model", "tensor_parallel"}
        if cls.one_rank:
            keys.add("tensor_parallel")
        if not cls.is_model:
            keys.add("quantization")
        return keys

    @classmethod
    def described(cls, text: str, config: Mapping[str, Any]) -> str:
        """Return `label` or `title` for a stored group `draft`."""
        return text.format_map({**config, "model": (config.get("model") or {}).get("name")})

    def drawn(self, gamma: int) -> tuple[float, ...] | None:
        """Return the probability of each of gamma proposals to be accepted, given that those before
        it in its round were; None where acceptance is measured.
        """
        given = self.synthetic_acceptance
        if given is None:
            return None
        if isinstance(given, list):
            pairs = pairwise([1.0, *given])
            rates = [rate / before if before else 0.0 for before, rate in pairs]
            return (*rates, *[0.0] * gamma)[:gamma]
        alpha = given if given <= 1 else alpha_from_acceptance_length(given, gamma)
        return (alpha,) * gamma

    def drawn_length(self, gamma: int) -> float | None:
        """Return the mean tokens per round that `drawn` gives; None where it is measured."""
        rates = self.drawn(gamma)
        return None if rates is None else 1 + sum(accumulate(rates, mul))

    @property
    def drawn_alpha(self) -> float | None:
        """Return the alpha that yields as many tokens as what is drawn; None where acceptance is
        measured.
        """
        given = self.synthetic_acceptance
        if isinstance(given, float | int) and given <= 1:
            return given
        gamma = self.gamma if self.gamma != "auto" else 1
        length = self.drawn_length(gamma)
        return None if length is None else alpha_from_acceptance_length(length, gamma)

    @property
    def own_model(self) -> ModelConfig | None:
        """Return the architecture of an independent model, as far as it is known."""
        return self.model.architecture if self.needs_model and self.model else None

    @property
    def extra_tokens(self) -> int:
        """Return the tokens beyond gamma that a round may write behind the committed ones."""
        return 0

    @classmethod
    def takes(cls, model: ModelConfig) -> bool:
        """Return whether the draft can propose with `model`: if it listens, with a head, otherwise
        with a whole model.
        """
        return model.is_head == cls.listens

    def caches(self, cache: CacheConfig) -> dict[str, CacheConfig]:
        """Return the draft's caches by key; `cache` is the group of that name."""
        return {"cache": cache} if self.is_model else {}

    def budgeted(self, cache: CacheConfig) -> dict[str, CacheConfig]:
        """Return the caches whose `budget` bounds what the draft reads, by key."""
        caches = {} if self.name == "none" else self.caches(cache)
        return {key: cache for key, cache in caches.items() if cache.has_budget}

    def gammas(self, cache: CacheConfig) -> tuple[int, ...]:
        """Return the gammas to use: for auto all that fit into the budgets; (0,) without a
        draft.
        """
        if self.name == "none":
            return (0,)
        if self.gamma != "auto":
            return (int(self.gamma),)
        budgets = [limited.budget for limited in self.budgeted(cache).values()]
        least = min(budgets, default=math.inf)
        return tuple(gamma for gamma in AUTO_GAMMAS if gamma < least) or AUTO_GAMMAS[:1]

    @property
    def own_cache_key(self) -> str:
        """Return the key of the cache that the independent model drafts over."""
        return "draft.cache" if self.shares_target else "cache"

    def num_modules(self, model: ModelConfig) -> int:
        """Return how many modules of the model follow each other in a round, where it listens."""
        return 1

    def heard_bytes(
        self, spec: CacheSpec, model: ModelConfig, gamma: int, element_bytes: float
    ) -> float:
        """Return the bytes of hidden states of the prompt's last tokens that a draft that listens
        keeps: those that score, those of the first round and of the latest, and a place for
        all others.
        """
        if not self.listens:
            return 0.0
        modules = min(self.num_modules(model), gamma)
        kept = spec.cache.observed(spec) + 2 * modules + 1
        return kept * model.hidden_size * element_bytes

    def round_slots(self, gamma: int) -> int:
        """Return the slots beyond its budget that the independent model's cache needs in a
        round.
        """
        return gamma + 1

    def assumed_model(self, target: ModelConfig) -> ModelConfig | None:
        """Return the model to predict with where `model` names none; None: it must name one."""
        return None

    def drafter(self, target: ModelConfig) -> ModelConfig:
        """Return the architecture of the model that drafts."""
        return self.own_model or target

    def step_model(self, drafter: ModelConfig) -> ModelConfig:
        """Return the part of the model that drafts which runs in one step: all of it."""
        return drafter

    def mistakes(self) -> Iterator[str]:
        """Yield what is wrong with the values together."""
        if self.gamma == 0:
            yield f"draft.gamma=0: must be auto or at least 1 with draft={self.name}"
        yield from self._mistakes_drawn()
        if self.needs_model and self.model is None:
            valid = (
                f"draft.name={self.name} needs one; choose draft={self.name}"
                " target@draft.model=NAME"
            )
            yield f"draft.model=null: {valid}"
        if not self.is_model and self.quantization != "none":
            yield (
                f"draft.quantization={self.quantization}: draft={self.name} has no weights; choose"
                " none"
            )

    def _mistakes_drawn(self) -> Iterator[str]:
        """Yield what is wrong with `synthetic_acceptance`."""
        given = self.synthetic_acceptance
        if given is None or (not isinstance(given, list) and given <= 1):
            return
        key = f"draft.synthetic_acceptance={given}"
        if self.gamma == "auto":
            yield f"{key}: needs a fixed draft.gamma, not auto; or give one probability"
        elif isinstance(given, list):
            if len(given) < self.gamma:
                yield f"{key}: needs a probability for each of draft.gamma={self.gamma} positions"
            if any(later > earlier for earlier, later in pairwise(given)):
                yield (
                    f"{key}: must not rise: a position's is the share of rounds that accept it and"
                    " all before it"
                )
        elif given > self.gamma + 1:
            most = self.gamma + 1
            yield f"{key}: a round of draft.gamma={self.gamma} yields at most {most} tokens"

    def check(self, target: ModelConfig) -> None:
        """Raise UserError where the values do not suit the target."""


@dataclass(frozen=True, config=STRICT)
class EngineConfig:
    """An engine. A subclass is a peer of ours: it declares its own keys, and says which drafts it
    has.
    """

    name: str = ""
    drafts: ClassVar[tuple[str, ...]] = ()
    one_row: ClassVar[bool] = False  # it speculates on one row at a time
    scenarios: ClassVar[tuple[str, ...]] = ("compare",)
    parallel: ClassVar[bool] = False  # its server divides the model by hardware.tensor_parallel
    has_our_drafts: ClassVar[bool] = False  # and caches
    # It runs elsewhere: of the models here, the target's tokenizer alone is read.
    is_remote: ClassVar[bool] = False

    @classmethod
    def unread(cls) -> set[str]:
        """Return the keys without an effect: none."""
        return set()


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """The source of prompts. A corpus with keys of its own has a subclass."""

    name: str = ""
    path: str | None = None
    task: str | None = None
    seed: Natural = 0
    save_prompts: bool = False

    def mistakes(self) -> Iterator[str]:
        """Yield what is wrong with the values together."""
        yield from ()

    @property
    def sources(self) -> dict[str, tuple[str, str | None]]:
        """Return the corpora that the prompts are read from, with their paths, by key."""
        return {"data": (self.name, self.path)}


@plain_dataclass(frozen=True)
class Backend:
    """A backend of attention. The work is a subclass of Attention: see
    magicdec/attention/base.py.
    """

    name: str
    # The only kind of device that it runs on; None: any.
    device: Literal["cpu", "cuda"] | None = None
    # attention=auto takes the usable backend with the highest; None: never.
    priority: int | None = None
    # A CUDA graph can capture it: one that reads lengths on the host cannot be.
    captured: bool = True


@plain_dataclass(frozen=True)
class Corpus:
    """A source of prompts. The work is a function `load`: see magicdec/data."""

    name: str
    keys: type[DataConfig] = DataConfig
    needs_path: bool = False
    tasks: tuple[str, ...] | None = ()  # None: `task` only names the prompts
    # Random tokens: nothing to measure acceptance on, and no tokenizer needed.
    is_noise: bool = False
    own_lengths: bool = False  # rows are as long as the user wrote them
    # Of a text without a path: the standard library's source.
    origin: str = f"Python {platform.python_version()}"
    # Finds the files at data.path, where it is read.
    files_at: Callable[[Path, str], Mapping[str, Path]] | None = None
    ignores: tuple[str, ...] = ()  # keys of all corpora that have no effect with it

    def unread(self) -> set[str]:
        """Return the keys without an effect."""
        return {*self.ignores} | ({"task"} if self.tasks == () else set())
