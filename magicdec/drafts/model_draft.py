"""A draft that is a model over a cache: the target itself (self-speculation), or an independent, smaller model.

B rows, T tokens, E hidden size, G = gamma, V vocabulary. Self-speculation uses the target's own weights, and takes the
target's exact keys and values after each verification (MagicDec, arXiv 2408.11049). An independent draft keeps its own.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.cache.draft_cache import DraftCache
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
