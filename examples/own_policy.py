"""Compare a cache policy of one's own, every n-th token and recent ones, with StreamingLLM's."""

import torch
from pydantic.dataclasses import dataclass

import magicdec
from magicdec.cache.compact import CompactCache
from magicdec.config.choices import CacheConfig
from magicdec.config.registry import POLICIES
from magicdec.inputs.rules import STRICT


@dataclass(frozen=True, config=STRICT)
class Spread(CacheConfig):
    """The keys of the policy, and its facts."""

    policy: str = "spread"
    compact = True


@POLICIES.register(Spread)
class SpreadCache(CompactCache):
    """Half of the budget is spread over the context; the other half holds recent tokens."""

    def fixed_slots(self, budget: int) -> int:
        """Return the slots that the entries spread over the context take."""
        return budget // 2

    def select(self, layer: int, source: object, scores_LBKS: object) -> torch.Tensor:
        """Return the positions of these entries, the same for all KV heads: (B, 1, F)."""
        older_B1 = (source.seqlens_B.long()[:, None] - self.window).clamp(min=0)
        return (torch.arange(self.num_fixed, device=older_B1.device) * older_B1 // self.num_fixed)[
            :, None
        ]


if __name__ == "__main__":
    for chosen in (["cache=streaming"], ["cache=window", "cache.policy=spread"]):
        run = magicdec.run([*chosen, "experiment=quick", "cache.budget=128", "wandb.mode=disabled"])
        print(chosen, f"acceptance {run.metrics['acceptance_rate']:.2f}")
