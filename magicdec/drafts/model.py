"""A draft that is a model over a cache: the target itself (self-speculation), or an independent, smaller model.

B rows, G = gamma, V vocabulary. Self-speculation hands in the target's own weights and takes the target's exact keys
and values after each verification (MagicDec, arXiv 2408.11049). An independent draft keeps its own.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.cache.draft_cache import DraftCache
from magicdec.cache.kv_cache import KVCache
from magicdec.decoding.prefill import prefill
from magicdec.decoding.state import State
from magicdec.drafts.base import DRAFTS, Draft, Proposal
from magicdec.models.transformer import Transformer
from magicdec.verification.sampling import Sampling, Use, choose


class ModelDraft(Draft):
    """gamma forward passes of `model`, one token each.

    Before a round the cache holds all but the last `refed` committed tokens, and the first pass feeds these: one for
    self-speculation, where verification has stored the rest. An independent draft feeds two: when everything was
    accepted it has never seen its last proposal, and feeding it again otherwise keeps shapes static.
    """

    def __init__(self, model: Transformer, cache: DraftCache, gamma: int, vocab_size: int, sampling: Sampling):
        """`vocab_size` is the target's; models of one tokenizer may pad theirs to different sizes."""
        self.model, self.cache, self.gamma, self.sampling = model, cache, gamma, sampling
        self.vocab_size = vocab_size

    refed: int

    def propose(self, state: State) -> Proposal:
        """See Draft.propose."""
        positions_BG = state.next_positions_BT(self.gamma)
        tokens, distributions = [state.recent_BT(self.refed)], []
        for i in range(self.gamma):
            logits = self.model.logits(self.model(self._known(tokens[-1]), self.cache)[:, -1:])[..., : self.vocab_size]
            token_B1, q_B1V = choose(logits, positions_BG[:, i : i + 1], Use.PROPOSE, self.sampling)
            tokens.append(token_B1)
            distributions.append(q_B1V)
        return Proposal(torch.cat(tokens[1:], dim=1), self._stack(distributions))

    def _known(self, tokens: Tensor) -> Tensor:
        """Tokens that only the target's padding has stand for this model's last one: a guess may be wrong."""
        return tokens.clamp(max=self.model.config.vocab_size - 1)

    def _stack(self, distributions: list[Tensor | None]) -> Tensor | None:
        """Distributions (B, 1, V') as one (B, G, V), padded with zeros to the target's vocabulary."""
        sampled = [q for q in distributions if q is not None]
        if not sampled:
            return None
        q_BGV = torch.cat(sampled, dim=1)
        return F.pad(q_BGV, (0, self.vocab_size - q_BGV.shape[-1]))

    @property
    def cache_bytes(self) -> int:
        """See Draft.cache_bytes."""
        return self.cache.num_bytes


@DRAFTS.register("self")
class SelfDraft(ModelDraft):
    """The target drafts for itself over a sparse view of its own cache."""

    refed = 1

    def __init__(
        self,
        model: Transformer,
        cache: DraftCache,
        gamma: int,
        vocab_size: int,
        sampling: Sampling,
        target_cache: KVCache,
    ):
        super().__init__(model, cache, gamma, vocab_size, sampling)
        self.target_cache = target_cache

    def prefill(self, state: State, progress: Callable[[int], None]) -> None:
        """See Draft.prefill: the policy picks from what the target has computed."""
        self.cache.load(self.target_cache)

    def commit(self, count_B: Tensor) -> None:
        """See Draft.commit: exact entries come from the target's cache, where slots are positions."""
        self.cache.take(self.target_cache, self.cache.length_B, count_B, self.gamma + 1)


@DRAFTS.register("model")
class IndependentDraft(ModelDraft):
    """A smaller model with a cache of its own."""

    refed = 2

    def __init__(
        self, model: Transformer, cache: DraftCache, gamma: int, vocab_size: int, sampling: Sampling, chunk: int
    ):
        """`chunk` is how many tokens it prefills at a time."""
        super().__init__(model, cache, gamma, vocab_size, sampling)
        self.chunk = chunk

    def prefill(self, state: State, progress: Callable[[int], None]) -> None:
        """See Draft.prefill: through the policy's own view, so that the context may exceed what it was trained for."""
        cache = self.cache.for_prefill(self.chunk)
        lengths_B = state.prompt_len_B - 1  # the last prompt token and the first new one are fed by the first round
        longest = state.max_prompt_len - 1
        if longest:
            prefill(self.model, cache, self._known(state.tokens_BS), lengths_B, longest, self.chunk, progress)
        self.cache.adopt(cache)

    def simulate_prefill(self, state: State) -> None:
        """See Draft.simulate_prefill."""
        self.cache.set_length(state.prompt_len_B - 1)

    def commit(self, count_B: Tensor) -> None:
        """See Draft.commit: its own entries of accepted tokens stay as it computed them."""
        self.cache.take(self.cache, self.cache.committed_slots_B, count_B, self.gamma + 1)
