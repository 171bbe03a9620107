"""Acceptance on fixed logits: never, always, sometimes; and the distribution of what sampling
writes.
"""

import pytest
import torch

from magicdec.config.choices import DraftConfig
from magicdec.verification import accept
from magicdec.verification import sampling as ours
from magicdec.verification.accept import accept_greedy, accept_sampled, accept_synthetic
from magicdec.verification.sampling import (
    RowSampling,
    Sampling,
    Use,
    choose,
    draw,
    probabilities,
    uniform_BT,
)
from tests.chi_square import chisquare

V = 11


def test_greedy_accepts_the_leading_agreement_of_each_row():
    target = [[1, 2, 3, 4], [9, 2, 3, 4], [1, 2, 9, 4], [1, 9, 3, 4]]
    logits = torch.nn.functional.one_hot(torch.tensor(target), V).float()
    verdict = accept_greedy(torch.tensor([[1, 2, 3]] * 4), logits)
    assert verdict.num_accepted_B.tolist() == [3, 0, 2, 1]
    for tokens, count, row in zip(verdict.tokens_BT.tolist(), (3, 0, 2, 1), target, strict=True):
        assert tokens[: count + 1] == row[: count + 1], "the bonus token is the target's"


def test_sampled_accepts_everything_where_draft_and_target_agree():
    logits = torch.randn(64, 5, V)
    sampling = Sampling(temperature=0.8)
    proposed = choose(logits[:, :4], torch.arange(4).expand(64, 4), Use.PROPOSE, sampling)[0]
    q = probabilities(logits[:, :4], sampling)
    verdict = accept_sampled(proposed, q, logits, torch.arange(5).expand(64, 5), sampling)
    assert (verdict.num_accepted_B == 4).all()


def test_sampled_never_accepts_what_the_target_cannot_say():
    logits = torch.zeros(32, 2, V)
    logits[:, :, 3] = float("-inf")
    q = torch.zeros(32, 1, V).index_fill_(2, torch.tensor([3]), 1.0)
    proposed = torch.full((32, 1), 3)
    verdict = accept_sampled(
        proposed, q, logits, torch.arange(2).expand(32, 2), Sampling(temperature=1.0)
    )
    assert (verdict.num_accepted_B == 0).all()
    assert (verdict.tokens_BT[:, 0] != 3).all()


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize(
    "truncation", [{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 6, "top_p": 0.7}]
)
def test_output_is_distributed_as_the_targets(one_hot, truncation):
    """Chi-square over 20,000 rounds of one proposal by a draft that disagrees (p > 1e-3, three
    positions).
    """
    rows = 20_000
    generator = torch.Generator().manual_seed(5)
    target = torch.randn(3, V, generator=generator) * 1.5
    draft = torch.randn(V, generator=generator) * 1.5
    sampling = Sampling(temperature=0.9, seed=3, **truncation)
    for position in range(3):
        logits = target[[position, position]].expand(rows, 2, V)
        positions = torch.tensor([[position, position + 1]]).expand(rows, 2)
        if one_hot:
            proposed, q = torch.full((rows, 1), int(draft.argmax())), None
        else:
            proposed, q = choose(draft.expand(rows, 1, V), positions[:, :1], Use.PROPOSE, sampling)
        first = accept_sampled(proposed, q, logits, positions, sampling).tokens_BT[:, 0]
        counts = torch.bincount(first, minlength=V).double()
        expected = probabilities(target[position], sampling).double() * rows
        assert counts[expected == 0].sum() == 0
        kept = expected > 0
        expected = expected[kept] * counts.sum() / expected[kept].sum()
        assert chisquare(counts[kept], expected) > 1e-3


def test_synthetic_acceptance_is_alpha():
    proposed, logits = torch.zeros(4000, 4, dtype=torch.int64), torch.randn(4000, 5, V)
    verdict = accept_synthetic(
        proposed, logits, torch.arange(5).expand(4000, 5), torch.full((4,), 0.7), Sampling(seed=1)
    )
    accepted = verdict.num_accepted_B.double()
    assert abs(float((accepted >= 1).double().mean()) - 0.7) < 0.03
    assert abs(float((accepted >= 2).double().mean()) - 0.49) < 0.03


def test_synthetic_acceptance_by_position_is_what_was_asked_for():
    """A list has the share of rounds that accept a position and all before it."""
    shares, rows = [0.9, 0.5, 0.45, 0.1], 20_000
    drawn_G = torch.tensor(DraftConfig(gamma=4, synthetic_acceptance=shares).drawn(4))
    proposed, logits = torch.zeros(rows, 4, dtype=torch.int64), torch.randn(1, 5, V)
    positions = torch.arange(5).expand(rows, 5)
    verdict = accept_synthetic(
        proposed, logits.expand(rows, 5, V), positions, drawn_G, Sampling(seed=2)
    )
    for position, share in enumerate(shares):
        measured = float((verdict.num_accepted_B > position).double().mean())
        assert measured == pytest.approx(share, abs=4 * (0.25 / rows) ** 0.5)


