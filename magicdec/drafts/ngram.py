"""Prompt lookup: propose what followed the latest tokens when they last occurred (Saxena 2023; no
model, no cache).

B rows, S tokens of the sequence, G = gamma.
"""

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from typing_extensions import override

from magicdec.config.choices import DraftConfig
from magicdec.config.registry import DRAFTS
from magicdec.decoding.prefill import Advance
from magicdec.decoding.state import State
from magicdec.drafts.base import Draft, DraftSpec, Proposal
from magicdec.inputs.rules import STRICT, Count


@dataclass(frozen=True, config=STRICT)
class PromptLookup(DraftConfig):
    """Prompt lookup, by suffixes of up to `max_ngram` tokens."""

    name: str = "ngram"
    max_ngram: Count = 8
    is_model, serves = False, True


@DRAFTS.register(PromptLookup)
class NgramDraft(Draft):
    """A lookup of the longest earlier match of a row's last tokens, up to `max_ngram` of them,
    whose continuation it proposes.

    Of equally long matches the most recent one counts. A continuation that runs into the end of the
    sequence repeats from where it began, and a row without any match repeats its last token: shapes
    are static either way.
    """

    def __init__(self, gamma: int, max_ngram: int):
        self.gamma, self.max_ngram = gamma, max_ngram

    @classmethod
    @override
    def build(cls, spec: DraftSpec) -> "NgramDraft":
        assert isinstance(spec.draft, PromptLookup)
        return cls(spec.gamma, spec.draft.max_ngram)

    @override
    def prefill(self, state: State, progress: Advance | None = None) -> None:
        """Do nothing: the sequence itself is all that lookups need."""

    @override
    def propose(self, state: State, gamma: int) -> Proposal:
        """Copy tokens. They are not sampled: their distribution is one-hot."""
        last_B1 = state.num_tokens_B.long()[:, None] - 1
        end_B1 = self._last_match(state.tokens_BS, last_B1)
        step_G = torch.arange(gamma, device=end_B1.device)
        index_BG = end_B1 + 1 + step_G % (last_B1 - end_B1).clamp(min=1)
        return Proposal(state.tokens_BS.gather(1, torch.minimum(index_BG, last_B1)), None)

    def _last_match(self, tokens_BS: Tensor, last_B1: Tensor) -> Tensor:
        """Return the end of the longest, then latest, earlier match of the last tokens (B, 1);
        `last` without any.
        """
        position_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        equal_BS = position_S < last_B1
        length_BS = torch.zeros_like(tokens_BS)
        for back in range(min(self.max_ngram, tokens_BS.shape[1])):  # no match is longer
            token_B1 = tokens_BS.gather(1, (last_B1 - back).clamp(min=0))
            # Rolled, not sliced: tokens that wrap around are before the start of the row, where
            # nothing may match.
            equal_BS = equal_BS & (tokens_BS.roll(back, 1) == token_B1) & (position_S >= back)
            length_BS += equal_BS
        best_B1 = (length_BS * tokens_BS.shape[1] + position_S).argmax(1, keepdim=True)
        return torch.where(length_BS.gather(1, best_B1) > 0, best_B1, last_B1)

    @override
    def copy_row(self, row: int, source: Draft) -> None:
        """Do nothing: the state has the tokens."""
