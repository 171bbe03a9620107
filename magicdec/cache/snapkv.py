"""SnapKV: what the end of the prompt attends to (Li et al. 2024, arXiv 2404.14469)."""

from typing import Annotated

from pydantic.dataclasses import dataclass
from typing_extensions import override

from magicdec.cache.compact import ScoredCache
from magicdec.config.choices import CacheConfig, CacheSpec
from magicdec.config.registry import POLICIES
from magicdec.inputs.rules import LARGEST, STRICT, Count, must


@dataclass(frozen=True, config=STRICT)
class SnapKV(CacheConfig):
    """Entries that the last `observation_window` prompt tokens attend to; scores averaged over
    `kernel` neighbours.
    """

    policy: str = "snapkv"
    observation_window: Count = 32
    kernel: Annotated[
        Count, must(f"must be an odd number from 1 to {LARGEST:,}", lambda k: k % 2 == 1)
    ] = 5
    compact = True
    selects = "prefill"

    @override
    def observed(self, spec: CacheSpec) -> int:
        return self.observation_window


@POLICIES.register(SnapKV)
class SnapKVCache(ScoredCache):
    """The entries that the prompt's last `observation_window` tokens attend to most, and as many
    recent tokens.

    Scores are summed over the query heads of a KV head, so that each KV head keeps entries of its
    own, and averaged over `kernel` neighbours, so that a selected entry keeps its surroundings.
    Recent tokens take at most half the budget, but at least gamma + 1 entries. The policy selects
    once: tokens that are generated pass through the ring of recent tokens. In the authors' code
    they add to the budget, and each query head has entries of its own.
    """

    settings: SnapKV

    @override
    def set_up(self) -> None:
        super().set_up()
        self.observes = self.settings.observed(self.spec)
        self.pooling = self.settings.kernel

    @override
    def fixed_slots(self, budget: int) -> int:
        return max(0, budget - self.spec.num_recent(self.settings.observation_window))
