"""Cache policies without PyTorch: the keys of each in the group `cache`, and the facts about what it reads and stores.

A policy is a dataclass: its fields are its keys, with their rules; its class variables and methods are its facts.
Caches allocate by these facts, and the cost model counts by them. Bytes are those of one row.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import ceil, gcd
from typing import Any, ClassVar, Literal

from omegaconf import MISSING

from magicdec.architectures import ModelConfig
from magicdec.errors import UserError
from magicdec.rules import at_least, ruled

Selects = Literal["never", "prefill", "round", "step"]  # round: once a round; step: in every draft step

FP32, INT32, INT64 = 4, 4, 8  # bytes
SCALE = 4  # bytes of a group's scale and least value, each in half precision


@dataclass(frozen=True)
class CacheConfig:
    """The cache of a draft: `policy` names a registered policy, and `budget` is its size in committed entries.

    A policy is a subclass. It sets the facts below that differ for it, and declares its own keys as fields.
    """

    policy: str = MISSING
    budget: int = 0

    compact: ClassVar[bool] = False  # owns a copy of `budget` entries; others keep all, for a self-draft the target's
    reads_everything: ClassVar[bool] = False  # the budget does not limit what a draft step reads
    quantized: ClassVar[bool] = False  # a draft step reads codes
    selects: ClassVar[Selects] = "never"  # when it chooses entries by their attention
    needs_target: ClassVar[bool] = False  # works on the target's own cache, so no independent draft can use it
    bounds_positions: ClassVar[bool] = False  # positions stay within the draft's trained context, however long the text
    has_budget: ClassVar[bool] = True  # `budget` has an effect

    @classmethod
    def own_keys(cls) -> tuple[str, ...]:
        """Return the keys that this policy adds to those of all policies."""
        return tuple(entry.name for entry in fields(cls) if entry.name not in CacheConfig.__dataclass_fields__)

    @property
    def settings(self) -> tuple[Any, ...]:
        """Return the values of `own_keys`: with the budget, they decide what the draft sees."""
        return tuple(getattr(self, key) for key in self.own_keys())

    @property
    def rounds_per_choice(self) -> int:
        """Return the rounds until the next choice, where it selects in rounds."""
        return 1

    def mistakes(self, key: str) -> Iterator[str]:
        """Yield what is wrong with the values together; `key` is the group's own in the configuration."""
        if self.budget < 1 and self.has_budget:
            yield f"{key}.budget={self.budget}: must be at least 1"

    def check(self, model: ModelConfig, ranks: int, shares_target: bool, key: str = "cache") -> None:
        """Raise UserError where a draft of this model, divided over so many ranks, cannot use the policy as `key`."""
        if self.needs_target and not shares_target:
            raise UserError(
                f"{key}.policy={self.policy} reads the target's own cache, which an independent draft does not have; "
                f"choose {key}.policy=streaming, or draft=self with cache.policy={self.policy}"
            )
        if self.selects != "never" and ranks > model.num_kv_heads:
            raise UserError(
                f"{key}.policy={self.policy} chooses by the attention of all queries of a KV head, which more ranks "
                f"({ranks}) than KV heads ({model.num_kv_heads}) divide; choose {key}.policy=streaming"
            )

    def tokens_read(self, context: int) -> int:
        """Return the entries per sequence and layer that a draft step reads."""
        return context if self.reads_everything else min(self.budget, context)

    def element_bytes(self, model: ModelConfig, exact: float) -> float:
        """Return the bytes of an element of what a draft step reads; `exact` is that of the target's entries."""
        return exact

    def budgets(self, spec: "CacheSpec", num_layers: int) -> list[int]:
        """Return the budget of each layer, for a compact policy."""
        return [self.budget] * num_layers

    def extra_bytes(self, spec: "CacheSpec", model: ModelConfig, element_bytes: float) -> float:
        """Return the bytes stored in addition to keys and values. `model` is that of one rank."""
        return 0.0

    def choice_bytes(self, spec: "CacheSpec", model: ModelConfig, element_bytes: float) -> float:
        """Return the bytes moved to choose entries once, where a step or a round does."""
        return 0.0


