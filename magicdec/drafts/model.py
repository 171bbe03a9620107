"""A draft that is a model over a cache: the target itself (self-speculation), or an independent, smaller model.

B rows, T tokens, E hidden size, G = gamma, V vocabulary. Self-speculation uses the target's own weights, and takes the
target's exact keys and values after each verification (MagicDec, arXiv 2408.11049). An independent draft keeps its own.
"""

from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.cache.draft_cache import DraftCache
from magicdec.decoding.prefill import prefill
from magicdec.decoding.scoring import score
from magicdec.decoding.state import DRAFT, State
from magicdec.drafts.base import Draft, DraftSpec, Proposal, Selection
from magicdec.models.kv_cache import KVCache
from magicdec.models.transformer import Transformer
from magicdec.verification.sampling import Use, choose


class ModelDraft(Draft):
    """gamma forward passes of `model`, one token each.

    Before a round the cache holds all but the last `refed` committed tokens, and the first pass feeds these: one for
    self-speculation, where verification has stored the rest. An independent draft feeds two: when everything was
    accepted it has never seen its last proposal, and feeding it again otherwise keeps shapes static.
    """

    refed: int

    def __init__(self, model: Transformer, cache: DraftCache, spec: DraftSpec):
        """Use the target's vocabulary; models of one tokenizer may pad theirs to different sizes."""
        self.model, self.cache, self.gamma, self.sampling = model, cache, spec.gamma, spec.sampling
        self.vocab_size = spec.target.config.vocab_size

    def propose(self, state: State, gamma: int) -> Proposal:
        """See Draft.propose."""
        return self.propose_after(self.feed(state.recent_BT(self.refed))[:, -1:], state, gamma)

    def feed(self, tokens_BT: Tensor) -> Tensor:
        """Append tokens to the cache and return their hidden states (B, T, E)."""
        return self.model(self._known(tokens_BT), self.cache)

    def propose_after(self, hidden_B1E: Tensor, state: State, gamma: int) -> Proposal:
        """Guess the next `gamma` tokens, given the hidden state of the last committed token, which has been fed."""
        positions_BG = state.next_positions_BT(gamma)
        tokens: list[Tensor] = []
        distributions: list[Tensor | None] = []
        for i in range(gamma):
            hidden_B1E = self.feed(tokens[-1]) if tokens else hidden_B1E
            logits_B1V = self.model.logits(hidden_B1E)[..., : self.vocab_size]
            state.inspect(logits_B1V, DRAFT)
            token_B1, q_B1V = choose(logits_B1V, positions_BG[:, i : i + 1], Use.PROPOSE, self.sampling)
            tokens.append(token_B1)
            distributions.append(q_B1V)
        return Proposal(torch.cat(tokens, dim=1), self._stack(distributions))

    def _scores(self, source: KVCache, state: State, progress: Callable[[int], None]) -> Tensor | None:
        """Return the scores by which a policy that observes chooses among the entries of a prefilled context."""
        if not self.cache.observes:
            return None
        tokens_BS = self._known(state.tokens_BS)
        return score(self.model, source, tokens_BS, state.max_prompt_len, self.cache.observes, progress)

    def _known(self, tokens: Tensor) -> Tensor:
        """Replace tokens that only the target's padding has by this model's last one: a guess may be wrong."""
        return tokens.clamp(max=self.model.config.vocab_size - 1)

    def _stack(self, distributions: list[Tensor | None]) -> Tensor | None:
        """Return distributions (B, 1, V') as one (B, G, V), padded with zeros to the target's vocabulary."""
        sampled = [q for q in distributions if q is not None]
        if not sampled:
            return None
        q_BGV = torch.cat(sampled, dim=1)
        return F.pad(q_BGV, (0, self.vocab_size - q_BGV.shape[-1]))

    @property
    def phases(self) -> int:
        """See Draft.phases."""
        return self.cache.phases

    def watch(self, verified: KVCache, phase: int) -> KVCache:
        """See Draft.watch."""
        return self.cache.watch(verified, phase)

    def selection(self, state: State) -> Selection | None:
        """See Draft.selection."""
        if self.cache.settings.selects in ("round", "step"):
            return Selection(lambda: self.cache.select(self.model.attention), self.cache.settings.selects)
        return None

    def copy_row(self, row: int, source: Draft) -> None:
        """See Draft.copy_row."""
        assert isinstance(source, ModelDraft)
        self.cache.copy_row(row, source.cache)

    def clear_row(self, row: int) -> None:
        """See Draft.clear_row."""
        self.cache.clear_row(row)

    @property
    def cache_bytes(self) -> int:
        """See Draft.cache_bytes."""
        return self.cache.num_bytes


