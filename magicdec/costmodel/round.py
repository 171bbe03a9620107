"""The times of a round's parts, for a target, a draft, a cache policy, a machine, a batch and a
context.
"""

from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import comb
from typing import Any, NamedTuple

from magicdec.architectures.model_config import ModelConfig, check_ranks
from magicdec.config.choices import CODE_GROUP, CODE_ROWS, FP32, CacheConfig, CacheSpec, DraftConfig
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.costmodel.hardware import Hardware
from magicdec.costmodel.kernel_costs import CODES, SCORES, SELECTING, WEIGHTS, work_of
from magicdec.costmodel.roofline import BF16, Pass, StepTime, choice_time, entries_time, step_time
from magicdec.costmodel.routing import UNIFORM, Routing
from magicdec.costmodel.targets import model_label
from magicdec.errors import UserError

# The bytes of a weight in a layer's matrices: its code, and its share of its group's scale.
QUANTIZED_BYTES = {"int8": 1 + BF16 / CODE_GROUP, "int4": 0.5 + BF16 / CODE_GROUP}
PREFILL_CHUNK = 2048  # tokens of a prefill pass of serving engines
RARE = 1e-5  # a probability that does not count


@dataclass(frozen=True)
class Setup:
    """Everything that times depend on, except gamma."""

    target: ModelConfig
    hardware: Hardware
    batch: int
    context: int
    # An independent draft has its model's architecture.
    draft: DraftConfig = field(default_factory=lambda: DRAFTS["self"].facts())
    cache: CacheConfig = field(default_factory=lambda: POLICIES["streaming"].facts(budget=512))
    target_name: str = "target"
    target_path: str | None = None  # of its weights
    # Of weights, keys, values and activations, where nothing is quantized.
    element_bytes: float = BF16
    # Of weights that are kept in fewer bytes; None: element_bytes.
    stored_weight_bytes: float | None = None
    # Share of a lookup's rounds that find a match; the other rounds verify one token where the
    # stack lets rows differ.
    match_share: float = 1.0
    routing: Routing = UNIFORM  # of tokens to experts
    prefill_chunk: int = PREFILL_CHUNK
    # Models are as serving engines run them; otherwise as our own engine does.
    is_served: bool = False

    def __post_init__(self) -> None:
        if self.is_served:
            object.__setattr__(self, "target", self.target.as_predicted())
        if not self.draft.is_model:
            # Nothing is read, whatever the policy.
            object.__setattr__(self, "cache", POLICIES["full"].facts())
        self.draft.check(self.target)
        check_ranks(self.target, self.ranks, self.draft.own_model, self.draft_ranks)
        if self.draft.is_model:
            for mistake in self.cache.mistakes("cache"):
                raise UserError(mistake)
            self.cache.check(self.draft_model, self.draft_ranks, self.draft.shares_target)

    @cached_property
    def draft_label(self) -> str:
        """Return the name under which the draft's acceptance is known."""
        return self.draft.described(self.draft.label, asdict(self.draft))

    @property
    def draft_title(self) -> str:
        """Return the draft and its cache, for people."""
        return ", ".join(filter(None, (f"draft {self.draft_label}", self.cache_label)))

    @property
    def target_label(self) -> str:
        """Return the target's name in tables."""
        return model_label(self.target_name, self.target_path)

    @property
    def models(self) -> list[tuple[str, str | None]]:
        """Return the names and paths of the target and, if the draft has one, of its own model."""
        draft = self.draft.model if self.draft.needs_model else None
        return [(self.target_name, self.target_path)] + (
            [(draft.name, draft.path)] if draft else []
        )

    @property
    def cache_label(self) -> str:
        """Return the draft's cache policy and budget, or an empty text for a draft without a
        cache.
        """
        if not self.draft.is_model:
            return ""
        budget = f" {self.cache.budget:,}" if self.cache.has_budget else ""
        return f"{self.cache.policy}{budget}"

    @property
    def ranks(self) -> int:
        """Return the number of GPUs that share the target."""
        return self.hardware.count

    @cached_property
    def draft_model(self) -> ModelConfig:
        """Return the model that drafts."""
        model = self.draft.drafter(self.target)
        return model.as_predicted() if self.is_served else model

    @property
    def draft_ranks(self) -> int:
        """Return the number of GPUs that share the draft."""
        if self.draft.own_model is None:
            return self.ranks
        most = self.hardware.stack.draft_ranks
        usual = self.ranks if most is None else min(self.ranks, most, self.draft_model.num_kv_heads)
        return self.draft.tensor_parallel or usual

    @property
    def weight_bytes(self) -> float:
        """Return the bytes of a weight that is not quantized."""
        return self.stored_weight_bytes or self.element_bytes

    @property
    def draft_weight_bytes(self) -> float:
        """Return the bytes of a weight in the draft's layers; embedding and head are never
        quantized.
        """
        return QUANTIZED_BYTES.get(self.draft.quantization, self.weight_bytes)

    def moved_weight_bytes(self, rows: int) -> float:
        """Return the bytes that a draft step of `rows` rows moves for a weight in its layers.

        Where no kernel reads the codes themselves, the decoded weight is written and read as well.
        """
        quantization = self.draft.quantization
        decodes = quantization == "int8" if self.hardware.is_cpu else rows > CODE_ROWS
        decoded = 2 * self.element_bytes if quantization != "none" and decodes else 0
        return self.draft_weight_bytes + decoded

    @cached_property
    def work(self) -> dict[str, str]:
        """Return the draft's work whose time on a GPU does not follow from bytes, by kind."""
        return {} if self.hardware.is_cpu else work_of(self.draft, self.cache)

    def factor(self, kind: str) -> float:
        """Return how many times as long as its bytes this kind of work takes, as measured."""
        return self.hardware.kernels.factor(self.work, kind)

    @property
    def remark(self) -> str | None:
        """Return what was measured of `work` and what was not; None without such work."""
        return self.hardware.kernels.remark(self.work)

    @property
    def target_pass(self) -> Pass:
        """Return one autoregressive step of the target."""
        return Pass(
            self.target,
            self.batch,
            1,
            self.context,
            self.ranks,
            weight_bytes=self.weight_bytes,
            kv_bytes=self.element_bytes,
            activation_bytes=self.element_bytes,
            head_bytes=self.weight_bytes,
            routing=self.routing,
        )

    @cached_property
    def target_time(self) -> StepTime:
        """Return T_T."""
        return step_time(self.target_pass, self.hardware)

    @property
    def draft_pass(self) -> Pass:
        """Return one step of a draft that is a model."""
        return Pass(
            self.draft.step_model(self.draft_model),
            self.batch,
            1,
            self.tokens_read,
            self.draft_ranks,
            weight_bytes=self.moved_weight_bytes(self.batch),
            kv_bytes=self.cache.element_bytes(self.draft_model, self.element_bytes),
            activation_bytes=self.element_bytes,
            head_bytes=self.weight_bytes,
            routing=self.routing,
        )

    @cached_property
    def draft_step_times(self) -> tuple[StepTime, StepTime]:
        """Return the first draft step of a round, and each of the others."""
        if not self.draft.is_model:
            return StepTime(), StepTime()
        step = self.draft_pass
        later = self._draft_step(step)
        is_exact = self.draft.shares_target or self.draft.keeps_entries
        refed = self.hardware.stack.refed_tokens(is_exact, self.cache.policy)
        if refed == 1:
            return later, later
        # The last of them proposes.
        first = step._replace(
            query_tokens=refed,
            weight_bytes=self.moved_weight_bytes(self.batch * refed),
            logit_tokens=None if self.hardware.stack.drafts_all_logits else 1,
        )
        return self._draft_step(first), later

    def block_time(self, gamma: int) -> StepTime:
        """Return the one pass in which a draft of blocks proposes gamma tokens behind the last
        one.
        """
        weight = self.moved_weight_bytes(self.batch * (gamma + 1))
        return self._draft_step(
            self.draft_pass._replace(query_tokens=gamma + 1, weight_bytes=weight)
        )

    def _draft_step(self, step: Pass) -> StepTime:
        """Return the seconds of a draft step, with what codes and scores add."""
        time = step_time(step, self.hardware)
        time = time._replace(
            kv=time.kv * self.factor(CODES), weights=time.weights * self.factor(WEIGHTS)
        )
        return time.plus(scores_time(self, step), float(self.cache.scores == "step"))

    @property
    def tokens_read(self) -> int:
        """Return the entries per sequence and layer that a draft step reads."""
        return self.cache.tokens_read(self.context)

    def at(self, *, budget: int | None = None, **changes: Any) -> "Setup":
        """Return the same with some values changed; `budget` is that of the cache."""
        if budget is not None:
            changes["cache"] = replace(changes.get("cache", self.cache), budget=budget)
        other = replace(self, **changes)
        if changes.keys() == {"context"} and other.tokens_read == self.tokens_read:
            # The search for S* needs little else.
            other.__dict__["draft_step_times"] = self.draft_step_times
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
        """Return the seconds of the whole round."""
        return (
            self.gamma * (self.draft.total + self.select.total)
            + self.verify.total
            + self.overhead.total
        )

    def steps(self, cache: CacheConfig) -> dict[str, StepTime]:
        """Return T_T, T_D and T_V by the names of runs, whose draft step includes its own
        selection.
        """
        draft = self.draft.plus(self.select, float(cache.selects == "step"))
        return {"target_decode": self.target, "draft": draft, "verify": self.verify}

    def speedup(self, acceptance_length: float) -> float:
        """Return T_T over T_SD when a round yields `acceptance_length` tokens on average."""
        return self.target.total / (self.round_s / acceptance_length)


