"""The times of a round's parts, for a target, a draft, a cache policy, a machine, a batch and a context."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from magicdec.architectures import ModelConfig, check_ranks
from magicdec.config.schema import CacheConfig
from magicdec.costmodel.hardware import Hardware
from magicdec.costmodel.roofline import (
    BF16,
    Pass,
    StepTime,
    choice_time,
    step_time,
    weight_count,
)
from magicdec.errors import UserError
from magicdec.policies import CacheSpec, Policy, code_bytes, policy_named

DRAFT_KINDS = ("self", "model", "ngram", "layer_skip")
QUANTIZED_BYTES = {"int8": 1.0, "int4": 0.5}  # of a weight


@dataclass(frozen=True)
class DraftChoice:
    """What proposes: the target itself, its first `num_layers` layers, a model of its own, or the text (`ngram`), which
    takes no time to speak of.
    """

    kind: str = "self"
    name: str = "self"
    model: ModelConfig | None = None  # of an independent draft
    tensor_parallel: int | None = None  # ranks of an independent draft; None: as its stack does
    quantization: str = "none"
    num_layers: int | None = None  # of layer_skip

    def __post_init__(self) -> None:
        if self.kind not in DRAFT_KINDS:
            raise UserError(f"draft={self.kind} has no cost model; one of: {', '.join(DRAFT_KINDS)}")
        if (self.kind == "model") != (self.model is not None):
            raise UserError(f"draft={self.kind} with draft.model={self.name}: a model is for draft=model alone")
        if (self.kind == "layer_skip") != (self.num_layers is not None):
            raise UserError(f"draft={self.kind} with draft.num_layers={self.num_layers}: for draft=layer_skip alone")
        if self.quantization not in ("none", *QUANTIZED_BYTES):
            valid = ", ".join(("none", *QUANTIZED_BYTES))
            raise UserError(f"draft.quantization={self.quantization} has no cost model; one of: {valid}")


@dataclass(frozen=True)
class Setup:
    """Everything that times depend on, gamma aside."""

    target: ModelConfig
    hardware: Hardware
    batch: int
    context: int
    draft: DraftChoice = DraftChoice()
    cache: CacheConfig = field(default_factory=lambda: CacheConfig("streaming", 512))
    target_name: str = "target"
    element_bytes: float = BF16  # of weights, keys, values and activations, where nothing is quantized

    def __post_init__(self) -> None:
        for key, value in (("batch.size", self.batch), ("batch.context_len", self.context)):
            if value < 1:
                raise UserError(f"{key}={value} must be at least 1")
        if self.draft.num_layers is not None and not 1 <= self.draft.num_layers < self.target.num_layers:
            valid = f"must be from 1 to {self.target.num_layers - 1}"
            raise UserError(f"draft.num_layers={self.draft.num_layers}: {valid}, fewer than the target has")
        if self.cache.budget < 1 and not self.facts.reads_everything:
            raise UserError(f"cache.budget={self.cache.budget} must be at least 1")
        check_ranks(self.target, self.ranks, self.draft.model, self.draft_ranks)
        if self.draft.kind != "ngram":
            self.facts.check(self.draft_model, self.draft_ranks, self.draft.model is None)

    @cached_property
    def facts(self) -> Policy:
        """Return what the policy reads, stores and selects."""
        return policy_named(self.cache.policy)

    @property
    def ranks(self) -> int:
        """GPUs that share the target."""
        return self.hardware.count

    @property
    def draft_model(self) -> ModelConfig:
        """The model that drafts."""
        if self.draft.num_layers is not None:
            return self.target.layers(0, self.draft.num_layers)
        return self.draft.model or self.target

    @property
    def draft_ranks(self) -> int:
        """GPUs that share the draft."""
        if self.draft.model is None:
            return self.ranks
        most = self.hardware.stack.draft_ranks
        usual = self.ranks if most is None else min(self.ranks, most, self.draft.model.num_kv_heads)
        return self.draft.tensor_parallel or usual

    @property
    def draft_weight_bytes(self) -> float:
        """Bytes of an element of the draft's weights."""
        return QUANTIZED_BYTES.get(self.draft.quantization, self.element_bytes)

    @property
    def draft_kv_bytes(self) -> float:
        """Bytes of an element of the draft's KV cache."""
        return code_bytes(self.cache, self.draft_model) if self.facts.quantized else self.element_bytes

    @property
    def target_pass(self) -> Pass:
        """One autoregressive step of the target."""
        size = self.element_bytes
        return Pass(self.target, self.batch, 1, self.context, self.ranks, size, size, size)

    @cached_property
    def target_time(self) -> StepTime:
        """T_T."""
        return step_time(self.target_pass, self.hardware)

    @cached_property
    def draft_step_times(self) -> tuple[StepTime, StepTime]:
        """The first draft step of a round, and each of the others."""
        if self.draft.kind == "ngram":
            return StepTime(), StepTime()
        step = Pass(
            self.draft_model,
            self.batch,
            1,
            self.tokens_read,
            self.draft_ranks,
            weight_bytes=self.draft_weight_bytes,
            kv_bytes=self.draft_kv_bytes,
            activation_bytes=self.element_bytes,
        )
        later = step_time(step, self.hardware)
        refed = self.hardware.stack.refed_tokens(self.draft.kind, self.cache.policy)
        return later if refed == 1 else step_time(step._replace(query_tokens=refed), self.hardware), later

    @property
    def tokens_read(self) -> int:
        """Entries per sequence and layer that a draft step reads."""
        return self.facts.tokens_read(self.context, self.cache.budget)

    def cache_spec(self, gamma: int, generate_len: int = 0) -> CacheSpec:
        """Return what the draft's cache is allocated for where `generate_len` tokens follow the context."""
        length = self.context + generate_len
        is_longer = length > self.draft_model.max_position_embeddings
        return CacheSpec(self.cache, gamma, length, is_longer)

    def at(self, **changes: Any) -> "Setup":
        """Return the same with some values changed; keys of the cache go by their own names."""
        own = {name: changes.pop(name) for name in vars(self.cache).keys() & changes.keys()}
        if own:
            changes["cache"] = replace(self.cache, **own)
        other = replace(self, **changes)
        if changes.keys() == {"context"} and other.tokens_read == self.tokens_read:
            other.__dict__["draft_step_times"] = self.draft_step_times  # the search for S* asks for little else
        return other