def test_a_synthetic_mean_length_is_realised():
    """As vLLM's synthetic mode states it: 3.24 tokens a round of 4 proposals."""
    rows, draft = 100_000, DraftConfig(gamma=4, synthetic_acceptance=3.24)
    assert draft.drawn_length(4) == pytest.approx(3.24)
    proposed, logits = torch.zeros(rows, 4, dtype=torch.int64), torch.randn(1, 5, V)
    positions = torch.arange(5).expand(rows, 5)
    verdict = accept_synthetic(
        proposed, logits.expand(rows, 5, V), positions, torch.tensor(draft.drawn(4)), Sampling()
    )
    assert float(verdict.num_accepted_B.double().mean()) + 1 == pytest.approx(3.24, abs=0.02)


def test_the_generator_is_splitmix64():
    """Its first numbers for the seed 1234567, as published with many implementations."""
    states = torch.tensor([ours._signed(1234567 + count * ours.GOLDEN) for count in range(1, 6)])
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    expected += [4593380528125082431, 16408922859458223821]
    assert [number % 2**64 for number in ours._mix(states).tolist()] == expected


def test_random_numbers_are_uniform_and_depend_on_everything():
    positions = torch.arange(500).expand(40, 500)
    sampling = Sampling()
    u = uniform_BT(sampling, positions, Use.DECIDE)
    assert chisquare(torch.histc(u.float(), 20, 0, 1)) > 1e-3
    assert u.unique().numel() == u.numel()
    others = [uniform_BT(sampling, positions, use) for use in Use if use != Use.DECIDE]
    for other in (uniform_BT(Sampling(seed=1), positions, Use.DECIDE), *others):
        assert abs(float(torch.corrcoef(torch.stack((u.flatten(), other.flatten())))[0, 1])) < 0.03
    # No use of a position is one of another.
    assert torch.stack((u, *others)).unique().numel() == len(Use) * u.numel()
    assert torch.equal(uniform_BT(sampling, positions[:3, 7:9], Use.DECIDE), u[:3, 7:9])
    assert torch.equal(uniform_BT(Sampling(sequence=30), positions[:10], Use.DECIDE), u[30:])


def test_draw_never_takes_a_token_of_no_probability():
    p = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    u = torch.tensor([0.0, 0.499999, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(p.expand(4, 5), u).tolist() == [1, 1, 3, 3]


def test_rows_with_settings_of_their_own_draw_what_each_would_alone():
    """Ties included: the first of the largest logits is what a greedy row takes."""
    each = [Sampling(), Sampling(1.0, seed=7), Sampling(0.6, top_k=3, seed=1)]
    each += [Sampling(1.4, top_p=0.7), Sampling(0.8, 4, 0.9)]
    rows = RowSampling(len(each), "cpu")
    rows.greedy = False
    for row, sampling in enumerate(each):
        rows.set_row(row, sampling)
    logits = torch.randn(len(each), 30, V, generator=torch.Generator().manual_seed(0)).round(
        decimals=1
    )
    logits[0, :, 3] = logits[0].amax(-1)
    positions = torch.arange(30).expand(len(each), -1)
    tokens, _ = choose(logits, positions, Use.DECIDE, rows)
    for row, sampling in enumerate(each):
        alone, _ = choose(logits[row : row + 1], positions[:1], Use.DECIDE, sampling)
        assert torch.equal(tokens[row : row + 1], alone)


def with_numbers(monkeypatch, **numbers: list[list[float]]) -> None:
    """Let each use of a place draw these numbers, and logits be probabilities."""
    drawn = {Use[name]: torch.tensor(u, dtype=torch.float64) for name, u in numbers.items()}
    monkeypatch.setattr(accept, "uniform_BT", lambda settings, places, use: drawn[use])
    monkeypatch.setattr(accept, "probabilities", lambda logits, settings: logits)


ONE = [1.0, 0.0, 0.0]  # a draft that does not sample, which proposes the token 0
QUARTERS = [0.25, 0.5, 0.25]


@pytest.mark.parametrize(
    ("p", "q", "accept_u", "decide_u", "accepted", "token"),
    [
        (QUARTERS, None, 0.24, 0.6, 1, 2),  # 0.6 of what follows a proposal, (1/2, 0, 1/2)
        (QUARTERS, None, 0.25, 0.66, 0, 1),  # a number of p/q rejects; 2/3 of the rest is token 1
        (QUARTERS, ONE, 0.25, 0.67, 0, 2),
        (QUARTERS, [0.5, 0.5, 0.0], 0.49, 0.4, 1, 0),
        (QUARTERS, [0.5, 0.5, 0.0], 0.5, 0.0, 0, 2),  # the only token with more than was proposed
        ([0.0, 1.0, 0.0], None, 0.0, 0.0, 0, 1),  # impossible, whatever is drawn
        (QUARTERS, [0.5, 1.0, 0.5], 0.5, 0.24, 0, 0),  # nothing is left: all of p is drawn from
        (QUARTERS, [0.5, 1.0, 0.5], 0.5, 0.25, 0, 1),
    ],
)
def test_a_proposal_is_accepted_below_p_over_q_or_else_the_rest_is_drawn_from(
    p, q, accept_u, decide_u, accepted, token, monkeypatch
):
    """The numbers of other places, 0.99, have no part in it."""
    decided = [decide_u, 0.99] if not accepted else [0.99, decide_u]
    with_numbers(monkeypatch, ACCEPT=[[accept_u, 0.99]], DECIDE=[decided])
    q_BGV = None if q is None else torch.tensor([[q]])
    p_BTV = torch.tensor([[p, [0.5, 0.0, 0.5]]])
    verdict = accept_sampled(
        torch.zeros(1, 1, dtype=torch.int64), q_BGV, p_BTV, torch.zeros(1, 2), Sampling(1.0)
    )
    assert verdict.num_accepted_B.tolist() == [accepted]
    assert verdict.num_accepted_B.dtype == torch.int32
    assert verdict.tokens_BT[0, : accepted + 1].tolist() == [0, token][1 - accepted :]


def test_a_synthetic_outcome_is_below_each_places_alpha_and_ends_with_the_argmax(monkeypatch):
    """What is proposed has no part in it; a place of 0 never holds, and one of 1 always does."""
    most = 1 - 2**-53
    with_numbers(monkeypatch, ACCEPT=[[0.49, most, 0.3, 0.9], [0.49, 0, 0.1, 0.9], [0.5, 0, 0, 0]])
    best = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 0, 1]]
    logits = torch.nn.functional.one_hot(torch.tensor(best), V).float()
    proposed = torch.tensor([[3, 3, 3], [4, 4, 4], [5, 5, 5]])
    alpha_G = torch.tensor([0.5, 1.0, 0.25])
    verdict = accept_synthetic(proposed, logits, torch.zeros(3, 4), alpha_G, Sampling(1.0))
    assert verdict.num_accepted_B.tolist() == [2, 3, 0]
    tokens = verdict.tokens_BT.tolist()
    assert [tokens[0][:3], tokens[1], tokens[2][:1]] == [[3, 3, 3], [4, 4, 4, 8], [9]]
    never = accept_synthetic(proposed, logits, torch.zeros(3, 4), torch.zeros(3), Sampling(1.0))
    assert never.num_accepted_B.tolist() == [0, 0, 0]