def round_times(setup: Setup, gamma: int) -> RoundTimes:
    """Predict the parts of a round that proposes `gamma` tokens. Raise UserError for a draft
    without a cost model.
    """
    if not setup.draft.is_predicted:
        raise UserError(f"draft={setup.draft.name} has no cost model")
    hardware = setup.hardware
    late = not hardware.stack.verify_chooses
    verify = setup.target_pass._replace(query_tokens=gamma + 1, chooses=not late)
    verified = _verification_time(setup, gamma, verify)
    if setup.draft.is_model and setup.cache.scores == "verification":
        # The first round of a cycle is observed.
        share = 1 / setup.cache.rounds_per_selection
        verified = verified.plus(scores_time(setup, verify), share)
    refresh = entries_time(
        verify._replace(model=setup.draft_model, ranks=setup.draft_ranks), hardware
    )
    return RoundTimes(
        gamma,
        target=setup.target_time,
        draft=_proposal_time(setup, gamma).scaled(1 / gamma),
        select=select_time(setup, gamma),
        verify=verified,
        overhead=StepTime(
            activations=choice_time(verify, hardware) if late else 0.0,
            overhead=1e-6 * (hardware.efficiency.round_overhead_us + _host_us(setup, gamma)),
        ).plus(refresh, float(setup.draft.keeps_entries)),
    )


