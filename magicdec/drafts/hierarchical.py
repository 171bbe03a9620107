"""A hierarchy of drafts: a small model drafts for the target over a retrieval cache, which drafts
for the target over everything (TriForce, Sun et al. 2024, arXiv 2404.11912).

B rows, G = gamma, I = inner_gamma, T = I + 1 tokens of an inner verification, V vocabulary.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Self

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from typing_extensions import override

from magicdec.config.choices import CacheConfig, DraftConfig
from magicdec.config.registry import DRAFTS, Cache
from magicdec.decoding.prefill import Advance
from magicdec.decoding.state import DRAFT, State
from magicdec.drafts.base import Draft, DraftSpec, Proposal
from magicdec.drafts.model import IndependentDraft
from magicdec.drafts.self import SelfDraft
from magicdec.inputs.rules import STRICT, GammaOr0
from magicdec.verification.accept import Verdict, accept_greedy, accept_sampled
from magicdec.verification.sampling import Use, probabilities


@dataclass(frozen=True, config=STRICT)
class Hierarchical(DraftConfig):
    """A small model over a `cache` of its own, which proposes `inner_gamma` tokens at a time to the
    target.
    """

    name: str = "hierarchical"
    inner_gamma: GammaOr0 = 0
    cache: Cache | None = None
    needs_model = shares_target = serves = one_rank = True
    is_predicted = pauses = False
    title = "draft {model} below the target's own"

    @property
    @override
    def extra_tokens(self) -> int:
        return self.inner_gamma

    @override
    def caches(self, cache: CacheConfig) -> dict[str, CacheConfig]:
        return super().caches(cache) | ({"draft.cache": self.cache} if self.cache else {})

    @override
    def round_slots(self, gamma: int) -> int:
        """Count the tokens that the model lacks, and all that a round may write."""
        return (gamma + 1) + gamma + self.inner_gamma + 1

    @override
    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if self.cache is None:
            valid = (
                f"draft.name={self.name} needs one; choose draft={self.name} cache@draft.cache=NAME"
            )
            yield f"draft.cache=null: {valid}"
        if self.inner_gamma < 1:
            yield f"draft.inner_gamma={self.inner_gamma}: must be at least 1"


class InnerDraft(IndependentDraft):
    """The small model. Before a round its cache lacks the last `lag` committed tokens, which is the
    most that a round adds. The round feeds them in one pass. Entries of proposals are dropped,
    accepted or not.
    """

    @classmethod
    def inside(cls, spec: DraftSpec) -> Self:
        """Allocate the inner draft of a hierarchical draft with this spec."""
        draft = spec.draft
        assert isinstance(draft, Hierarchical)
        assert draft.cache is not None
        slots = draft.round_slots(spec.gamma)
        inner = replace(
            spec, draft=replace(draft, inner_gamma=0), cache=draft.cache, gamma=slots - 1
        )
        return cls.build(inner, lag=spec.gamma + 1)

    def propose_first(self, state: State, gamma: int) -> Proposal:
        """Feed what the cache lacks, then propose. A shorter sequence lacks less, and repeats its
        last token instead, whose copies are dropped.
        """
        index_BT = self.cache.positions_BT(self.lag)
        last_B1 = state.num_tokens_B[:, None] - 1
        hidden_BTE = self.feed(state.tokens_BS.gather(1, index_BT.minimum(last_B1)))
        # Of those fed; a slot without a request is empty.
        last_B1 = (last_B1 - index_BT[:, :1]).clamp(max=self.lag - 1)
        self.cache.commit(self.lag, last_B1[:, 0] + 1)
        return self.propose_after(
            hidden_BTE.take_along_dim(last_B1[..., None], dim=1), state, gamma
        )

    @override
    def commit(self, count_B: Tensor, gamma: int) -> None:
        """Commit tokens that the model was fed at the beginning of the round."""
        self.cache.take(self.cache, self.cache.committed_slots_B, count_B, self.lag)


@DRAFTS.register(Hierarchical)
class HierarchicalDraft(SelfDraft):
    """Self-speculation whose proposals are themselves drafted, `inner_gamma` at a time, and
    verified over `cache`.

    Both levels are lossless: the tokens of the inner rounds are distributed as the target over
    `cache` would write them, and the target's own verification is given that distribution.

    - An inner verification selects entries by its first token alone (`DynamicCache`).
    - No two rounds draw with the same random numbers (`State.places_in_round_BT`). What a round
      reads may depend on rejected tokens of earlier ones: h2o scores by the last token of each
      inner verification.

    The number of inner rounds is fixed, for static shapes. A row that has fewer than gamma tokens
    after them repeats its last one, which is not sampled.

    TriForce's code selects the retrieval cache once per prompt, by the mean keys of chunks. Its
    inner rounds have one proposal. After a rejection it draws from the whole distribution over the
    retrieval cache, not from the residual.
    """

    def __init__(self, inner: InnerDraft, spec: DraftSpec):
        """Take the draft that proposes to the target over `cache`."""
        super().__init__(
            spec.target, spec.new_cache(spec.target, spec.target_cache), spec.target_cache, spec
        )
        self.caches += inner.caches
        self.inner, self.inner_gamma = inner, spec.draft.extra_tokens
        self.eos = spec.state.eos[..., :0]

    @classmethod
    @override
    def build(cls, spec: DraftSpec) -> "HierarchicalDraft":
        return cls(InnerDraft.inside(spec), spec)

    @override
    def prefill(self, state: State, progress: Advance | None = None) -> None:
        """Prefill both levels."""
        super().prefill(state, progress)
        self.inner.prefill(state, progress)

    @override
    def simulate_prefill(self, state: State) -> None:
        """Simulate the prefill of both levels."""
        SelfDraft.prefill(self, state)
        self.inner.simulate_prefill(state)

    @override
    def propose(self, state: State, gamma: int) -> Proposal:
        """Run inner rounds behind the committed tokens, which stay as they are."""
        self.cache.follow(self.entries)
        written = self._behind(state, gamma)
        q_BGV = self._no_distributions(state, gamma)
        for number in range(self.rounds(gamma)):
            start_B = written.num_tokens_B - state.num_tokens_B
            propose = self.inner.propose if number else self.inner.propose_first
            guess = propose(written, self.inner_gamma)
            tokens_BT = torch.cat((written.recent_BT(1), guess.tokens_BG), dim=1)
            with self.cache.tentative():
                hidden_BTE = self.model(tokens_BT, self.cache)
            logits_BTV = self.model.logits(hidden_BTE)
            verdict = self._accept(guess, logits_BTV, written)
            written.inspect(logits_BTV, DRAFT, verdict.num_accepted_B)
            if q_BGV is not None:
                _put(q_BGV, probabilities(logits_BTV, self.sampling), start_B)
            count_B = written.extend(verdict.tokens_BT, verdict.num_accepted_B + 1)
            for cache in (self.cache, self.inner.cache):
                cache.commit(self.inner_gamma + 1, count_B)
        index_BG = state.next_positions_BT(gamma)
        last_B1 = written.num_tokens_B.long()[:, None] - 1
        tokens_BG = state.tokens_BS.gather(1, index_BG.minimum(last_B1))
        if q_BGV is None:
            return Proposal(tokens_BG, None)
        guessed_BG = index_BG > last_B1
        one_hot_BGV = torch.zeros_like(q_BGV[:, :gamma]).scatter_(-1, tokens_BG[..., None], 1.0)
        return Proposal(
            tokens_BG, torch.where(guessed_BG[..., None], one_hot_BGV, q_BGV[:, :gamma])
        )

    @override
    def commit(self, count_B: Tensor, gamma: int) -> None:
        """Commit to both levels. The inner one stays empty until a sequence is longer than its
        lag.
        """
        super().commit(count_B, gamma)
        length_B = (self.cache.length_B + 1 - self.inner.lag).clamp(min=0)
        self.inner.commit(length_B - self.inner.cache.length_B, self.inner_gamma)

    def rounds(self, gamma: int) -> int:
        """Return the number of inner rounds: enough for `gamma` tokens if half of the inner
        proposals are accepted.
        """
        return -(-2 * gamma // (self.inner_gamma + 2))

    @override
    def copy_row(self, row: int, source: Draft) -> None:
        """Copy the row in both levels."""
        assert isinstance(source, HierarchicalDraft)
        super().copy_row(row, source)
        self.inner.copy_row(row, source.inner)

    @override
    def clear_row(self, row: int) -> None:
        """Clear the row in both levels."""
        super().clear_row(row)
        self.inner.clear_row(row)

    @property
    @override
    def cache_bytes(self) -> int:
        return super().cache_bytes + self.inner.cache_bytes

    def _behind(self, state: State, gamma: int) -> State:
        """Return a state that writes up to gamma tokens behind those of `state`, into the same
        buffer.
        """
        written = copy.copy(state)
        vars(written).pop("inspect", None)  # a compiled one belongs to `state`
        written.num_tokens_B = state.num_tokens_B.clone()  # `round_begin_B` stays where it is
        written.limit_B = state.num_tokens_B + gamma
        written.finished_B = torch.zeros_like(state.finished_B)
        written.eos = self.eos
        return written

    def _accept(self, guess: Proposal, logits_BTV: Tensor, written: State) -> Verdict:
        """Verify the inner proposals, with random numbers of their own."""
        if self.sampling.greedy:
            return accept_greedy(guess.tokens_BG, logits_BTV)
        places_BT = written.places_in_round_BT(logits_BTV.shape[1])
        uses = (Use.INNER_ACCEPT, Use.INNER_DECIDE)
        return accept_sampled(
            guess.tokens_BG, guess.q_BGV, logits_BTV, places_BT, self.sampling, *uses
        )

    def _no_distributions(self, state: State, gamma: int) -> Tensor | None:
        """Return room for the distributions of all rounds' tokens, also those beyond gamma; None if
        none are drawn.
        """
        if self.sampling.greedy:
            return None
        shape = (len(state.tokens_BS), gamma + self.inner_gamma + 1, self.vocab_size)
        return torch.zeros(shape, device=state.tokens_BS.device)


def _put(q_BGV: Tensor, new_BTV: Tensor, start_B: Tensor) -> None:
    """Write distributions behind the first `start_B` of each row."""
    index_BT = start_B.long()[:, None] + torch.arange(new_BTV.shape[1], device=start_B.device)
    q_BGV.scatter_(1, index_BT[..., None].expand_as(new_BTV), new_BTV)
