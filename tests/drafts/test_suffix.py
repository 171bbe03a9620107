"""Suffix decoding against a search written out with lists."""

import numpy as np
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
