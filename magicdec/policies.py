"""The facts of every cache policy, without PyTorch: what it reads, what it stores, and when it selects.

Caches allocate by these facts, and the cost model counts by them. Bytes are those of one row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, gcd
from typing import Literal

from magicdec.architectures import ModelConfig
from magicdec.config.schema import CacheConfig
from magicdec.errors import UserError

Selects = Literal["never", "prefill", "round", "step"]  # round: once a round; step: in every draft step

FP32, INT32, INT64 = 4, 4, 8  # bytes
SCALE = 4  # bytes of a group's scale and least value, each in half precision


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
        """Committed entries per row and layer within the budget."""
        return min(self.cache.budget, self.max_len)

    @property
    def capacity(self) -> int:
        """Slots per row of a cache that keeps every entry."""
        return self.max_len + self.gamma + 1

    @property
    def num_pages(self) -> int:
        """Pages of `page_size` entries, or smaller ones for a smaller budget, that cover the capacity."""
        return ceil(self.capacity / min(self.cache.page_size, self.kept))

    def num_recent(self, wanted: int) -> int:
        """Slots for recent tokens: at most half the budget, but at least a round, which so evicts older tokens only."""
        return max(min(wanted, (self.cache.budget + 1) // 2), self.gamma + 1)


# Bytes, given the cache, the model of one rank, and the bytes of an element of keys and values.
Bytes = Callable[[CacheSpec, ModelConfig, float], float]


def _nothing(spec: CacheSpec, model: ModelConfig, element_bytes: float) -> float:
    return 0.0


def _same_budget(spec: CacheSpec, num_layers: int) -> list[int]:
    return [spec.cache.budget] * num_layers


@dataclass(frozen=True)
class Policy:
    """The facts of one policy."""

    name: str
    compact: bool = False  # it owns a copy of `budget` entries; otherwise it keeps all, for a self-draft the target's
    reads_everything: bool = False  # the budget does not limit what a draft step reads
    quantized: bool = False  # a draft step reads codes
    selects: Selects = "never"  # when it chooses entries by their attention
    needs_target: bool = False  # it works on the target's own cache, so no independent draft can use it
    bounds_positions: bool = False  # positions stay within the draft's trained context, however long the text
    settings: tuple[str, ...] = ()  # keys of `cache` that change what the draft sees
    budgets: Callable[[CacheSpec, int], list[int]] = _same_budget  # of each layer, for a compact policy
    beside: Bytes = _nothing  # stored beside keys and values
    choice: Bytes = _nothing  # moved to choose entries once, where a step or a round does

    def check(self, model: ModelConfig, ranks: int, shares_target: bool, key: str = "cache") -> None:
        """Raise UserError where a draft of this model, divided over so many ranks, cannot use the policy as `key`."""
        if self.needs_target and not shares_target:
            raise UserError(
                f"{key}.policy={self.name} reads the target's own cache, which an independent draft does not have; "
                f"choose {key}.policy=streaming, or draft=self with cache.policy={self.name}"
            )
        if self.selects != "never" and ranks > model.num_kv_heads:
            raise UserError(
                f"{key}.policy={self.name} chooses by the attention of all queries of a KV head, which more ranks "
                f"({ranks}) than KV heads ({model.num_kv_heads}) divide; choose {key}.policy=streaming"
            )

    def slots(self, spec: CacheSpec, num_layers: int, shares_target: bool) -> list[int]:
        """Slots of each layer to allocate; `shares_target` where the target drafts for itself."""
        if not self.compact:
            return [0 if shares_target else spec.capacity] * num_layers
        return [min(budget, spec.max_len) + spec.gamma + 1 for budget in self.budgets(spec, num_layers)]

    def stored_bytes(self, spec: CacheSpec, model: ModelConfig, element_bytes: float, shares_target: bool) -> float:
        """Bytes that a draft's cache takes beyond the target's."""
        per_slot = model.kv_elements_per_token / model.num_layers * element_bytes
        if self.compact and model.sliding_window:  # slots lie in no order: each has its position
            per_slot += model.num_kv_heads * INT32
        entries = sum(self.slots(spec, model.num_layers, shares_target)) * per_slot
        return entries + self.beside(spec, model, element_bytes)

    def prefill_bytes(self, spec: CacheSpec, model: ModelConfig, element_bytes: float) -> float:
        """Bytes that an independent draft's prefill takes beside its cache, until the policy has chosen among them.

        A policy that bounds positions prefills through another cache of its own kind, the other compact ones through
        one of every entry.
        """
        if not self.compact:
            return 0.0
        if self.bounds_positions:
            return self.stored_bytes(spec, model, element_bytes, shares_target=False)
        return model.kv_elements_per_token * spec.capacity * element_bytes

    def tokens_read(self, context: int, budget: int) -> int:
        """Entries per sequence and layer that a draft step reads."""
        return context if self.reads_everything else min(budget, context)


def code_bytes(cache: CacheConfig, model: ModelConfig) -> float:
    """Return the bytes of a quantised element, its share of the group's scale included."""
    return cache.bits / 8 + SCALE / gcd(cache.group_size, model.head_dim)


