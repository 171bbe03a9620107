"""The interface of a draft, which proposes tokens, and the common part of drafts that are models.

To add a draft, subclass one of them (docs/adding-a-policy.md).

B rows, T tokens, E hidden size, G = gamma, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from magicdec.cache.draft_cache import DraftCache
from magicdec.config.choices import CacheConfig, CacheSpec, DraftConfig, Selects
from magicdec.config.registry import POLICIES
from magicdec.decoding.prefill import Advance
from magicdec.decoding.state import DRAFT, State
from magicdec.models.kv_cache import KVCache
from magicdec.models.last_queries import LastQueries
from magicdec.models.taps import Taps
from magicdec.models.transformer import Transformer
from magicdec.verification.sampling import RowSampling, Sampling, Use, choose


class Proposal(NamedTuple):
    """gamma tokens a row (B, G), and the distributions (B, G, V) they were drawn from; None where
    not sampled.
    """

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
    # Of an independent draft, or those of the target's own layers that draft, quantized.
    model: Transformer | None = None

    def new_cache(self, model: Transformer, target_cache: KVCache | None) -> DraftCache:
        """Allocate a cache for `model`; `target_cache` where it drafts from the target's own
        entries.
        """
        is_longer = self.state.max_len > model.config.max_position_embeddings
        slots = self.gamma + self.draft.extra_tokens
        # Served requests are prefilled one by one: each is the first sequence of its batch.
        sequence = self.sampling.sequence if isinstance(self.sampling, Sampling) else 0
        spec = CacheSpec(self.cache, slots, self.state.max_len, is_longer, sequence)
        rows = len(self.state.tokens_BS)
        device = self.state.tokens_BS.device
        policy: type[DraftCache] = POLICIES[self.cache.policy].work
        return policy.build(spec, model.config, rows, model.dtype, device, target_cache)


class Draft(ABC):
    """A source of proposals. What a round calls is free of host synchronisation: `propose`,
    `pause`, `watch` and `commit`.

    Shapes depend on the gamma of a round, which may differ from one round to the next.
    """

    gamma: int  # the most tokens that a round proposes
    taps: Taps | None = None  # of the target's hidden states, which every verification leaves there
    heard_seconds: float = 0.0  # that `hear` has taken of the last prefill
    # How many rounds of each kind follow each other in a cycle. Each kind is captured by itself.
    phases: tuple[int, ...] = (1,)
    caches: tuple[KVCache, ...] = ()  # that proposals are made over

    @classmethod
    @abstractmethod
    def build(cls, spec: DraftSpec) -> "Draft":
        """Allocate a draft for one batch."""

    def hear(self, start: int, state: State) -> None:
        """Take the hidden states of a chunk of the prompts, which begins at token `start`, from
        `taps`.
        """
        raise NotImplementedError

    @abstractmethod
    def prefill(self, state: State, progress: Advance | None = None) -> None:
        """Prepare to continue the prompts. Call `progress` with the number of tokens of each
        chunk.
        """

    def simulate_prefill(self, state: State) -> None:
        """Set the state as after `prefill`, with meaningless entries, for timing only."""
        self.prefill(state)

    def prepare(self, state: State, gamma: int) -> None:  # noqa: B027 - drafts that work on the device need none
        """Do what the host does before a round that proposes `gamma` tokens. It is not captured in
        a CUDA graph.
        """

    @abstractmethod
    def propose(self, state: State, gamma: int) -> Proposal:
        """Guess the next `gamma` tokens of every row."""

    def pause(self, state: State) -> Proposal:
        """Propose nothing in this round, and stay able to propose in the next one."""
        return Proposal(state.tokens_BS[:, :0], None)

    def commit(self, count_B: Tensor, gamma: int) -> None:  # noqa: B027 - lookups need the state's tokens alone
        """Commit `count_B` <= gamma + 1 tokens of every row: accepted proposals, then the bonus
        token.
        """

    def watch(self, verified: KVCache, phase: int) -> KVCache:
        """Return the target's cache for a verification of this phase, or a view of it that records
        attention.
        """
        return verified

    def selection(self, state: State) -> Selection | None:
        """Return the selection of entries by their attention; None if there is none."""
        return None

    def copy_row(self, row: int, source: "Draft") -> None:
        """Copy the only row of another such draft to a row. A draft that `serves` copies all its
        state.
        """
        raise NotImplementedError

    def clear_row(self, row: int) -> None:  # noqa: B027 - a draft may keep nothing of it
        """Clear a row that no request uses. Its proposals are ignored, and should cost little."""

    def clear_entries(self) -> None:
        """Set all entries to 0, before a prefill that follows a request that has failed."""
        for cache in self.caches:
            cache.clear_entries()

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of KV cache beyond the target's."""
        return 0


