"""Suffix decoding: propose what most often followed the latest tokens (Oliaro et al. 2024, arXiv
2411.04975).

The paper keeps suffix trees. Here each lookup scans the text, which takes the host microseconds
even for long prompts, and needs neither a build nor memory beyond the tokens.

A proposal must not depend on the random numbers that decide about it. A request with the seed of an
earlier one draws the same numbers, so it does not read that one's text.

B rows, S tokens of a text, G = gamma.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic.dataclasses import dataclass
from typing_extensions import override

from magicdec.config.choices import DraftConfig
from magicdec.config.registry import DRAFTS
from magicdec.decoding.prefill import Advance
from magicdec.decoding.state import State
from magicdec.drafts.base import Draft, DraftSpec, Proposal
from magicdec.inputs.rules import STRICT, Count, Size
from magicdec.verification.sampling import RowSampling

Tokens = NDArray[np.int32]
NONE = -1  # before, between and behind texts: no token, so nothing matches it
NO_SEED = np.iinfo(np.int64).max  # of a text that no random number decided


@dataclass(frozen=True, config=STRICT)
class SuffixLookup(DraftConfig):
    """Suffix decoding, by suffixes of up to `max_suffix` tokens.

    While serving, the last `history` tokens of requests that have ended are searched too.
    """

    name: str = "suffix"
    max_suffix: Count = 32
    history: Size = 65536
    is_model, serves = False, True


def look_up(text_S: Tokens, length: int, suffix: Tokens, gamma: int) -> tuple[Tokens, int]:
    """Return the tokens that most often follow the longest match of a suffix, and the length of
    that match.

    The text is `text_S[:length]`. There must be at least as many tokens as the suffix has, all
    NONE, before it, and room for `gamma` tokens behind it, which are overwritten. A tie goes to the
    latest occurrence. The result has `gamma` tokens, or fewer where a text ends at NONE.
    """
    ends = np.flatnonzero(text_S[: length - 1] == suffix[-1])
    if not len(ends):
        return ends.astype(np.int32), 0
    matched = 1
    while matched < len(suffix) and len(
        longer := ends[text_S[ends - matched] == suffix[-1 - matched]]
    ):
        ends, matched = longer, matched + 1
    for step in range(gamma):
        following = text_S[ends + 1]
        if len(ends) > 1:
            _, kind, count = np.unique(following, return_inverse=True, return_counts=True)
            votes = np.where(following == NONE, 0, count[kind])
            best = len(ends) - 1 - int(np.argmax(votes[::-1]))  # of equal ones the latest
            ends = ends[following == following[best]]
            following = following[best:]
        if following[0] == NONE:
            return text_S[length : length + step].copy(), matched
        # A match that reaches the end of the text goes on into what has been proposed.
        text_S[length + step] = following[0]
        ends = ends + 1
    return text_S[length : length + gamma].copy(), matched


@DRAFTS.register(SuffixLookup)
class SuffixDraft(Draft):
    """A lookup of a row's last tokens in the row itself and in earlier requests; the longer match
    decides.

    The search runs on the host, before each round: this is the only draft whose rounds wait for the
    device. A row without any match repeats its last token.
    """

    def __init__(
        self,
        rows: int,
        capacity: int,
        gamma: int,
        lookup: SuffixLookup,
        device: torch.device,
        seeds: Sequence[int | None] = (),
    ):
        """Allocate. `capacity` is the number of tokens that a row may have. `seeds` is read when a
        row proposes or ends: what names its random numbers, None where it draws none.
        """
        self.gamma = gamma
        self.max_suffix = min(lookup.max_suffix, capacity)  # no suffix is longer
        self.history = lookup.history
        self._seeds = seeds or [None] * rows
        self._texts_BS = np.full((rows, self.max_suffix + capacity + gamma), NONE, np.int32)
        self._lengths = [0] * rows  # tokens of each text that are known here
        room = self.max_suffix + gamma
        self._earlier_S = np.full(room, NONE, np.int32)
        self._earlier_seeds_S = np.full(room, NO_SEED)
        self._guess_BG = torch.zeros(rows, gamma, dtype=torch.int64)
        self._proposal_BG = torch.zeros(rows, gamma, dtype=torch.int64, device=device)

    @classmethod
    @override
    def build(cls, spec: DraftSpec) -> "SuffixDraft":
        assert isinstance(spec.draft, SuffixLookup)
        (rows, capacity), device = spec.state.tokens_BS.shape, spec.state.tokens_BS.device
        seeds = spec.sampling.keys if isinstance(spec.sampling, RowSampling) else ()
        return cls(rows, capacity, spec.gamma, spec.draft, device, seeds)

    @override
    def prefill(self, state: State, progress: Advance | None = None) -> None:
        """Forget all texts. The next round reads them."""
        self._lengths = [0] * len(self._lengths)

    @override
    def prepare(self, state: State, gamma: int) -> None:
        """Read the tokens of the last rounds, and look up what may follow."""
        active = [row for row, finished in enumerate(state.finished_B.tolist()) if not finished]
        self._read(state, active)
        for row in active:
            self._guess_BG[row, :gamma] = torch.from_numpy(self._guess(row, gamma))
        self._proposal_BG.copy_(self._guess_BG)

    def _read(self, state: State, active: list[int]) -> None:
        """Copy the tokens that are new since the last call."""
        lengths, pad = state.num_tokens_B.tolist(), self.max_suffix
        read = {
            row: self._lengths[row] if self._lengths[row] <= lengths[row] else 0 for row in active
        }
        if width := max((lengths[row] - read[row] for row in active), default=0):
            recent_BT = state.recent_BT(width).cpu().numpy()
            for row, before in read.items():
                self._lengths[row] = now = lengths[row]
                self._texts_BS[row, pad + before : pad + now] = recent_BT[
                    row, width - (now - before) :
                ]

    def _guess(self, row: int, gamma: int) -> Tokens:
        """Return the proposals (G,) for a row."""
        text = self._texts_BS[row]
        length = self._lengths[row]
        stop = self.max_suffix + length
        suffix = text[stop - min(length, self.max_suffix) : stop].copy()
        guess, matched = look_up(text, stop, suffix, gamma)
        if self.history:
            earlier = self._readable(row)
            theirs, longer = look_up(earlier, len(earlier) - self.gamma, suffix, gamma)
            guess = theirs if longer > matched else guess
        padded = np.full(gamma, guess[-1] if len(guess) else suffix[-1], np.int32)
        padded[: len(guess)] = guess
        return padded

    def _readable(self, row: int) -> Tokens:
        """Return the earlier texts, without those that the row's own random numbers decided."""
        seed = self._seeds[row]
        if seed is None or not (hidden_S := self._earlier_seeds_S == seed).any():
            return self._earlier_S
        return np.where(hidden_S, np.int32(NONE), self._earlier_S)

    @override
    def propose(self, state: State, gamma: int) -> Proposal:
        """Return what was looked up. It is not sampled: its distribution is one-hot."""
        return Proposal(self._proposal_BG[:, :gamma], None)

    @override
    def copy_row(self, row: int, source: Draft) -> None:
        """Forget the row. The next round reads it from the state."""
        self._lengths[row] = 0

    @override
    def clear_row(self, row: int) -> None:
        """Keep the text, but for its last round, as that of an earlier request."""
        if self.history:
            text = self._texts_BS[row, self.max_suffix : self.max_suffix + self._lengths[row]]
            seed = self._seeds[row]
            ended = np.append(text, np.int32(NONE))
            self._earlier_S = self._appended(self._earlier_S, ended, NONE)
            seeds = np.full(len(text) + 1, NO_SEED if seed is None else seed)
            self._earlier_seeds_S = self._appended(self._earlier_seeds_S, seeds, NO_SEED)
        self._lengths[row] = 0

    def _appended(self, earlier_S: NDArray, new_S: NDArray, outside: int) -> NDArray:
        """Return the last `history` values, with the room around them that `look_up` needs."""
        kept_S = earlier_S[self.max_suffix : len(earlier_S) - self.gamma]
        both_S = np.concatenate((kept_S, new_S))[-self.history :]
        return np.pad(both_S, (self.max_suffix, self.gamma), constant_values=outside)
