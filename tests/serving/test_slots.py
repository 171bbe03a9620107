"""Rows with a gamma of their own: what is cut off changes nothing in how tokens are distributed."""

import torch

from magicdec.serving.slots import SlotState
from magicdec.verification.accept import accept_sampled
from magicdec.verification.sampling import Sampling, Use, choose, probabilities
from tests.chi_square import chisquare

ROWS, GAMMA, V = 20_000, 3, 8


def test_a_round_cut_at_the_rows_gamma_is_distributed_as_the_targets():
    """Chi-square of the token behind one accepted proposal, where the round has proposed three."""
    generator = torch.Generator().manual_seed(5)
    target = torch.randn(GAMMA + 1, V, generator=generator)
    draft = torch.randn(V, generator=generator)
    sampling = Sampling(temperature=0.9, seed=3)
    positions = torch.arange(1, GAMMA + 2).expand(ROWS, -1)
    proposed, q = choose(draft.expand(ROWS, GAMMA, V), positions[:, :-1], Use.PROPOSE, sampling)
    verdict = accept_sampled(proposed, q, target.expand(ROWS, -1, V), positions, sampling)
    assert (verdict.num_accepted_B > 1).float().mean() > 0.1  # there is something to cut
    state = SlotState(ROWS, 8, GAMMA + 1, GAMMA, (), "cpu")
    state.finished_B.zero_()
    state.gamma_B.fill_(1)
    count = state.commit(verdict)
    assert count.unique().tolist() == [1, 2]
    assert state.accepted_RB[0].max() == 1
    second = state.tokens_BS[count == 2, 2]
    expected = probabilities(target[1], sampling).double() * len(second)
    assert chisquare(torch.bincount(second, minlength=V), expected) > 1e-3


def test_rows_without_a_request_take_nothing():
    state = SlotState(2, 8, GAMMA + 1, GAMMA, (), "cpu")
    before = state.num_tokens_B.clone()
    state.finished_B[1] = False
    positions = torch.arange(GAMMA + 1).expand(2, -1)
    proposed, logits = torch.zeros(2, GAMMA, dtype=torch.int64), torch.randn(2, GAMMA + 1, V)
    assert state.commit(accept_sampled(proposed, None, logits, positions, Sampling(1.0)))[0] == 0
    assert state.num_tokens_B[0] == before[0]
    assert state.num_tokens_B[1] > before[1]
