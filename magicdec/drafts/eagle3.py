"""EAGLE-3: a trained head drafts from the target's own hidden states (Li et al. 2025, arXiv
2503.01840).

The head is one decoder layer. It reads hidden states of three of the target's layers and the
embedding of the token behind them, then its own output and the token that it has proposed. Its
entries (keys and values) follow from its inputs alone, so that the prefill needs no attention:
`entries` holds those of every token, computed from the target's exact hidden states, and `cache`
selects from them as self-speculation selects from the target's. After each verification the entries
of committed tokens are computed again, from hidden states that are exact by then.

B rows, T = gamma + 1 tokens of a verification, E hidden size, V vocabulary, W tokens whose
attention scores the rest.
"""

from typing import ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from typing_extensions import override

from magicdec.architectures.head_config import HeadConfig
from magicdec.architectures.model_config import ModelConfig
from magicdec.config.choices import DraftConfig
from magicdec.config.registry import DRAFTS
from magicdec.decoding.prefill import Advance
from magicdec.decoding.state import State
from magicdec.decoding.timers import Stopwatch
from magicdec.drafts.base import Draft, DraftSpec, ModelDraft, Proposal
from magicdec.inputs.rules import STRICT
from magicdec.models.head import Head
from magicdec.models.kv_cache import KVCache, copy_row
from magicdec.models.taps import Taps


@dataclass(frozen=True, config=STRICT)
class Eagle3(DraftConfig):
    """A trained head over the target's hidden states; `cache` is selected from the entries of all
    tokens.
    """

    name: str = "eagle3"
    needs_model = serves = listens = keeps_entries = True
    label, title = "{model}", "draft head {model}"

    @override
    def assumed_model(self, target: ModelConfig) -> ModelConfig:
        return HeadConfig.like(target)

    @override
    def check(self, target: ModelConfig) -> None:
        if isinstance(self.own_model, HeadConfig):
            self.own_model.check(target)


@DRAFTS.register(Eagle3)
class Eagle3Draft(ModelDraft):
    """The head over its cache. Before a round the cache lacks the entry of the last committed
    token.
    """

    per_row: ClassVar[dict[str, int]] = {"last_BE": 0}
    refed = 1

    model: Head
    entries: KVCache
    taps: Taps
    output_BTE: Tensor  # of the last step, or what the first one reads
    verified_BT: Tensor  # the last committed token and the proposals

    def __init__(self, model: Head, entries: KVCache, spec: DraftSpec):
        """Take a head that has all its weights, and room for the entries of every token."""
        super().__init__(model, spec.new_cache(model, entries), spec)
        self.entries, self.taps = entries, Taps(model.config.taps_of(spec.target.config))
        # The hidden states of the latest tokens of the prompts, whose last one comes last, and what
        # is not kept.
        rows, E = len(spec.state.tokens_BS), model.config.hidden_size
        self.heard_BWE = entries.k_LBKSD.new_zeros(rows, self.cache.observes + 2, E)
        # The hidden state before the last committed token.
        self.last_BE = self.heard_BWE[:, 0].clone()

    @classmethod
    @override
    def build(cls, spec: DraftSpec) -> "Eagle3Draft":
        assert isinstance(spec.model, Head)
        rows, device = len(spec.state.tokens_BS), spec.state.tokens_BS.device
        capacity = spec.state.max_len + spec.gamma + 1
        entries = KVCache(spec.model.config, rows, capacity, spec.model.dtype, device)
        return cls(spec.model.on(spec.target), entries, spec)

    @override
    def hear(self, start: int, state: State) -> None:
        """Store the entries that follow from a chunk of the prompts, and its last hidden states."""
        with Stopwatch(state.tokens_BS.device) as watch:
            hidden_BTE = self.model.fused(self.taps.hidden_BTN)
            num_new, kept = hidden_BTE.shape[1], self.cache.observes + 1
            self.entries.rollback(torch.full_like(state.prompt_len_B, start))
            self.model.enter(
                state.tokens_BS[:, start + 1 : start + 1 + num_new], self.entries, hidden_BTE
            )
            position_T = torch.arange(start, start + num_new, device=hidden_BTE.device)
            place_BT = position_T - (state.prompt_len_B[:, None].long() - kept)
            place_BT = torch.where((place_BT >= 0) & (place_BT < kept), place_BT, kept)
            self.heard_BWE.scatter_(1, place_BT[..., None].expand_as(hidden_BTE), hidden_BTE)
        self.heard_seconds = watch.seconds + (self.heard_seconds if start else 0.0)

    @override
    def prefill(self, state: State, progress: Advance | None = None) -> None:
        """Select from the entries that were stored as the prompts were read."""
        self.entries.rollback(state.prompt_len_B - 1)
        self.last_BE.copy_(self.heard_BWE[:, -2])
        self.select(state, progress)

    @override
    def replay(self, index_BT: Tensor, view: KVCache, state: State) -> None:
        first_B1 = state.prompt_len_B[:, None].long() - self.cache.observes - 1
        # Scoring asks for tokens beyond the ends of short rows, too, and ignores what they attend
        # to.
        place_BT = (index_BT - first_B1).clamp(0, self.heard_BWE.shape[1] - 1)
        hidden_BTE = self.heard_BWE.take_along_dim(place_BT[..., None], dim=1)
        self.model(state.tokens_BS.gather(1, index_BT + 1), view, hidden_BTE)

    @override
    def simulate_prefill(self, state: State) -> None:
        self.entries.k_LBKSD.normal_()
        self.entries.v_LBKSD.normal_()
        self.prefill(state)

    @override
    def feed(self, tokens_BT: Tensor) -> Tensor:
        """Append one token behind its hidden state: the target's own, or what the last step has
        returned.
        """
        self.output_BTE = self.model(tokens_BT, self.cache, self.output_BTE)
        return self.output_BTE

    @override
    def propose(self, state: State, gamma: int) -> Proposal:
        self.output_BTE = self.last_BE[:, None]
        last_BT = state.recent_BT(1)
        proposal = super().propose(state, gamma)
        self.verified_BT = torch.cat((last_BT, proposal.tokens_BG), dim=1)
        return proposal

    @override
    def pause(self, state: State) -> Proposal:
        self.verified_BT = state.recent_BT(1)
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
        hidden_BTE = self.model.fused(self.taps.hidden_BTN)
        before_BTE = torch.cat((self.last_BE[:, None], hidden_BTE[:, :-1]), dim=1)
        self.model.enter(self.verified_BT, self.entries, before_BTE)
        self.cache.take(self.entries, self.cache.length_B, count_B, gamma + 1)
        self.entries.rollback(self.cache.length_B)
        newest_BE = hidden_BTE.take_along_dim(
            (count_B.long() - 1).clamp(min=0)[:, None, None], dim=1
        )[:, 0]
        self.last_BE.copy_(torch.where((count_B > 0)[:, None], newest_BE, self.last_BE))

    @override
    def copy_row(self, row: int, source: Draft) -> None:
        assert isinstance(source, Eagle3Draft)
        super().copy_row(row, source)
        self.entries.copy_row(row, source.entries)
        copy_row(self, source, row)

    @override
    def clear_row(self, row: int) -> None:
        super().clear_row(row)
        self.entries.clear_row(row)

    @property
    @override
    def cache_bytes(self) -> int:
        return self.entries.num_bytes + self.cache.num_bytes