def number(seed: int, sequence: int, place: int, use: int) -> float:
    """Return the random number of a decision, in Python's integers."""
    low = 2**64 - 1

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & low
        x = (x ^ x >> 27) * 0x94D049BB133111EB & low
        return x ^ x >> 31

    key = seed * 0x9E3779B97F4A7C15 + sequence & low
    return (mix(mix(mix(key) + 8 * place + use & low)) >> 11) / 2**53


@pytest.mark.parametrize("seed", [0, 3, (1 << 62) + 5])
@pytest.mark.parametrize("sequence", [0, 7])
def test_random_numbers_are_those_of_the_definition(seed, sequence):
    """Stored runs stay reproducible: a seed, a sequence, a place and a use name a number."""
    assert [use.name for use in sorted(Use)] == [
        "PROPOSE",
        "ACCEPT",
        "DECIDE",
        "INNER_ACCEPT",
        "INNER_DECIDE",
        "KEEP",
    ]
    sampling, places = Sampling(1.0, seed=seed, sequence=sequence), [0, 1, 65536, (9 << 32) + 3]
    rows = RowSampling(3, "cpu")
    for row in range(3):
        rows.set_row(row, Sampling(0.5, seed=seed, sequence=sequence + row))
    for use in Use:
        expected = [
            [number(seed, sequence + row, place, 1 + sorted(Use).index(use)) for place in places]
            for row in range(3)
        ]
        for settings in (sampling, rows):
            found_BT = uniform_BT(settings, torch.tensor([places] * 3), use)
            assert found_BT.dtype == torch.float64
            assert found_BT.tolist() == expected


def test_a_row_has_the_settings_that_were_set_last():
    rows = RowSampling(2, "cpu")
    assert rows.greedy
    assert rows.keys == [None, None]
    sampled = Sampling(0.5, top_k=3, top_p=0.9, seed=4, sequence=2)
    rows.set_row(1, sampled)
    assert rows.keys == [None, sampled.key]
    assert [x.flatten()[1].item() for x in (rows.temperature, rows.top_k, rows.key)] == [
        0.5,
        3,
        sampled.key,
    ]
    rows.set_row(1, Sampling())
    assert rows.keys == [None, None]
    equal = torch.zeros(2, 1, V)
    assert probabilities(equal, rows)[1, 0].tolist() == [1.0] + [0.0] * (V - 1)
