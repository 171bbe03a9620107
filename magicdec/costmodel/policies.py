"""What each cache policy makes a draft read, and what its selection costs, beside the budget itself."""

from collections.abc import Callable
from dataclasses import dataclass

from magicdec.costmodel.roofline import BF16
from magicdec.errors import UserError
from magicdec.models.config import ModelConfig

QUEST_PAGE = 16  # tokens that share a pair of bounds (Quest, arXiv 2406.10774)
FP32 = 4.0


@dataclass(frozen=True)
class Policy:
    """Costs of a policy, per draft step.

    `select_bytes` is what one rank moves to select the entries of one sequence, given the model, its KV heads on the
    rank, the context and gamma; keys are counted in bf16. Static policies own a compact cache; dynamic ones read the
    target's.
    """

    name: str
    reads_everything: bool = False  # the budget does not limit what is read
    kv_bytes: float | None = None  # of an element; None: as the target's
    static: bool = True
    select_bytes: Callable[[ModelConfig, int, int, int], float] | None = None

    def tokens_read(self, context: int, budget: int) -> int:
        """Entries per sequence and layer that a draft step reads."""
        return context if self.reads_everything else min(budget, context)


def _keys(model: ModelConfig, kv_heads: int, context: int, gamma: int) -> float:
    """Exact top-k scores every key."""
    return model.num_layers * kv_heads * context * model.head_dim * BF16


def _page_bounds(model: ModelConfig, kv_heads: int, context: int, gamma: int) -> float:
    """A largest and a smallest key of each page."""
    return 2 * _keys(model, kv_heads, context, gamma) / QUEST_PAGE


def _scores(model: ModelConfig, kv_heads: int, context: int, gamma: int) -> float:
    """Scores that verification has computed are written and ranked once a round."""
    return 2 * model.num_layers * kv_heads * context * FP32 / gamma


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("full", reads_everything=True),
        Policy("streaming"),
        Policy("window"),
        Policy("snapkv"),  # selects once, during prefill
        Policy("pyramidkv"),
        Policy("h2o"),  # its sums are a vector beside the budget's keys
        Policy("quest", static=False, select_bytes=_page_bounds),
        Policy("topk", static=False, select_bytes=_keys),
        Policy("verify_guided", static=False, select_bytes=_scores),
        Policy("quantized", reads_everything=True, kv_bytes=0.5),  # 4 bits
    )
}


def policy_named(name: str) -> Policy:
    """The costs of the policy of that name."""
    if name not in POLICIES:
        raise UserError(f"cache={name} has no cost model; one of: {', '.join(POLICIES)}")
    return POLICIES[name]