class SelfDraft(ModelDraft):
    """The target drafts for itself over a sparse view of its own cache."""

    refed = 1

    def __init__(self, model: Transformer, cache: DraftCache, target_cache: KVCache, spec: DraftSpec):
        """Take `target_cache`, which has the exact entries of the model's layers."""
        super().__init__(model, cache, spec)
        self.target_cache = target_cache

    @classmethod
    def build(cls, spec: DraftSpec) -> "SelfDraft":
        """See Draft.build."""
        model = spec.model or spec.target
        return cls(model, spec.new_cache(model, spec.target_cache), spec.target_cache, spec)

    def prefill(self, state: State, progress: Callable[[int], None]) -> None:
        """See Draft.prefill: the policy picks from what the target has computed."""
        self.cache.load(self.target_cache, self._scores(self.target_cache, state, progress))

    def selection(self, state: State) -> Selection | None:
        """See Draft.selection: at the prefill, the scoring pass and the gather."""
        if self.cache.settings.selects == "prefill":
            return Selection(lambda: self.prefill(state, lambda _: None), "prefill")
        return super().selection(state)

    def commit(self, count_B: Tensor, gamma: int) -> None:
        """See Draft.commit: exact entries come from the target's cache, where slots are positions."""
        self.cache.take(self.target_cache, self.cache.length_B, count_B, gamma + 1)


class IndependentDraft(ModelDraft):
    """A smaller model with a cache of its own."""

    refed = 2

    def __init__(self, model: Transformer, cache: DraftCache, chunk: int, spec: DraftSpec, lag: int):
        """Prefill `chunk` tokens at a time; before a round the cache lacks the last `lag` committed tokens."""
        super().__init__(model, cache, spec)
        self.chunk, self.lag = chunk, lag

    @classmethod
    def build(cls, spec: DraftSpec, lag: int = refed) -> Self:
        """See Draft.build; `lag` as in __init__."""
        assert spec.model is not None
        cache, chunk = spec.new_cache(spec.model, None), spec.prefill_chunk
        if cache.spec.in_cache_positions:
            chunk = min(chunk, spec.model.config.max_position_embeddings - cache.spec.cache.budget)
        return cls(spec.model, cache, chunk, spec, lag)

    def prefill(self, state: State, progress: Callable[[int], None]) -> None:
        """See Draft.prefill: through the policy's own view, so that the context may exceed what it was trained for."""
        cache = self.cache.for_prefill(self.chunk)
        # The first round feeds the last prompt tokens and the first new one.
        tokens_BS, longest = self._known(state.tokens_BS), state.max_prompt_len + 1 - self.lag
        if longest > 0:
            prefill(self.model, cache, tokens_BS, self._lengths_B(state), longest, self.chunk, progress)
        self.cache.adopt(cache, self._scores(cache, state, progress))

    def simulate_prefill(self, state: State) -> None:
        """See Draft.simulate_prefill."""
        self.cache.set_length(self._lengths_B(state))

    def _lengths_B(self, state: State) -> Tensor:
        """Return the lengths that a prefill leaves in the cache (int32)."""
        return (state.prompt_len_B + 1 - self.lag).clamp(min=0)

    def commit(self, count_B: Tensor, gamma: int) -> None:
        """See Draft.commit: its own entries of accepted tokens stay as it computed them."""
        self.cache.take(self.cache, self.cache.committed_slots_B, count_B, gamma + 1)