@dataclass(frozen=True)
class CacheSpec:
    """A request for a draft's cache: the configuration group that describes it, and what the run adds.

    `cache.budget` counts committed entries per sequence and layer; proposals live in slots beyond it. `max_len` is the
    longest a sequence can become. `in_cache_positions` is set where a sequence may outgrow the draft's trained context.
    """

    cache: CacheConfig
    gamma: int
    max_len: int
    in_cache_positions: bool = False

    @property
    def kept(self) -> int:
        """Return the committed entries per row and layer within the budget."""
        return min(self.cache.budget, self.max_len)

    @property
    def capacity(self) -> int:
        """Return the slots per row of a cache that keeps every entry."""
        return self.max_len + self.gamma + 1

    def num_recent(self, wanted: int) -> int:
        """Return the slots for recent tokens: at most half the budget, at least a round, which evicts older ones."""
        return max(min(wanted, (self.cache.budget + 1) // 2), self.gamma + 1)

    def slots(self, num_layers: int, shares_target: bool) -> list[int]:
        """Return the slots of each layer to allocate; `shares_target` where the target drafts for itself."""
        if not self.cache.compact:
            return [0 if shares_target else self.capacity] * num_layers
        return [min(budget, self.max_len) + self.gamma + 1 for budget in self.cache.budgets(self, num_layers)]

    def stored_bytes(self, model: ModelConfig, element_bytes: float, shares_target: bool) -> float:
        """Return the bytes that a draft's cache takes beyond the target's."""
        per_slot = model.kv_elements_per_token / model.num_layers * element_bytes
        if self.cache.compact and model.sliding_window:  # slots lie in no order: each has its position
            per_slot += model.num_kv_heads * INT32
        entries = sum(self.slots(model.num_layers, shares_target)) * per_slot
        return entries + self.cache.extra_bytes(self, model, element_bytes)


@dataclass(frozen=True)
class Full(CacheConfig):
    """Every entry."""

    policy: str = "full"
    reads_everything, has_budget = True, False


@dataclass(frozen=True)
class Window(CacheConfig):
    """The latest tokens."""

    policy: str = "window"
    compact = bounds_positions = True


@dataclass(frozen=True)
class Streaming(Window):
    """StreamingLLM: the first `num_sink` tokens, and the latest ones."""

    policy: str = "streaming"
    num_sink: int = at_least(0, default=0)

    def mistakes(self, key: str) -> Iterator[str]:
        """See CacheConfig.mistakes."""
        if self.budget <= self.num_sink:
            sinks = f"{key}.num_sink={self.num_sink}"
            yield f"{key}.budget={self.budget}: must be above {sinks}, to hold the sinks and a window of at least 1"

    def extra_bytes(self, spec: CacheSpec, model: ModelConfig, element_bytes: float) -> float:
        """Count the unrotated keys of the sinks, where positions are those in the cache."""
        num_sink = min(self.num_sink, spec.kept - 1) if spec.in_cache_positions else 0
        return _heads(model) * num_sink * model.head_dim * element_bytes


@dataclass(frozen=True)
class SnapKV(CacheConfig):
    """Entries that the last `observation_window` prompt tokens attend to; scores averaged over `kernel` neighbours."""

    policy: str = "snapkv"
    observation_window: int = at_least(1, default=32)
    kernel: int = ruled(5, lambda value: value >= 1 and value % 2 == 1, "must be an odd number of at least 1")
    compact = True
    selects = "prefill"


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV with budgets that fall over the layers, in the last one to 1 / `beta` of their mean."""

    policy: str = "pyramidkv"
    beta: int = at_least(1, default=20)

    def window(self, spec: CacheSpec) -> int:
        """Return the recent tokens that every layer keeps."""
        return min(spec.num_recent(self.observation_window), self.budget)

    def budgets(self, spec: CacheSpec, num_layers: int) -> list[int]:
        """See CacheConfig.budgets: the same recent tokens in all layers, and a falling number of chosen entries."""
        window = self.window(spec)
        return [window + chosen for chosen in falling(self.budget - window, num_layers, self.beta)]


@dataclass(frozen=True)
class H2O(CacheConfig):
    """The entries with the most attention so far, and recent tokens."""

    policy: str = "h2o"
    compact = True
    selects = "prefill"

    def extra_bytes(self, spec: CacheSpec, model: ModelConfig, element_bytes: float) -> float:
        """Count a score for every slot, and one for each draft step of a round."""
        return _heads(model) * (spec.kept + spec.gamma + 1) * (1 + spec.gamma) * FP32


@dataclass(frozen=True)
class Quest(CacheConfig):
    """Pages of `page_size` entries, chosen in every step by a bound on their attention."""

    policy: str = "quest"
    page_size: int = at_least(1, default=16)
    selects = "step"

    def num_pages(self, spec: CacheSpec) -> int:
        """Return the pages of `page_size` entries, or smaller ones for a smaller budget, that cover the capacity."""
        return ceil(spec.capacity / min(self.page_size, spec.kept))

    def extra_bytes(self, spec: CacheSpec, model: ModelConfig, element_bytes: float) -> float:
        """Count the least and the largest key of every page: as much as a key and a value."""
        return model.kv_elements_per_token * self.num_pages(spec) * element_bytes

    choice_bytes = extra_bytes


@dataclass(frozen=True)
class TopK(CacheConfig):
    """The entries with the most attention from each query."""

    policy: str = "topk"
    selects = "step"

    def choice_bytes(self, spec: CacheSpec, model: ModelConfig, element_bytes: float) -> float:
        """Count every key."""
        return model.kv_elements_per_token / 2 * spec.max_len * element_bytes


@dataclass(frozen=True)
class VerifyGuided(CacheConfig):
    """The entries that the last verification attended to, chosen every `refresh` rounds."""

    policy: str = "verify_guided"
    refresh: int = at_least(1, default=1)
    observation_window: int = at_least(1, default=32)
    selects = "round"
    needs_target = True

    @property
    def rounds_per_choice(self) -> int:
        """See CacheConfig.rounds_per_choice."""
        return self.refresh

    def window(self, spec: CacheSpec) -> int:
        """Return the recent tokens that are always read."""
        return min(spec.num_recent(self.budget // 4), spec.kept)

    def extra_bytes(self, spec: CacheSpec, model: ModelConfig, element_bytes: float) -> float:
        """Count the indices of the chosen entries, and the attention that a verification gives to every entry."""
        return _heads(model) * ((spec.kept - self.window(spec)) * INT64 + spec.capacity * FP32)

    def choice_bytes(self, spec: CacheSpec, model: ModelConfig, element_bytes: float) -> float:
        """Count the scores that verification has computed: written and ranked."""
        return 2 * _heads(model) * spec.max_len * FP32


@dataclass(frozen=True)
class Quantized(CacheConfig):
    """Every entry in `bits` bits, with a scale for each `group_size` features; the latest ones as they are."""

    policy: str = "quantized"
    bits: int = ruled(4, lambda value: value in (4, 8), "must be 8 or 4")
    group_size: int = at_least(1, default=32)
    reads_everything = quantized = needs_target = True

    def element_bytes(self, model: ModelConfig, exact: float) -> float:
        """See CacheConfig.element_bytes: a code, and its share of the group's scale."""
        return self.bits / 8 + SCALE / gcd(self.group_size, model.head_dim)

    def extra_bytes(self, spec: CacheSpec, model: ModelConfig, element_bytes: float) -> float:
        """Count the codes of every entry."""
        return model.kv_elements_per_token * spec.capacity * self.element_bytes(model, element_bytes)


def falling(mean: int, num_layers: int, beta: int) -> list[int]:
    """Return whole numbers that fall evenly to mean / beta and add up to mean * num_layers."""
    last = mean / beta
    first = 2 * mean - last
    step = (first - last) / max(1, num_layers - 1)
    ends = [round((i + 1) * first - step * i * (i + 1) / 2) for i in range(num_layers)]
    ends[-1] = mean * num_layers
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _heads(model: ModelConfig) -> int:
    return model.num_layers * model.num_kv_heads
