"""Drafts that read differently after a rejection: sampled output keeps the target's distribution,
because the next proposal at a position is not drawn with the same random number again.
"""

import pytest
import torch

from magicdec.cache.draft_cache import DraftCache
from magicdec.config.registry import DRAFTS
from magicdec.decoding.state import State
from magicdec.verification import accept, sampling
from magicdec.verification.sampling import Sampling, Use
from tests.chi_square import chisquare
from tests.drafts.test_hierarchical import Table
from tests.small import drafting, new_engine, small_model

ROWS, LENGTH = 3000, 12  # many rows of one prompt
TOKENS = 3


class Remembering(Table):
    """A model of three tokens, which follow each other as often as any other. Over a draft's cache
    it says 0 at the first position of the first round, and 1 wherever it has been shown 1 or 2
    before.
    """

    def __init__(self):
        super().__init__({})
        self.shown_BS = torch.zeros(ROWS, 64, dtype=torch.int64)

    def __call__(self, tokens_BT, cache, taps=None):
        positions_BT = cache.positions_BT(tokens_BT.shape[1])
        cache.advance(tokens_BT.shape[1])
        says_BT = torch.full_like(positions_BT, -1)
        if isinstance(cache, DraftCache):
            says_BT[self.shown_BS.gather(1, positions_BT + 1) > 0] = 1
            says_BT[positions_BT == LENGTH] = 0
            self.shown_BS.scatter_(1, positions_BT, tokens_BT)
        return says_BT[..., None].float()

    def logits(self, hidden_BT1):
        return 50.0 * (hidden_BT1 == torch.arange(TOKENS))


@torch.inference_mode()
def written(draft: str) -> torch.Tensor:
    """Return what each row writes in a draft's first rounds (B, 6)."""
    target = Remembering()
    small = {"model": Remembering(), "hierarchical": Table(dict.fromkeys(range(64)))}.get(draft)
    settings = {"sampling": Sampling(temperature=1.0, seed=3), "gamma": 3, "policy": "full"}
    settings |= {"generate_len": 6, "prefill_chunk": 64, "inner_gamma": 2}
    engine = new_engine(target, draft_name=draft, draft_model=small, **settings)
    batch = engine.open([[0] * LENGTH] * ROWS)
    batch.decoder.prefill(64)
    generation = batch.decoder.generate(batch.draft)
    # The first proposal, so that the next round proposes the second one again.
    rejected = (generation.accepted_RB[0] == 0).double().mean()
    assert float(rejected) == pytest.approx(2 / 3, abs=0.05)
    return torch.tensor(generation.tokens)


@pytest.mark.parametrize("draft", ["model", "self", "hierarchical"])
def test_a_draft_that_remembers_rejected_proposals_is_exact(draft):
    for tokens_B in written(draft).T[1:5]:
        assert chisquare(tokens_B.bincount(minlength=TOKENS)) > 1e-3


@pytest.mark.parametrize("draft", ["model", "self", "hierarchical"])
def test_the_random_numbers_of_rejected_proposals_would_be_found_out(draft, monkeypatch):
    """With numbers by position, a second proposal of 0 is proposed and accepted again. Where it was
    1 or 2, the draft says 1, and a third of the rows gets a 0 instead. So 13 of 27 rows have a 0,
    or more with two levels, instead of 9.
    """
    monkeypatch.setattr(State, "places_in_round_BT", State.next_positions_BT)
    tokens_B = written(draft)[:, 2]
    assert (tokens_B == 0).double().mean() > 12 / 27
    assert chisquare(tokens_B.bincount(minlength=TOKENS)) < 1e-30


@pytest.mark.parametrize("draft", list(DRAFTS))
def test_no_draft_draws_two_tokens_with_one_number(draft, monkeypatch):
    drawn, uniform_BT = [], sampling.uniform_BT

    def noting(settings, places_BT, use):
        if use in (Use.PROPOSE, Use.INNER_ACCEPT, Use.INNER_DECIDE):
            drawn.extend((use, place) for place in places_BT[0].tolist())
        return uniform_BT(settings, places_BT, use)

    for module in (sampling, accept):
        monkeypatch.setattr(module, "uniform_BT", noting)
    settings = {"gamma": 3, "policy": "full", "sampling": Sampling(temperature=1.0)}
    batch = drafting(draft, small_model(), [40], noise=0.5, **settings)
    batch.decoder.generate(batch.draft)
    assert len(drawn) == len(set(drawn))
    assert bool(drawn) == DRAFTS[draft].facts.is_model
