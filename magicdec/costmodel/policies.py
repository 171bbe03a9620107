"""What each cache policy makes a draft read, and what its selection costs, beside the budget itself."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from magicdec.costmodel.roofline import BF16
from magicdec.errors import UserError
from magicdec.models.config import ModelConfig

FP32 = 4.0


@dataclass(frozen=True)
class Settings:
    """The keys of `cache` that change what a policy costs; see conf/cache."""

    page_size: int = 16
    refresh: int = 1
    bits: int = 4


DEFAULTS = Settings()


@dataclass(frozen=True)
class Policy:
    """Costs of a policy, per draft step.

    `moves` is the number of bytes that one rank moves to select the entries of one sequence, given the model, its KV
    heads on the rank, the context, gamma and the settings; keys are counted in bf16. Static policies own a compact
    cache; dynamic ones read the target's.
    """

    name: str
    reads_everything: bool = False  # the budget does not limit what is read
    quantized: bool = False
    static: bool = True
    moves: Callable[[ModelConfig, int, int, int, Settings], float] | None = None
    settings: Settings = DEFAULTS

    @property
    def kv_bytes(self) -> float | None:
        """Bytes of an element that the draft reads; None: as the target's."""
        return self.settings.bits / 8 if self.quantized else None

    def select_bytes(self, model: ModelConfig, kv_heads: int, context: int, gamma: int) -> float:
        """What a rank moves to select the entries of one sequence; 0 where nothing is selected step by step."""
        return self.moves(model, kv_heads, context, gamma, self.settings) if self.moves else 0.0

    def tokens_read(self, context: int, budget: int) -> int:
        """Entries per sequence and layer that a draft step reads."""
        return context if self.reads_everything else min(budget, context)


def _keys(model: ModelConfig, kv_heads: int, context: int, gamma: int, settings: Settings) -> float:
    """Exact top-k scores every key."""
    return model.num_layers * kv_heads * context * model.head_dim * BF16


def _page_bounds(model: ModelConfig, kv_heads: int, context: int, gamma: int, settings: Settings) -> float:
    """A largest and a smallest key of each page."""
    return 2 * _keys(model, kv_heads, context, gamma, settings) / settings.page_size


def _scores(model: ModelConfig, kv_heads: int, context: int, gamma: int, settings: Settings) -> float:
    """Scores that verification has computed are written and ranked once in `refresh` rounds."""
    return 2 * model.num_layers * kv_heads * context * FP32 / (gamma * settings.refresh)


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("full", reads_everything=True),
        Policy("streaming"),
        Policy("window"),
        Policy("snapkv"),  # selects once, during prefill
        Policy("pyramidkv"),
        Policy("h2o"),  # its sums are a vector beside the budget's keys
        Policy("quest", static=False, moves=_page_bounds),
        Policy("topk", static=False, moves=_keys),
        Policy("verify_guided", static=False, moves=_scores),
        Policy("quantized", reads_everything=True, quantized=True),
    )
}


def policy_named(name: str, settings: Settings = DEFAULTS) -> Policy:
    """The costs of the policy of that name."""
    if name not in POLICIES:
        raise UserError(f"cache={name} has no cost model; one of: {', '.join(POLICIES)}")
    return replace(POLICIES[name], settings=settings)
