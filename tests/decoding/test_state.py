"""The state of a batch against lists: tokens, lengths, counters, and places of random numbers."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.decoding.state import DRAFT, TARGET, State
from magicdec.errors import NonFinite
from magicdec.verification.accept import Verdict

PROMPTS = [[1, 2], [3], [1, 1, 4]]
EOS = (5, 6)
TOKEN = st.integers(0, 7)
OUTCOME = st.tuples(st.integers(0, 3), st.lists(TOKEN, min_size=4, max_size=4))
NEVER = 2**31 - 1


def opened(prompts=PROMPTS, generate_len=6, slack=4, eos=EOS) -> State:
    return State(prompts, generate_len, slack, eos, "cpu")


def texts(state: State) -> list[list[int]]:
    pairs = zip(state.tokens_BS.tolist(), state.num_tokens_B.tolist(), strict=True)
    return [row[:count] for row, count in pairs]


@settings(max_examples=60)
@given(
    generate_len=st.integers(1, 9),
    first=st.lists(TOKEN, min_size=3, max_size=3),
    rounds=st.lists(st.lists(OUTCOME, min_size=3, max_size=3), max_size=5),
)
def test_rounds_against_lists(generate_len, first, rounds):
    """Token by token: a row ends with its first end of sequence, or at its limit, and rests."""
    state = opened(generate_len=generate_len)
    rows, finished = [[*prompt] for prompt in PROMPTS], [False] * 3

    def write(row: int, tokens: list[int]) -> int:
        taken = 0
        for token in tokens:
            if not finished[row]:
                rows[row].append(token)
                is_full = len(rows[row]) == len(PROMPTS[row]) + generate_len
                finished[row], taken = token in EOS or is_full, taken + 1
        return taken

    state.start(torch.tensor(first))
    for row, token in enumerate(first):
        write(row, [token])
    accepted_RB, committed_RB = [], []
    for outcomes in rounds:
        accepted_B = [accepted for accepted, _ in outcomes]
        accepted_RB.append(
            [-1 if done else n for n, done in zip(accepted_B, finished, strict=True)]
        )
        committed_RB.append(
            [write(row, tokens[: n + 1]) for row, (n, tokens) in enumerate(outcomes)]
        )
        tokens_BT = torch.tensor([tokens for _, tokens in outcomes])
        verdict = Verdict(torch.tensor(accepted_B, dtype=torch.int32), tokens_BT)
        assert state.commit(verdict).tolist() == committed_RB[-1]
        assert texts(state) == rows
        assert state.finished_B.tolist() == finished
    assert state.accepted_RB[: len(rounds)].tolist() == accepted_RB
    assert state.committed_RB[: len(rounds)].tolist() == committed_RB
    assert (state.accepted_RB[len(rounds) :] == -1).all()
    assert (state.committed_RB[len(rounds) :] == 0).all()
    assert state.round_1.tolist() == [len(rounds)]
    state.start(torch.tensor([0, 5, 7]))
    assert texts(state) == [[1, 2, 0], [3, 5], [1, 1, 4, 7]]
    assert state.finished_B.tolist() == [generate_len == 1, True, generate_len == 1]
    assert (state.accepted_RB == -1).all()
    assert (state.committed_RB == 0).all()
    assert state.round_1.tolist() == [0]


def test_there_is_room_for_the_longest_row_and_what_a_round_writes_behind_it():
    state = opened(generate_len=5, slack=2)
    assert (state.max_prompt_len, state.max_len) == (3, 8)
    assert state.tokens_BS.tolist() == [[1, 2, *[0] * 8], [3, *[0] * 9], [1, 1, 4, *[0] * 7]]
    assert state.limit_B.tolist() == [7, 6, 8]
    assert state.accepted_RB.shape == state.committed_RB.shape == (5 + 8, 3)


def test_a_row_that_was_woken_at_its_limit_commits_nothing_more():
    state = opened(generate_len=1)
    state.start(torch.tensor([7, 7, 7]))
    state.wake()
    assert not state.finished_B.any()
    verdict = Verdict(torch.ones(3, dtype=torch.int32), torch.full((3, 4), 7))
    assert state.commit(verdict).tolist() == [0, 0, 0]
    assert state.accepted_RB[0].tolist() == [1, 1, 1]
    assert state.finished_B.all()
    state.forget_rounds()
    assert (state.accepted_RB == -1).all()
    assert state.round_1.tolist() == [0]


def test_the_last_tokens_of_a_shorter_row_begin_with_copies_of_its_first_one():
    state = opened()
    assert state.recent_BT(1).tolist() == [[2], [3], [4]]
    assert state.recent_BT(3).tolist() == [[1, 1, 2], [3, 3, 3], [1, 1, 4]]
    assert state.next_positions_BT(2).tolist() == [[2, 3], [1, 2], [3, 4]]


def test_a_place_names_the_round_and_where_in_it_a_token_is():
    state = opened()
    assert state.places_in_round_BT(2).tolist() == [[n << 32, (n << 32) + 1] for n in (2, 1, 3)]
    behind = copy.copy(state)  # as the inner rounds of a hierarchical draft write
    behind.num_tokens_B = state.num_tokens_B + torch.tensor([0, 1, 5], dtype=torch.int32)
    places = [2 << 32, (1 << 32) + (1 << 16), (3 << 32) + (5 << 16)]
    assert behind.places_in_round_BT(2).tolist() == [[place, place + 1] for place in places]


@pytest.mark.parametrize(("whose", "key"), [(TARGET, "target"), (DRAFT, "draft.model")])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_first_logits_that_are_not_finite_are_reported(whose, key, value):
    """First by the number of new tokens, not by the position. Rows that have finished may say
    anything.
    """
    state = opened([[1] * 10, [1] * 3, [1] * 4])
    logits = torch.zeros(3, 2, 9)
    state.inspect(logits, whose)
    state.check_finite("in a test")
    state.finished_B[2] = True
    state.num_tokens_B += torch.tensor([0, 4, 0], dtype=torch.int32)
    for bad in ([1, 2], [0, 1]):
        logits[bad, 1, 3] = value
        state.inspect(logits, whose)
        state.num_tokens_B += 2
    assert state.bad_WB[whose].tolist() == [12, 7, NEVER]
    assert state.bad_WB[1 - whose].tolist() == [NEVER] * 3
    words = f"{key}: its logits are NaN or infinite, first for token 12 of row 0, in a test; "
    with pytest.raises(NonFinite, match=f"^{words}check its weights"):
        state.check_finite("in a test")


def test_logits_behind_a_rejected_proposal_do_not_count():
    """Row 0 has NaN behind the proposal after its accepted one, row 1 behind an accepted one."""
    state = opened()
    logits = torch.zeros(3, 4, 5)
    logits[0, 2, 3] = logits[1, 1, 3] = float("nan")
    state.inspect(logits, TARGET, torch.tensor([1, 1, 3]))
    length = state.prompt_len_B.tolist()[1]
    assert state.bad_WB[TARGET].tolist() == [NEVER, length, NEVER]


def test_a_new_pass_and_a_new_prefill_begin_without_the_notes_of_earlier_ones():
    """A pass keeps what was noted in the prefill about the target; a prefill keeps nothing."""
    state = opened()
    nan = torch.full((3, 1, 5), float("nan"))
    state.inspect(nan, DRAFT)
    in_prefill = torch.zeros(3, 1, 5)
    in_prefill[2] = float("nan")
    state.inspect(in_prefill, TARGET)
    first = torch.full((3,), 2)
    state.start(first)
    length = state.prompt_len_B.tolist()[2]
    assert state.bad_WB.tolist() == [[NEVER, NEVER, length], [NEVER] * 3]
    state.finished_B.zero_()
    state.inspect(nan, TARGET)  # in a round
    state.inspect(nan, DRAFT)
    state.start(first)
    assert state.bad_WB.tolist() == [[NEVER, NEVER, length], [NEVER] * 3]
    state.finished_B.fill_(True)
    state.begin()
    assert state.bad_WB.tolist() == [[NEVER] * 3] * 2
    assert state.num_tokens_B.tolist() == state.prompt_len_B.tolist()
    assert not state.finished_B.any()
