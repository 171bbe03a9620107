"""Prompt lookup against a search written out with lists."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.decoding.state import State
from magicdec.drafts.ngram import NgramDraft


def looked_up(tokens: list[int], gamma: int, max_ngram: int) -> list[int]:
    """The longest suffix that occurred before, its latest occurrence, and what followed, repeated:
    the slow twin.
    """
    for n in range(min(max_ngram, len(tokens)), 0, -1):
        for end in range(len(tokens) - 2, n - 2, -1):
            if tokens[end - n + 1 : end + 1] == tokens[len(tokens) - n :]:
                followed = tokens[end + 1 :]
                return [followed[i % len(followed)] for i in range(gamma)]
    return [tokens[-1]] * gamma


@settings(max_examples=200)
@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=25), min_size=1, max_size=4),
    gamma=st.integers(1, 6),
    max_ngram=st.integers(1, 5),
)
def test_against_lists(rows, gamma, max_ngram):
    proposal = NgramDraft(gamma, max_ngram).propose(State(rows, 4, gamma + 1, (), "cpu"), gamma)
    assert proposal.q_BGV is None
    assert proposal.tokens_BG.tolist() == [looked_up(row, gamma, max_ngram) for row in rows]


def test_tokens_behind_the_end_are_not_looked_up():
    state = State([[1, 2, 3]], 8, 3, (), "cpu")
    state.tokens_BS[0, 3:] = torch.tensor([3, 7, 3, 7, 3, 7, 3, 7, 3, 7, 3])
    assert NgramDraft(2, 3).propose(state, 2).tokens_BG.tolist() == [[3, 3]]


@pytest.mark.timeout(20)
def test_no_match_is_longer_than_the_sequence():
    row = [1, 2, 3, 1, 2]
    state = State([row], 4, 3, (), "cpu")
    proposal = NgramDraft(2, 2**31 - 1).propose(state, 2)
    assert proposal.tokens_BG.tolist() == [looked_up(row, 2, 5)] == [[3, 1]]