def pyramid_budgets(spec: CacheSpec, num_layers: int) -> list[int]:
    """Budgets that add up to `budget` per layer: the same recent tokens in all, and a falling number of chosen ones."""
    window = min(spec.num_recent(spec.cache.observation_window), spec.cache.budget)
    return [window + chosen for chosen in falling(spec.cache.budget - window, num_layers, spec.cache.beta)]


def falling(mean: int, num_layers: int, beta: int) -> list[int]:
    """Whole numbers that fall evenly to mean / beta and add up to mean * num_layers."""
    last = mean / beta
    first = 2 * mean - last
    step = (first - last) / max(1, num_layers - 1)
    ends = [round((i + 1) * first - step * i * (i + 1) / 2) for i in range(num_layers)]
    ends[-1] = mean * num_layers
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def guided_window(spec: CacheSpec) -> int:
    """Recent tokens that verify_guided always reads."""
    return min(spec.num_recent(spec.cache.budget // 4), spec.kept)


def _heads(model: ModelConfig) -> int:
    return model.num_layers * model.num_kv_heads


def _sinks(spec: CacheSpec, model: ModelConfig, element_bytes: float) -> float:
    """Unrotated keys of the sinks, where positions are those in the cache."""
    num_sink = min(spec.cache.num_sink, spec.kept - 1) if spec.in_cache_positions else 0
    return _heads(model) * num_sink * model.head_dim * element_bytes


def _slot_scores(spec: CacheSpec, model: ModelConfig, element_bytes: float) -> float:
    """A score for every slot, and one for each draft step of a round."""
    return _heads(model) * (spec.kept + spec.gamma + 1) * (1 + spec.gamma) * FP32


def _page_bounds(spec: CacheSpec, model: ModelConfig, element_bytes: float) -> float:
    """The least and the largest key of every page: as much as a key and a value."""
    return model.kv_elements_per_token * spec.num_pages * element_bytes


def _keys(spec: CacheSpec, model: ModelConfig, element_bytes: float) -> float:
    """Every key."""
    return model.kv_elements_per_token / 2 * spec.max_len * element_bytes


def _chosen_and_scores(spec: CacheSpec, model: ModelConfig, element_bytes: float) -> float:
    """Indices of the chosen entries, and the attention that a verification gives to every entry."""
    return _heads(model) * ((spec.kept - guided_window(spec)) * INT64 + spec.capacity * FP32)


def _scores_twice(spec: CacheSpec, model: ModelConfig, element_bytes: float) -> float:
    """Scores that verification has computed are written and ranked."""
    return 2 * _heads(model) * spec.max_len * FP32


def _codes(spec: CacheSpec, model: ModelConfig, element_bytes: float) -> float:
    return model.kv_elements_per_token * spec.capacity * code_bytes(spec.cache, model)


SNAPKV = ("observation_window", "kernel")
POLICIES = {
    policy.name: policy
    for policy in (
        Policy("full", reads_everything=True),
        Policy("streaming", compact=True, bounds_positions=True, settings=("num_sink",), beside=_sinks),
        Policy("window", compact=True, bounds_positions=True),
        Policy("snapkv", compact=True, selects="prefill", settings=SNAPKV),
        Policy("pyramidkv", compact=True, selects="prefill", settings=(*SNAPKV, "beta"), budgets=pyramid_budgets),
        Policy("h2o", compact=True, selects="prefill", beside=_slot_scores),
        Policy("quest", selects="step", settings=("page_size",), beside=_page_bounds, choice=_page_bounds),
        Policy("topk", selects="step", choice=_keys),
        Policy(
            "verify_guided",
            selects="round",
            needs_target=True,
            settings=("refresh", "observation_window"),
            beside=_chosen_and_scores,
            choice=_scores_twice,
        ),
        Policy(
            "quantized",
            reads_everything=True,
            quantized=True,
            needs_target=True,
            settings=("bits", "group_size"),
            beside=_codes,
        ),
    )
}


def policy_named(name: str) -> Policy:
    """Return the facts of the policy of that name."""
    if name not in POLICIES:
        raise UserError(f"cache={name} has no cost model; one of: {', '.join(POLICIES)}")
    return POLICIES[name]