class ModelDraft(Draft):
    """A model over a cache: gamma forward passes of one token each.

    Before a round the cache holds all but the last `refed` committed tokens, and the first pass
    feeds these: one for self-speculation, where verification has stored the rest. An independent
    draft feeds two: when everything was accepted it has never seen its last proposal, and feeding
    it again otherwise keeps shapes static.
    """

    refed: int
    entries: KVCache | None = None  # the exact entries that `cache` is selected from, if it is

    def __init__(self, model: Transformer, cache: DraftCache, spec: DraftSpec):
        """Use the size of the target's vocabulary: models with one tokenizer may pad theirs to
        different sizes.
        """
        self.model = model
        self.vocab_size = spec.target.config.vocab_size
        self.cache, self.caches = cache, (cache,)
        self.gamma, self.phases = spec.gamma, cache.phases
        self.sampling = spec.sampling

    @override
    def propose(self, state: State, gamma: int) -> Proposal:
        return self.propose_after(self.feed(state.recent_BT(self.refed))[:, -1:], state, gamma)

    def feed(self, tokens_BT: Tensor) -> Tensor:
        """Append tokens to the cache and return their hidden states (B, T, E)."""
        return self.model(self._known(tokens_BT), self.cache)

    def propose_after(self, hidden_B1E: Tensor, state: State, gamma: int) -> Proposal:
        """Guess the next `gamma` tokens, given the hidden state of the last committed token, which
        has been fed.
        """
        places_BG = state.places_in_round_BT(gamma)
        tokens: list[Tensor] = []
        distributions: list[Tensor | None] = []
        for i in range(gamma):
            hidden_B1E = self.feed(tokens[-1]) if tokens else hidden_B1E
            logits_B1V = self.model.logits(hidden_B1E)[..., : self.vocab_size]
            state.inspect(logits_B1V, DRAFT)
            chosen = choose(logits_B1V, places_BG[:, i : i + 1], Use.PROPOSE, self.sampling)
            token_B1, q_B1V = self.in_target(*chosen)
            tokens.append(token_B1)
            distributions.append(q_B1V)
        return Proposal(torch.cat(tokens, dim=1), self._stack(distributions))

    def in_target(self, token_B1: Tensor, q_B1V: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return a token, and the distribution it was drawn from, in the target's vocabulary."""
        return token_B1, q_B1V

    def _scores(
        self,
        source: KVCache,
        queries: LastQueries | None,
        state: State,
        progress: Advance | None,
    ) -> Tensor | None:
        """Return the scores by which a policy that observes selects from the entries of a prefilled
        context: by the queries that were kept, or else by running the model again.
        """
        last = self.cache.observes
        if not last:
            return None
        from magicdec.decoding.scoring import score, score_by_queries  # few policies score

        if queries is not None and last <= queries.num_tokens:
            return score_by_queries(queries, source, state.max_prompt_len, last, progress)

        def feed(index_BT: Tensor, view: KVCache) -> None:
            self.replay(index_BT, view, state)

        return score(self.model, source, feed, state.max_prompt_len, last, progress)

    @property
    def last_queries(self) -> LastQueries | None:
        """Return the queries of the last tokens of `entries`, where the prefill has kept them."""
        return None

    def replay(self, index_BT: Tensor, view: KVCache, state: State) -> None:
        """Run the model again over the tokens whose entries have these indices."""
        self.model(self._known(state.tokens_BS.gather(1, index_BT)), view)

    def _known(self, tokens: Tensor) -> Tensor:
        """Replace tokens beyond this model's vocabulary, which only the target's padding has, by
        its last one.
        """
        return tokens.clamp(max=self.model.config.vocab_size - 1)

    def _stack(self, distributions: list[Tensor | None]) -> Tensor | None:
        """Return distributions (B, 1, V') as one (B, G, V), padded with zeros to the target's
        vocabulary.
        """
        sampled = [q for q in distributions if q is not None]
        if not sampled:
            return None
        q_BGV = torch.cat(sampled, dim=1)
        return F.pad(q_BGV, (0, self.vocab_size - q_BGV.shape[-1]))

    @override
    def watch(self, verified: KVCache, phase: int) -> KVCache:
        return self.cache.watch(verified, phase)

    def select(self, state: State, progress: Advance | None = None) -> None:
        """Select from `entries` at the end of the prefill: score them, if the policy does, and
        gather.
        """
        assert self.entries is not None
        scores_LBKS = self._scores(self.entries, self.last_queries, state, progress)
        self.cache.load(self.entries, scores_LBKS)

    @override
    def selection(self, state: State) -> Selection | None:
        selects = self.cache.settings.selects
        if selects == "prefill" and self.entries is not None:
            return Selection(lambda: self.select(state), selects)
        if selects in ("round", "step"):
            return Selection(lambda: self.cache.reselect(self.model.attention), selects)
        return None

    @override
    def copy_row(self, row: int, source: Draft) -> None:
        assert isinstance(source, ModelDraft)
        self.cache.copy_row(row, source.cache)

    @override
    def clear_row(self, row: int) -> None:
        self.cache.clear_row(row)

    @property
    @override
    def cache_bytes(self) -> int:
        return self.cache.num_bytes
