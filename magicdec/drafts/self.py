"""Self-speculation: the target drafts for itself over a sparse view of its own cache (MagicDec,
arXiv 2408.11049).
"""

from pydantic.dataclasses import dataclass
from torch import Tensor
from typing_extensions import override

from magicdec.cache.draft_cache import DraftCache
from magicdec.config.choices import DraftConfig
from magicdec.config.registry import DRAFTS
from magicdec.decoding.prefill import Advance
from magicdec.decoding.state import State
from magicdec.drafts.base import DraftSpec, ModelDraft, Proposal
from magicdec.inputs.rules import STRICT
from magicdec.models.kv_cache import KVCache
from magicdec.models.last_queries import LastQueries
from magicdec.models.transformer import Transformer


@dataclass(frozen=True, config=STRICT)
class SelfSpeculation(DraftConfig):
    """Self-speculation: the target over `cache`."""

    name: str = "self"
    shares_target = is_target = serves = True
    title = "self-speculation"


@DRAFTS.register(SelfSpeculation)
class SelfDraft(ModelDraft):
    """The target drafts for itself over a sparse view of its own cache."""

    refed = 1
    entries: KVCache

    def __init__(
        self, model: Transformer, cache: DraftCache, target_cache: KVCache, spec: DraftSpec
    ):
        """Take `target_cache`, which has the exact entries of the model's layers."""
        super().__init__(model, cache, spec)
        self.entries, self.target_cache = target_cache, spec.target_cache
        self.target_cache.keep_queries(cache.observes)

    @classmethod
    @override
    def build(cls, spec: DraftSpec) -> "SelfDraft":
        model = spec.model or spec.target
        return cls(model, spec.new_cache(model, spec.target_cache), spec.target_cache, spec)

    @property
    @override
    def last_queries(self) -> LastQueries | None:
        """Return those of the target's layers, of which a draft that skips some has the first."""
        return self.target_cache.last_queries

    @override
    def prefill(self, state: State, progress: Advance | None = None) -> None:
        """Select from what the target has computed."""
        self.select(state, progress)

    @override
    def propose(self, state: State, gamma: int) -> Proposal:
        """Propose behind what the target has seen; its recurrent states are not changed."""
        self.cache.follow(self.entries)
        return super().propose(state, gamma)

    @override
    def commit(self, count_B: Tensor, gamma: int) -> None:
        """Copy exact entries from the target's cache, where slots are positions."""
        self.cache.take(self.entries, self.cache.length_B, count_B, gamma + 1)