def _proposal_time(setup: Setup, gamma: int) -> StepTime:
    """Return the seconds of a whole proposal: of one pass over a block, or of gamma steps, of which
    the first may feed two tokens.
    """
    if setup.draft.proposes_blocks:
        return setup.block_time(gamma)
    first, later = setup.draft_step_times
    return first.plus(later, gamma - 1)


def _verification_time(setup: Setup, gamma: int, verify: Pass) -> StepTime:
    """Return T_V: on average over the number of rows whose lookups have found a match."""
    stack, rows = setup.hardware.stack, setup.batch
    verify = verify._replace(splits=stack.splits(setup.hardware.device.name))
    share = setup.match_share
    if setup.draft.is_model or not stack.is_ragged or share == 1.0:
        return step_time(verify, setup.hardware)
    total = StepTime()
    for matches in range(rows + 1):
        chance = comb(rows, matches) * share**matches * (1 - share) ** (rows - matches)
        if chance > RARE:
            ragged = verify._replace(query_tokens=1 + gamma * matches / rows)
            total = total.plus(step_time(ragged, setup.hardware), chance)
    return total


def _host_us(setup: Setup, gamma: int) -> float:
    """Return the microseconds of a round outside an engine's kernels."""
    host = setup.hardware.stack.host
    steps = 1 if setup.draft.proposes_blocks else gamma
    drafting = steps * host.draft_step_us if setup.draft.is_model else host.lookup_us
    return host.round_us + drafting + setup.batch * host.row_us


def select_time(setup: Setup, gamma: int) -> StepTime:
    """Return T_select: what a draft step spends on choosing its entries, on average."""
    cache = setup.cache
    if not setup.draft.is_model or cache.selects not in ("step", "round"):
        return StepTime()
    model = setup.draft_model.shared_by(setup.draft_ranks)
    spec = CacheSpec(cache, gamma, setup.context, setup.context > model.max_position_embeddings)
    moved = setup.batch * cache.selection_bytes(spec, model, setup.element_bytes)
    seconds = setup.factor(SELECTING) * moved / setup.hardware.bandwidth
    return StepTime(kv=seconds / steps_per_selection(setup, gamma))


def steps_per_selection(setup: Setup, gamma: int) -> int:
    """Return the draft steps over which the time of one selection is spread; a block counts as
    gamma steps.
    """
    if setup.cache.selects == "step":
        return gamma if setup.draft.proposes_blocks else 1
    return gamma * setup.cache.rounds_per_selection


def scores_time(setup: Setup, scored: Pass) -> StepTime:
    """Return what a pass takes longer on a GPU because it scores entries: each query head's score
    of every entry is written, and read to be added up.

    On a CPU the kernel adds them up where they arise.
    """
    if SCORES not in setup.work:
        return StepTime()
    heads = scored.model.num_layers * scored.model.shared_by(scored.ranks).num_heads
    scores = scored.batch * scored.query_tokens * heads * scored.cached_tokens
    moved = 2 * FP32 * scores
    return StepTime(kv=setup.factor(SCORES) * moved / setup.hardware.bandwidth)


def prefill_s(
    setup: Setup,
    model: ModelConfig,
    ranks: int,
    prompt_len: int,
    rows: int = 1,
    chunk: int | None = None,
) -> float:
    """Return the seconds in which a model reads prompts of `rows` rows, all of the same length, in
    chunks of so many tokens of each; None: as the setup says.
    """
    size, seconds = setup.element_bytes, 0.0
    chunk = chunk or setup.prefill_chunk
    for start in range(0, prompt_len, chunk):
        tokens = min(chunk, prompt_len - start)
        seen = start + tokens / 2  # on average: a token sees those before it
        is_last = start + tokens == prompt_len
        step = Pass(
            model,
            rows,
            tokens,
            seen,
            ranks,
            weight_bytes=setup.weight_bytes,
            kv_bytes=size,
            activation_bytes=size,
            head_bytes=setup.weight_bytes,
            # The first new token follows the last of the prompt.
            logit_tokens=1 if is_last or setup.hardware.stack.discards_logits else 0,
            chooses=False,
            routing=setup.routing,
        )
        seconds += step_time(step, setup.hardware).total
    return seconds
