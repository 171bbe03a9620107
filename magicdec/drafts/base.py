"""The interface of a draft, which proposes tokens. To add one, subclass Draft (docs/adding-a-policy.md)."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from magicdec.cache.draft_cache import DraftCache
from magicdec.config.choices import CacheConfig, CacheSpec, DraftConfig, Selects
from magicdec.config.registry import POLICIES
from magicdec.decoding.state import State
from magicdec.models.kv_cache import KVCache
from magicdec.models.transformer import Transformer
from magicdec.verification.sampling import RowSampling, Sampling


class Proposal(NamedTuple):
    """gamma tokens a row (B, G), and the distributions (B, G, V) they were drawn from; None where not sampled."""

    tokens_BG: Tensor
    q_BGV: Tensor | None


class Selection(NamedTuple):
    """A selection step that can be run again for timing, and when it is done."""

    run: Callable[[], None]
    at: Selects


@dataclass(frozen=True)
class DraftSpec:
    """The arguments of a draft: its groups of the configuration, and the target on one batch."""

    draft: DraftConfig
    cache: CacheConfig
    target: Transformer
    target_cache: KVCache
    state: State
    sampling: Sampling | RowSampling
    gamma: int  # the largest, where `draft.gamma` is auto
    prefill_chunk: int
    model: Transformer | None = None  # of an independent draft, or the target's own weights quantised

    def new_cache(self, model: Transformer, target_cache: KVCache | None) -> DraftCache:
        """Allocate a cache for `model`; `target_cache` where it drafts from the target's own entries."""
        is_longer = self.state.max_len > model.config.max_position_embeddings
        spec = CacheSpec(self.cache, self.gamma + self.draft.extra_tokens, self.state.max_len, is_longer)
        rows, device = len(self.state.tokens_BS), self.state.tokens_BS.device
        policy: type[DraftCache] = POLICIES[self.cache.policy].work
        return policy.build(spec, model.config, rows, model.dtype, device, target_cache)


class Draft(ABC):
    """A source of proposals. Everything but `prefill` is free of host synchronisation.

    Shapes depend on the gamma of a round, which may differ from one round to the next.
    """

    gamma: int  # the most tokens that a round proposes

    @classmethod
    @abstractmethod
    def build(cls, spec: DraftSpec) -> "Draft":
        """Allocate a draft for one batch."""

    @abstractmethod
    def prefill(self, state: State, progress: Callable[[int], None]) -> None:
        """Get ready to continue the prompts; call `progress` with the tokens of every chunk that the model has read."""

    def simulate_prefill(self, state: State) -> None:
        """Enter the state that `prefill` would leave, with meaningless entries: for timing only."""
        self.prefill(state, lambda _: None)

    @abstractmethod
    def propose(self, state: State, gamma: int) -> Proposal:
        """Guess the next `gamma` tokens of every row."""

    @abstractmethod
    def commit(self, count_B: Tensor, gamma: int) -> None:
        """Commit `count_B` <= gamma + 1 tokens of every row: accepted proposals, then the bonus token."""

    @property
    def phases(self) -> int:
        """Return the kinds of rounds that take turns, each captured by itself."""
        return 1

    def watch(self, verified: KVCache, phase: int) -> KVCache:
        """Return the target's cache for a verification of this phase; a draft that learns from it observes it."""
        return verified

    def selection(self, state: State) -> Selection | None:
        """Return the choice of entries by their attention; None if there is none."""
        return None

    def copy_row(self, row: int, source: "Draft") -> None:
        """Make a row the copy of another such draft's only one; a draft that `serves` copies all that it keeps."""
        raise NotImplementedError

    def clear_row(self, row: int) -> None:  # noqa: B027 - a draft may keep nothing of it
        """Forget a row that nobody has: its proposals are for nothing, and should cost little."""

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """Return the bytes of KV cache beyond the target's."""
