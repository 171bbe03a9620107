"""Suffix decoding against a search written out with lists."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.decoding.state import State
from magicdec.drafts.suffix import NONE, SuffixDraft, SuffixLookup, look_up

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=25)


def looked_up(text: list[int], suffix: list[int], gamma: int) -> tuple[list[int], int]:
    """The longest match of a suffix, and what followed all of its occurrences most often: the slow
    twin.
    """
    for matched in range(len(suffix), 0, -1):
        places = range(matched - 1, len(text) - 1)
        ends = [end for end in places if text[end - matched + 1 : end + 1] == suffix[-matched:]]
        if ends:
            break
    else:
        return [], 0
    text = list(text)
    proposed = []
    for _ in range(gamma):
        following = [text[end + 1] for end in ends]
        tokens = [token for token in following if token != NONE]
        if not tokens:
            break
        token = max(reversed(tokens), key=tokens.count)
        proposed.append(token)
        text.append(token)
        ends = [end + 1 for end in ends if text[end + 1] == token]
    return proposed, matched


@settings(max_examples=300)
@given(
    text=TOKENS, own=st.booleans(), other=TOKENS, room=st.integers(1, 6), gamma=st.integers(1, 6)
)
def test_a_lookup_against_lists(text, own, other, room, gamma):
    """Search the text whose end is looked up, and others, which end with no token."""
    searched = text if own else [*other, NONE, *text[::-1], NONE]
    suffix = np.array(text[-room:], np.int32)
    padded = np.pad(np.array(searched, np.int32), (room, gamma), constant_values=NONE)
    proposed, matched = look_up(padded, room + len(searched), suffix, gamma)
    assert (proposed.tolist(), matched) == looked_up(searched, suffix.tolist(), gamma)


@settings(max_examples=100)
@given(rows=st.lists(TOKENS, min_size=1, max_size=4), gamma=st.integers(1, 6))
def test_proposals_of_rows(rows, gamma):
    state = State(rows, 40, gamma + 1, (), "cpu")
    draft = SuffixDraft(*state.tokens_BS.shape, gamma, SuffixLookup(max_suffix=4), "cpu")
    draft.prefill(state, print)
    for added in ([], [0, 1], [2]):  # rows of the second call are read in part
        for row, token in ((row, token) for row in range(len(rows)) for token in added):
            state.tokens_BS[row, state.num_tokens_B[row]] = token
            state.num_tokens_B[row] += 1
        draft.prepare(state, gamma)
        proposal = draft.propose(state, gamma)
        assert proposal.q_BGV is None
        for row, proposed in enumerate(proposal.tokens_BG.tolist()):
            text = state.tokens_BS[row, : state.num_tokens_B[row]].tolist()
            expected, _ = looked_up(text, text[-4:], gamma)
            assert proposed == (expected or [text[-1]] * gamma)


def test_earlier_requests_are_searched():
    state = State([[1, 2, 3, 4, 5, 6], [9]], 10, 4, (), "cpu")
    draft = SuffixDraft(*state.tokens_BS.shape, 3, SuffixLookup(history=8), "cpu")
    draft.prepare(state, 3)
    assert draft.propose(state, 3).tokens_BG.tolist() == [[6] * 3, [9] * 3]
    draft.clear_row(0)
    state.finished_B[0] = True
    state.tokens_BS[1, 1:3] = state.tokens_BS.new_tensor([2, 3])
    state.num_tokens_B[1] = 3
    draft.prepare(state, 3)
    assert draft.propose(state, 3).tokens_BG[1].tolist() == [4, 5, 6]
    draft.clear_row(1)
    state.tokens_BS[1, :2] = state.tokens_BS.new_tensor([1, 2])
    state.num_tokens_B[1] = 2
    draft.prepare(state, 3)  # 8 tokens: of the first request, 4, 5 and 6 are left
    assert draft.propose(state, 3).tokens_BG[1].tolist() == [3, 3, 3]


def test_a_request_does_not_read_texts_that_its_own_random_numbers_decided():
    state = State([[1, 2, 3, 4], [7, 8, 9, 7]], 10, 3, (), "cpu")
    seeds = [5, None]
    draft = SuffixDraft(*state.tokens_BS.shape, 2, SuffixLookup(), "cpu", seeds)
    draft.prepare(state, 2)
    draft.clear_row(0)
    draft.clear_row(1)
    state.tokens_BS[:, :2] = state.tokens_BS.new_tensor([[1, 2], [7, 8]])
    state.num_tokens_B[:] = 2
    for seeds[:], expected in (
        ([5, 6], [[2, 2], [9, 7]]),  # of the seed 5, only what was written without numbers
        ([6, 5], [[3, 4], [9, 7]]),
        ([None, None], [[3, 4], [9, 7]]),  # greedy: nothing is drawn
    ):
        draft.prepare(state, 2)
        assert draft.propose(state, 2).tokens_BG.tolist() == expected


def opened(rows: list[list[int]], gamma: int = 3, **keys: int) -> tuple[State, SuffixDraft]:
    state = State(rows, 10, gamma + 1, (), "cpu")
    return state, SuffixDraft(*state.tokens_BS.shape, gamma, SuffixLookup(**keys), "cpu")


def proposed(draft: SuffixDraft, state: State, gamma: int = 3) -> list[list[int]]:
    draft.prepare(state, gamma)
    return draft.propose(state, gamma).tokens_BG.tolist()


def rewrite(state: State, row: int, tokens: list[int]) -> None:
    state.tokens_BS[row, : len(tokens)] = torch.tensor(tokens)
    state.num_tokens_B[row] = len(tokens)


def test_every_number_of_a_token_can_be_proposed():
    """The first token counts, without a prefill, too."""
    rows = [[0, 1, 2, 0], [1, 0, 2, 1], [2, 1, 0, 2], [0, 0], [1, 1]]
    expected = [[1, 2, 0], [0, 2, 1], [1, 0, 2], [0, 0, 0], [1, 1, 1]]
    state, draft = opened(rows)
    assert proposed(draft, state) == expected


def test_of_equally_long_matches_the_rows_own_counts():
    state, draft = opened([[1, 2, 3], [9]], gamma=2)
    draft.prepare(state, 2)
    draft.clear_row(0)
    for text, expected in (
        ([2, 7, 2], [7, 2]),  # one token here and there
        ([2, 7, 1, 2], [3, 3]),  # two tokens in the earlier request, which ends behind 3
        ([5, 1, 2, 6, 1, 2], [6, 1]),
    ):
        draft.copy_row(0, draft)  # the next request of the row
        rewrite(state, 0, text)
        assert proposed(draft, state, 2)[0] == expected


def test_a_shorter_round_proposes_fewer_tokens():
    """Of the row itself, and of an earlier request; the end of its text is repeated."""
    state, draft = opened([[1, 2, 3, 4], [6, 7, 8, 6]])
    draft.prepare(state, 3)
    draft.clear_row(0)
    rewrite(state, 0, [1, 2])
    for gamma in (1, 3, 2):
        expected = [[3, 4, 4][:gamma], [7, 8, 6][:gamma]]
        assert proposed(draft, state, gamma) == expected


@pytest.mark.parametrize(
    ("way", "text", "expected"),
    [
        ("clear_row", [2, 5, 6, 7, 2], [5, 6]),
        ("copy_row", [2, 5, 6, 7, 2], [5, 6]),
        ("prefill", [2, 5, 6, 7, 2], [5, 6]),
        ("set back", [2, 5, 2], [5, 2]),
    ],
)
def test_a_row_that_begins_again_is_read_from_its_first_token(way, text, expected):
    state, draft = opened([[3, 8, 7, 9], [9]], gamma=2, history=0)
    assert proposed(draft, state, 2)[0] == [9, 9]
    if way == "clear_row":
        draft.clear_row(0)
    elif way == "copy_row":
        draft.copy_row(0, draft)
    elif way == "prefill":
        draft.prefill(state)
    rewrite(state, 0, text)
    assert proposed(draft, state, 2)[0] == expected


def test_without_a_history_earlier_requests_are_not_searched():
    state, draft = opened([[1, 2, 3], [9]], gamma=2, history=0)
    draft.prepare(state, 2)
    draft.clear_row(0)
    rewrite(state, 0, [1, 2])
    assert proposed(draft, state, 2)[0] == [2, 2]


def test_memory_is_that_of_the_longest_suffix_a_row_can_have():
    state, draft = opened([[1, 2, 3, 1, 2]], gamma=2, max_suffix=2**31 - 1)
    assert proposed(draft, state, 2) == [[3, 1]]
