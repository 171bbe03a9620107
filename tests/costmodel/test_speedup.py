import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.config.omega import alpha_of_rounds
from magicdec.costmodel import speedup
from magicdec.errors import UserError

GAMMAS = st.integers(1, 32)
ALPHAS = st.floats(0.0, 1.0)


@given(GAMMAS, st.floats(0.0, 0.99))
def test_omega_is_the_closed_form(gamma, alpha):
    assert speedup.omega(gamma, alpha) == pytest.approx(
        (1 - alpha ** (gamma + 1)) / (1 - alpha), rel=1e-12
    )


@pytest.mark.parametrize("gamma", [0, 1, 5, 32])
def test_omega_at_its_limits(gamma):
    assert speedup.omega(gamma, 0.0) == 1.0
    assert speedup.omega(gamma, 1.0) == gamma + 1
    assert speedup.omega(gamma, 1 - 1e-12) == pytest.approx(gamma + 1)


@given(GAMMAS, ALPHAS)
def test_alpha_inverts_omega(gamma, alpha):
    # Omega grows at least as fast as alpha does: the inverse is sharp everywhere.
    assert speedup.alpha_from_acceptance_length(
        speedup.omega(gamma, alpha), gamma
    ) == pytest.approx(alpha, abs=1e-9)


@pytest.mark.parametrize(("length", "alpha"), [(0.99, 0.0), (1.0, 0.0), (4.0, 1.0), (4.001, 1.0)])
def test_alpha_of_lengths_at_and_beyond_the_ends(length, alpha):
    assert speedup.alpha_from_acceptance_length(length, 3) == alpha


@pytest.mark.parametrize("rounds", [{2: 4, 5: 5}, {1: 1, 2: 5}, {1: 2, 2: 1}])
def test_alpha_is_1_where_rounds_of_several_gammas_accepted_all(rounds):
    """The mean is rounded, up or down."""
    accepted, number = sum(gamma * count for gamma, count in rounds.items()), sum(rounds.values())
    assert alpha_of_rounds(1 + accepted / number, rounds) == 1.0


def test_omega_is_what_a_simulated_round_yields():
    rng, gamma, alpha = np.random.default_rng(0), 4, 0.8
    accepted = rng.random((200_000, gamma)) < alpha
    length = accepted.cumprod(axis=1).sum(axis=1).mean() + 1
    assert length == pytest.approx(speedup.omega(gamma, alpha), rel=5e-3)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # Worked by hand: it yields 1.75 tokens for 2 * 1.1 + 4.3 = 6.5.
        ((2, 0.5, 3.25, 1.1, 4.3), 1.75 / 2),
        ((7, 1.0, 2.0, 0.0, 2.0), 8.0),  # a free draft with everything accepted gains gamma + 1
        ((3, 0.0, 1.0, 0.2, 1.1), 1 / 1.7),  # with nothing accepted it can only cost
    ],
)
def test_speedup_of_a_round(arguments, expected):
    assert speedup.speedup(*arguments) == pytest.approx(expected)


@given(GAMMAS, st.floats(0.1, 10), st.floats(0.01, 2), st.floats(0.1, 10))
def test_break_even_is_where_speedup_crosses_one(gamma, target, draft, verify):
    alpha = speedup.break_even_alpha(gamma, speedup.round_time(gamma, draft, verify) / target)
    if alpha is None:
        assert speedup.speedup(gamma, 1.0, target, draft, verify) < 1 + 1e-9
    elif alpha == 0.0:
        assert speedup.speedup(gamma, 0.0, target, draft, verify) > 1 - 1e-9
    else:
        assert speedup.speedup(gamma, alpha, target, draft, verify) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("gamma", "alpha", "proposes"), [(4, 0.8, 1.0), (5, 0.95, 1.0), (3, 0.7, 0.4), (2, 1.0, 1.0)]
)
def test_the_rounds_of_one_row_are_those_of_a_batch_of_one(gamma, alpha, proposes):
    for num_tokens in (1, 2, 31, 64):
        rounds = speedup.row_rounds(gamma, alpha, num_tokens, proposes)
        assert rounds == pytest.approx(
            speedup.batch_rounds(gamma, alpha, 1, num_tokens, proposes), rel=1e-9
        )
    assert speedup.row_rounds(2, 1.0, 7) == 3, "of 3, 3 and 1 tokens"


def test_a_round_without_proposals_yields_one_token():
    assert speedup.round_tokens(3, 0.5, 0.3) == pytest.approx(1 + 0.3 * (0.5 + 0.25 + 0.125))
    assert speedup.round_tokens(3, 0.5, 0.0) == 1
    rounds = speedup.batch_rounds(3, 0.5, 1, 4000, proposes=0.3)
    assert rounds == pytest.approx(4000 / 1.2625, rel=0.001)
    assert speedup.break_even_alpha(3, 1.2625, 0.3) == pytest.approx(0.5)
    assert speedup.break_even_alpha(3, 1.95, 0.3) is None, "1.9 at most"
    assert speedup.break_even_alpha(3, 1.01, 0.0) is None


@pytest.mark.parametrize("alpha", [0.6, 0.9])
@pytest.mark.parametrize(("gamma", "num_tokens"), [(3, 32), (4, 3), (4, 5), (8, 1), (3, 4)])
def test_the_rounds_of_a_batch_match_a_simulation(gamma, num_tokens, alpha):
    num_rows, trials = 8, 4000
    rng = np.random.default_rng(1)
    accepted = rng.random((trials, num_rows, num_tokens, gamma)) < alpha
    lengths = accepted.cumprod(axis=-1).sum(axis=-1) + 1
    rounds = (lengths.cumsum(axis=-1) < num_tokens).sum(axis=-1) + 1
    assert speedup.batch_rounds(gamma, alpha, num_rows, num_tokens) == pytest.approx(
        rounds.max(axis=1).mean(), rel=0.01
    )


def test_the_speedup_of_a_batch_is_that_of_a_row_less_the_wait():
    for rows, bound in ((1, 1.0), (32, 0.9)):
        batch = speedup.batch_speedup(3, 0.8, rows, 4096, 10.0, 20.0)
        assert batch == pytest.approx(
            4096 * 10.0 / (20.0 * speedup.batch_rounds(3, 0.8, rows, 4096))
        )
        assert bound * 0.95 < batch / (10.0 * speedup.omega(3, 0.8) / 20.0) <= 1.0
    assert speedup.batch_speedup(3, 1.0, 32, 64, 10.0, 20.0) == pytest.approx(10.0 * 4 / 20.0)


def test_a_batch_waits_for_its_unluckiest_row_by_a_fifth():
    # 24 rows x 64 tokens: 20-25% is what equal rows lose to chance alone.
    assert 1.15 < speedup.batch_rounds(3, 0.8, 24, 64) / speedup.batch_rounds(3, 0.8, 1, 64) < 1.30
    assert speedup.batch_rounds(3, 1.0, 24, 64) == 16
    assert speedup.batch_rounds(3, 0.0, 24, 64) == 64


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: speedup.omega(3, 1.2), "alpha=1.2"),
        (lambda: speedup.omega(-1, 0.5), "gamma=-1"),
        (lambda: speedup.alpha_from_acceptance_length(float("nan"), 3), "acceptance_length"),
        (lambda: speedup.batch_rounds(3, 0.5, 0, 5), "0 rows"),
    ],
)
def test_mistakes_are_named(call, names):
    with pytest.raises(UserError, match=names):
        call()
