"""An independent draft: a smaller model with a cache of its own.

B rows, S tokens of the sequence.
"""

from typing import Self

from pydantic.dataclasses import dataclass
from torch import Tensor
from typing_extensions import override

from magicdec.cache.draft_cache import DraftCache
from magicdec.config.choices import DraftConfig
from magicdec.config.registry import DRAFTS
from magicdec.decoding.prefill import Advance, prefill, simulate
from magicdec.decoding.state import State
from magicdec.drafts.base import DraftSpec, ModelDraft, Proposal
from magicdec.inputs.rules import STRICT
from magicdec.models.transformer import Transformer


@dataclass(frozen=True, config=STRICT)
class IndependentModel(DraftConfig):
    """A smaller model, with a cache of its own."""

    name: str = "model"
    needs_model = serves = True
    label, title = "{model}", "draft {model}"


@DRAFTS.register(IndependentModel)
class IndependentDraft(ModelDraft):
    """A smaller model with a cache of its own."""

    refed = 2

    def __init__(
        self, model: Transformer, cache: DraftCache, chunk: int, spec: DraftSpec, lag: int
    ):
        """Prefill `chunk` tokens at a time; before a round the cache lacks the last `lag` committed
        tokens.
        """
        super().__init__(model, cache, spec)
        self.chunk, self.lag = chunk, lag

    @classmethod
    @override
    def build(cls, spec: DraftSpec, lag: int = refed) -> Self:
        """Allocate a draft; `lag` as in __init__."""
        assert spec.model is not None
        cache = spec.new_cache(spec.model, None)
        chunk = spec.prefill_chunk
        if cache.spec.in_cache_positions:
            chunk = min(chunk, spec.model.config.max_position_embeddings - cache.spec.cache.budget)
        return cls(spec.model, cache, chunk, spec, lag)

    @override
    def prefill(self, state: State, progress: Advance | None = None) -> None:
        """Prefill through the policy's view, so that the context may exceed what the model was
        trained for.
        """
        cache = self._empty_cache()
        # The first round feeds the last prompt tokens and the first new one.
        tokens_BS = self._known(state.tokens_BS)
        longest = state.max_prompt_len + 1 - self.lag
        if longest > 0:
            prefill(
                self.model, cache, tokens_BS, self._lengths_B(state), longest, self.chunk, progress
            )
        self._adopt(cache, state, progress)

    @override
    def simulate_prefill(self, state: State) -> None:
        """Select from noise as `prefill` does from the prompts' entries."""
        cache = self._empty_cache()
        lengths_B = self._lengths_B(state)
        simulate(self.model, cache, lengths_B)
        cache.set_length(lengths_B)
        self._adopt(cache, state)

    def _empty_cache(self) -> DraftCache:
        """Return the cache to prefill, which keeps the queries by which the policy scores."""
        cache = self.cache.for_prefill(self.chunk)
        cache.keep_queries(self.cache.observes)
        return cache

    def _adopt(self, cache: DraftCache, state: State, progress: Advance | None = None) -> None:
        self.cache.adopt(cache, self._scores(cache, cache.last_queries, state, progress))

    def _lengths_B(self, state: State) -> Tensor:
        """Return the lengths that a prefill leaves in the cache (int32)."""
        return (state.prompt_len_B + 1 - self.lag).clamp(min=0)

    @override
    def pause(self, state: State) -> Proposal:
        """Feed what a round feeds first: the next round does not feed it again."""
        self.feed(state.recent_BT(self.refed))
        return super().pause(state)

    @override
    def commit(self, count_B: Tensor, gamma: int) -> None:
        """Keep the model's own entries of accepted tokens."""
        self.cache.take(self.cache, self.cache.committed_slots_B, count_B, gamma + 1)
