"""The shared part of drafts over the target's hidden states: the prefill that they listen to, and
exact entries of every token.

A draft's modules read hidden states of the target and the tokens behind them, then the output of
the last step and the token that it has proposed. With one module, entries (keys and values) follow
from the inputs alone, so that the prefill needs no attention. `entries` holds those of every token,
computed from the target's exact hidden states, and `cache` selects from them as self-speculation
selects from the target's. After each verification the entries of committed tokens are computed
again, from hidden states that are exact by then.

Place i of the entries has the hidden state of token i. Of K modules, module k has token i + k + 1
there. So the entries of a text of N committed tokens are known up to place N - 1 - K, and a round
begins with the K places behind.

B rows, T = gamma + 1 tokens of a verification, K modules, E hidden size, V vocabulary, W tokens
whose attention scores the rest and the K behind them.
"""

from typing import ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from magicdec.decoding.prefill import Advance
from magicdec.decoding.state import State
from magicdec.decoding.timers import Stopwatch
from magicdec.drafts.base import Draft, DraftSpec, ModelDraft, Proposal
from magicdec.models.kv_cache import KVCache
from magicdec.models.row_copies import copy_row
from magicdec.models.states_model import StatesModel
from magicdec.models.taps import Taps


class StatesDraft(ModelDraft):
    """Modules over their cache. Before a round the cache lacks the entries of the last K places."""

    per_row: ClassVar[dict[str, int]] = {"last_BKE": 0}

    model: StatesModel
    entries: KVCache
    taps: Taps
    output_BTE: Tensor  # of the last step, or what the first one reads
    window_BK: Tensor  # the tokens of the module that comes next
    verified_BT: Tensor  # the last K committed tokens and the proposals
    step: int  # of this round's proposals

    def __init__(self, model: StatesModel, entries: KVCache, spec: DraftSpec):
        """Take modules that have all their weights, and room for the entries of every token."""
        super().__init__(model, spec.new_cache(model, entries), spec)
        self.entries = entries
        self.taps = Taps(model.config.taps_of(spec.target.config))
        # A round has no use for more modules than it proposes tokens.
        self.refed = self.num_modules = min(model.num_modules, spec.gamma)
        # The hidden states of each prompt's last tokens, in order, and behind them one place for
        # all others, which is never read.
        rows = len(spec.state.tokens_BS)
        E = model.config.hidden_size
        kept = self.cache.observes + self.num_modules
        self.heard_BWE = entries.k_LBKSD.new_zeros(rows, kept + 1, E)
        # The hidden states before the last K committed tokens.
        self.last_BKE = self.heard_BWE[:, : self.num_modules].clone()

    @classmethod
    @override
    def build(cls, spec: DraftSpec) -> Self:
        assert isinstance(spec.model, StatesModel)
        rows = len(spec.state.tokens_BS)
        device = spec.state.tokens_BS.device
        capacity = spec.state.max_len + spec.gamma + 1
        entries = KVCache(spec.model.config, rows, capacity, spec.model.dtype, device)
        return cls(spec.model.on(spec.target), entries, spec)

    @override
    def hear(self, start: int, state: State) -> None:
        """Store the entries that follow from a chunk of the prompts, and its last hidden states."""
        with Stopwatch(state.tokens_BS.device) as watch:
            hidden_BTE = self.model.fused(self.taps.hidden_BTN)
            num_new = hidden_BTE.shape[1]
            kept = self.heard_BWE.shape[1] - 1
            if start == 0:
                self.heard_BWE.zero_()  # prompts may be shorter than what is kept
            self.entries.rollback(torch.full_like(state.prompt_len_B, start))
            end = start + num_new + self.num_modules
            self.enter(state.tokens_BS[:, start + 1 : end], hidden_BTE)
            position_T = torch.arange(start, start + num_new, device=hidden_BTE.device)
            place_BT = position_T - (state.prompt_len_B[:, None].long() - kept)
            place_BT = torch.where((place_BT >= 0) & (place_BT < kept), place_BT, kept)
            self.heard_BWE.scatter_(1, place_BT[..., None].expand_as(hidden_BTE), hidden_BTE)
        self.heard_seconds = watch.seconds + (self.heard_seconds if start else 0.0)

    def enter(self, tokens_BT: Tensor, hidden_BTE: Tensor) -> None:
        """Write the entries of all modules for T hidden states. Module k takes the tokens from k
        on. All but the last one attend: their outputs are the next one's hidden states.
        """
        num_new = hidden_BTE.shape[1]
        last = self.num_modules - 1
        for module in range(last):
            tokens = tokens_BT[:, module : module + num_new]
            hidden_BTE = self.model(tokens, self.entries, hidden_BTE, module)
        self.model.enter(tokens_BT[:, last : last + num_new], self.entries, hidden_BTE, last)

    @override
    def prefill(self, state: State, progress: Advance | None = None) -> None:
        """Select from the entries that were stored as the prompts were read.

        A prompt of fewer than K tokens keeps places in front of it that have no token.
        """
        self.entries.rollback((state.prompt_len_B - self.num_modules).clamp(min=0))
        self.last_BKE.copy_(self.heard_BWE[:, -1 - self.num_modules : -1])
        self.select(state, progress)

    @override
    def replay(self, index_BT: Tensor, view: KVCache, state: State) -> None:
        first_B1 = state.prompt_len_B[:, None].long() - (self.heard_BWE.shape[1] - 1)
        # Scoring asks for tokens beyond the ends of short rows, too, and ignores what they attend
        # to.
        place_BT = (index_BT - first_B1).clamp(0, self.heard_BWE.shape[1] - 1)
        hidden_BTE = self.heard_BWE.take_along_dim(place_BT[..., None], dim=1)
        for module in range(self.num_modules):
            tokens_BT = state.tokens_BS.gather(1, index_BT + module + 1)
            hidden_BTE = self.model(tokens_BT, view, hidden_BTE, module)

    @override
    def simulate_prefill(self, state: State) -> None:
        self.entries.simulate()
        self.prefill(state)

    @override
    def feed(self, tokens_BT: Tensor) -> Tensor:
        """Run the next module over the last K places, or, once all have been there, the last one
        over the next place. The hidden states are the target's own, or what the last step has
        returned.
        """
        module = min(self.step, self.num_modules - 1)
        if self.step < self.num_modules:
            known_BK = self.window_BK[:, tokens_BT.shape[1] :]
            tokens_BT = self.window_BK = torch.cat((known_BK, tokens_BT), dim=1)
        else:
            self.output_BTE = self.output_BTE[:, -1:]
        self.output_BTE = self.model(tokens_BT, self.cache, self.output_BTE, module)
        self.step += 1
        return self.output_BTE[:, -1:]

    @override
    def propose(self, state: State, gamma: int) -> Proposal:
        self.step, self.output_BTE = 0, self.last_BKE
        self.window_BK = last_BK = state.recent_BT(self.num_modules)
        proposal = super().propose(state, gamma)
        self.verified_BT = torch.cat((last_BK, proposal.tokens_BG), dim=1)
        return proposal

    @override
    def pause(self, state: State) -> Proposal:
        self.verified_BT = state.recent_BT(self.num_modules)
        return super().pause(state)

    @override
    def in_target(self, token_B1: Tensor, q_B1V: Tensor | None) -> tuple[Tensor, Tensor | None]:
        ids_V = self.model.target_ids_V
        if ids_V is None:
            return token_B1, q_B1V
        if q_B1V is not None:
            q_B1V = q_B1V.new_zeros(*q_B1V.shape[:2], self.vocab_size).index_copy_(2, ids_V, q_B1V)
        return ids_V[token_B1], q_B1V

    @override
    def commit(self, count_B: Tensor, gamma: int) -> None:
        """Compute the entries of verified tokens from exact hidden states, and keep those of
        committed ones.
        """
        new_BTE = self.model.fused(self.taps.hidden_BTN)
        hidden_BTE = torch.cat((self.last_BKE, new_BTE), dim=1)
        self.entries.rollback(self.cache.length_B)
        self.enter(self.verified_BT, hidden_BTE[:, : gamma + 1])
        self.cache.take(self.entries, self.cache.length_B, count_B, gamma + 1)
        self.entries.rollback(self.cache.length_B)
        place_K = torch.arange(self.num_modules, device=count_B.device)
        place_BK = count_B.long()[:, None] + place_K
        self.last_BKE.copy_(hidden_BTE.take_along_dim(place_BK[..., None], dim=1))

    @override
    def copy_row(self, row: int, source: Draft) -> None:
        assert isinstance(source, StatesDraft)
        super().copy_row(row, source)
        self.entries.copy_row(row, source.entries)
        copy_row(self, source, row)

    @override
    def clear_entries(self) -> None:
        super().clear_entries()
        self.entries.clear_entries()

    @override
    def clear_row(self, row: int) -> None:
        super().clear_row(row)
        self.entries.clear_row(row)

    @property
    @override
    def cache_bytes(self) -> int:
        of_caches = self.entries.num_bytes + self.cache.num_bytes
        return of_caches + self.heard_BWE.nbytes + self.last_BKE.nbytes