class RoundTimes(NamedTuple):
    """Seconds of a round's parts; `draft` and `select` are means over its gamma draft steps."""

    gamma: int
    target: StepTime  # one autoregressive step of the target: T_T
    draft: StepTime  # T_D
    select: StepTime  # T_select
    verify: StepTime  # T_V(gamma)
    overhead: StepTime

    @property
    def round_s(self) -> float:
        """Seconds of the whole round."""
        return self.gamma * (self.draft.total + self.select.total) + self.verify.total + self.overhead.total

    def speedup(self, acceptance_length: float) -> float:
        """Return T_T over T_SD when a round yields `acceptance_length` tokens on average."""
        return self.target.total / (self.round_s / acceptance_length)


def round_times(setup: Setup, gamma: int) -> RoundTimes:
    """Predict the parts of a round that proposes `gamma` tokens."""
    if gamma < 1:
        raise UserError(f"draft.gamma={gamma} must be at least 1")
    hardware = setup.hardware
    late = not hardware.stack.verify_chooses
    verify = setup.target_pass._replace(query_tokens=gamma + 1, chooses=not late)
    return RoundTimes(
        gamma,
        target=setup.target_time,
        draft=draft_time(setup, gamma),
        select=select_time(setup, gamma),
        verify=step_time(verify, hardware),
        overhead=StepTime(
            activations=choice_time(verify, hardware) if late else 0.0,
            overhead=hardware.efficiency.round_overhead_us * 1e-6,
        ),
    )


def draft_time(setup: Setup, gamma: int) -> StepTime:
    """T_D: the mean of a round's draft steps, of which the first may feed two tokens."""
    first, later = setup.draft_step_times
    return first.plus(later, gamma - 1).scaled(1 / gamma)


def select_time(setup: Setup, gamma: int) -> StepTime:
    """Return T_select: what a draft step spends on choosing its entries, on average."""
    if setup.draft.kind == "ngram" or setup.facts.selects not in ("step", "round"):
        return StepTime()
    model = setup.draft_model.shared_by(setup.draft_ranks)
    moved = setup.batch * setup.facts.choice(setup.cache_spec(gamma), model, setup.element_bytes)
    steps = 1 if setup.facts.selects == "step" else gamma * setup.cache.refresh
    return StepTime(kv=moved / setup.hardware.bandwidth / steps)


@dataclass(frozen=True)
class Memory:
    """Bytes that the fullest GPU holds."""

    target_weights: float
    target_kv: float
    draft_weights: float
    draft_kv: float
    draft_prefill: float  # held only while an independent draft prefills

    @property
    def total(self) -> float:
        """All of it, activations aside."""
        return self.target_weights + self.target_kv + self.draft_weights + self.draft_kv + self.draft_prefill


def memory(setup: Setup, gamma: int, generate_len: int = 0) -> Memory:
    """Return the bytes of weights and caches while `generate_len` tokens are generated with proposals of `gamma`."""
    draft, facts, size = setup.draft, setup.facts, setup.element_bytes
    spec, target = setup.cache_spec(gamma, generate_len), setup.target.shared_by(setup.ranks)
    target_weights = weight_count(setup.target, setup.ranks) * size
    target_kv = setup.batch * target.kv_elements_per_token * spec.capacity * size
    draft_weights = draft_kv = draft_prefill = 0.0
    if draft.kind == "model" or draft.quantization != "none":
        draft_weights = weight_count(setup.draft_model, setup.draft_ranks) * setup.draft_weight_bytes
    if draft.kind != "ngram":
        model, shares_target = setup.draft_model.shared_by(setup.draft_ranks), draft.model is None
        draft_kv = setup.batch * facts.stored_bytes(spec, model, size, shares_target)
        draft_prefill = 0.0 if shares_target else setup.batch * facts.prefill_bytes(spec, model, size)
    return Memory(target_weights, target_kv, draft_weights, draft_kv, draft_prefill)
