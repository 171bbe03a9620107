"""Two levels of drafts: what each accepts, that the inner cache keeps up, and the distribution of
sampled tokens.
"""

from types import SimpleNamespace

import pytest
import torch

from magicdec.architectures.model_config import ModelConfig
from magicdec.attention.sdpa import SdpaAttention
from magicdec.cache.full import Full
from magicdec.config.choices import ModelChoice
from magicdec.config.registry import POLICIES
from magicdec.decoding.state import State
from magicdec.drafts import hierarchical
from magicdec.drafts.hierarchical import Hierarchical, HierarchicalDraft
from magicdec.models.kv_cache import KVCache
from magicdec.verification.sampling import Sampling, Use, probabilities
from tests.chi_square import chisquare
from tests.small import (
    accepted,
    cache_config,
    new_engine,
    noisy_copy,
    open_batch,
    random_prompts,
    small_model,
)

TARGET = small_model()


def opened(model=TARGET, prompts=None, **options):
    settings = {
        "draft_name": "hierarchical",
        "draft_model": model,
        "gamma": 6,
        "policy": "full",
        "inner_gamma": 2,
    }
    return open_batch(TARGET, prompts or random_prompts([50, 61]), **(settings | options))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_the_target_at_every_level_all_is_accepted_everywhere(temperature):
    """So the inner rounds yield three tokens each, the outer ones seven, and the caches hold what
    they should: with prompts, too, that are shorter than what the inner cache lacks between rounds.
    """
    prompts = random_prompts([50, 1, 61, 3, 6, 7])
    batch = opened(prompts=prompts, sampling=Sampling(temperature=temperature), generate_len=40)
    assert (accepted(batch.decoder.generate(batch.draft)) == 6).all()


def test_inner_rounds_end_at_gamma_tokens():
    """If every proposal were accepted, more tokens would be written than fit behind the end of a
    sequence.
    """
    batch = opened(gamma=12)
    batch.restart()
    state = batch.decoder.state
    state.num_tokens_B.copy_(state.limit_B - 1)
    assert batch.draft.propose(state, 12).tokens_BG.shape == (2, 12)
    assert (batch.draft.cache.seqlens_B <= batch.draft.cache.length_B + 12).all()


def test_the_inner_cache_has_the_slots_that_are_declared():
    batch = opened(inner=cache_config("streaming", budget=16, num_sink=2))
    facts = Hierarchical(gamma=6, inner_gamma=2)
    assert facts.round_slots(6) == 7 + 6 + 2 + 1  # what it lacks, proposals, and an inner round
    assert batch.draft.inner.cache.capacity == 16 + facts.round_slots(6)


def test_its_memory_is_that_of_both_levels():
    """And rounds rest in both."""
    inner = cache_config("streaming", budget=16, num_sink=2)
    draft = opened(inner=inner, policy="streaming", budget=24, num_sink=2).draft
    per_slot = 2 * 2 * TARGET.config.num_kv_heads * TARGET.config.head_dim * 4
    assert draft.cache_bytes == 2 * per_slot * ((24 + 6 + 2 + 1) + (16 + 16))
    assert draft.caches == (draft.cache, draft.inner.cache)


def test_it_has_a_cache_of_its_own_below_the_targets():
    outer, inner = cache_config("streaming", budget=24), Full()
    assert Hierarchical().caches(outer) == {"cache": outer}
    assert Hierarchical(cache=inner).caches(outer) == {"cache": outer, "draft.cache": inner}


@pytest.mark.parametrize(
    ("inner_gamma", "rounds"),
    [(1, [1, 2, 2, 3, 4, 4]), (2, [1, 1, 2, 2, 3, 3]), (8, [1] * 5 + [2])],
)
def test_inner_rounds_are_enough_if_half_of_their_proposals_are_accepted(inner_gamma, rounds):
    """Each then yields half of them and a token of its own."""
    draft = SimpleNamespace(inner_gamma=inner_gamma)
    assert [HierarchicalDraft.rounds(draft, gamma) for gamma in range(1, 7)] == rounds


@torch.inference_mode()
def test_a_simulated_prefill_leaves_both_levels_as_a_prefill_does():
    lengths = []
    for is_simulated in (False, True):
        batch = opened(prompts=random_prompts([50, 3, 9]), policy="streaming", budget=24)
        if is_simulated:
            batch.simulate_prefill()
        batch.restart()
        draft = batch.draft
        lengths.append([cache.length_B.tolist() for cache in (draft.cache, draft.inner.cache)])
    assert lengths == [[[50, 3, 9], [44, 0, 3]]] * 2


@torch.inference_mode()
def test_inner_rounds_leave_the_committed_tokens_and_the_counters_as_they_are():
    batch = opened(noisy_copy(TARGET, 0.2))
    batch.restart()
    state = batch.decoder.state
    names = ("num_tokens_B", "limit_B", "finished_B", "accepted_RB", "round_1")
    before = [getattr(state, name).clone() for name in names]
    proposal = batch.draft.propose(state, 6)
    assert all(map(torch.equal, before, [getattr(state, name) for name in names]))
    assert torch.equal(batch.draft.cache.length_B, state.prompt_len_B)
    for row, prompt in enumerate(random_prompts([50, 61])):
        assert state.tokens_BS[row, : len(prompt)].tolist() == prompt
    assert proposal.tokens_BG.shape == (2, 6)


@pytest.mark.parametrize(
    ("cache", "inner_gamma", "mistakes"),
    [
        (Full(), 1, []),
        (None, 1, ["draft.cache=null"]),
        (Full(), 0, ["draft.inner_gamma=0"]),
    ],
)
def test_the_inner_level_needs_a_cache_and_proposals(cache, inner_gamma, mistakes):
    settings = {"gamma": 4, "model": ModelChoice("tiny"), "cache": cache}
    draft = Hierarchical(inner_gamma=inner_gamma, **settings)
    assert [text.partition(":")[0] for text in draft.mistakes()] == mistakes


def test_the_inner_level_is_verified_over_the_retrieval_cache():
    """The target over the same entries, drafting alone, proposes the same tokens, whoever drafts
    for it.
    """
    options = {"policy": "streaming", "budget": 16, "num_sink": 2}
    # An inner draft that is nearly never right.
    batch = opened(small_model(7), inner_gamma=1, **options)
    alone = opened(None, draft_name="self", inner_gamma=0, **options)
    for one in (batch, alone):
        one.restart()
    proposal, expected = (
        one.draft.propose(one.decoder.state, 6).tokens_BG for one in (batch, alone)
    )
    assert torch.equal(proposal[:, : batch.draft.rounds(6)], expected[:, : batch.draft.rounds(6)])


@pytest.mark.parametrize("policy", ["full", "streaming"])
def test_the_inner_cache_holds_the_committed_tokens(policy):
    """After every round, rejected proposals or not: its entries are those of a model that has only
    read the output.
    """
    model = noisy_copy(TARGET, 0.2)
    options = {"inner": cache_config(policy, budget=400, num_sink=2), "generate_len": 30}
    batch = opened(model, random_prompts([50, 61, 2, 5]), **options)
    batch.decoder.generate(batch.draft)
    cache, state = batch.draft.inner.cache, batch.decoder.state
    reference = open_batch(
        model, [state.tokens_BS[r, :n].tolist() for r, n in enumerate(state.num_tokens_B.tolist())]
    )
    assert torch.equal(cache.length_B, state.num_tokens_B - 7)  # gamma + 1: what a round may add
    for row, length in enumerate(cache.length_B.tolist()):
        keys = (x.k_LBKSD[:, row, :, :length] for x in (cache, reference.decoder.cache))
        torch.testing.assert_close(*keys, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", list(POLICIES))
@torch.inference_mode()
def test_what_verifies_a_proposal_depends_on_the_tokens_before_it_alone(policy):
    """Two inner verifications agree up to the first proposal that differs."""
    options = {"policy": policy, "budget": 16, "num_sink": 2, "page_size": 2}
    batch = opened(gamma=3, **options)
    batch.restart()
    cache, last_B1 = batch.draft.cache, batch.decoder.state.recent_BT(1)
    found = []
    for proposals in ([7, 8], [7, 9], [30, 8]):
        with cache.tentative():
            tokens_BT = torch.cat((last_B1, torch.tensor([proposals] * 2)), dim=1)
            found.append(TARGET(tokens_BT, cache))
        cache.commit(3, torch.zeros_like(cache.length_B))
    torch.testing.assert_close(found[1][:, :2], found[0][:, :2])
    torch.testing.assert_close(found[2][:, :1], found[0][:, :1])
    assert not torch.allclose(found[1][:, 2], found[0][:, 2], atol=0.1)


ROWS, FIRST = 3000, 5  # many rows of one prompt, which all begin with the same token
SAMPLING = Sampling(temperature=1.0, seed=3)
(PROMPT,) = random_prompts([12])


@pytest.fixture(scope="module")
@torch.inference_mode()
def sampled():
    """Three models that disagree often: the small one, the target over few entries, the target."""
    settings = {"gamma": 3, "policy": "streaming", "budget": 4, "num_sink": 1, "generate_len": 3}
    batch = opened(noisy_copy(TARGET, 0.3), [PROMPT] * ROWS, sampling=SAMPLING, **settings)
    batch.decoder.first_tokens_B = torch.full((ROWS,), FIRST)
    return batch


def following(tokens: list[int]) -> torch.Tensor:
    """The target's distribution (V) of the token behind these."""
    hidden = TARGET(
        torch.tensor([tokens]), KVCache(TARGET.config, 1, len(tokens), torch.float32, "cpu")
    )
    return probabilities(TARGET.logits(hidden[:, -1]), SAMPLING)[0]


def p_value(tokens: torch.Tensor, p_V: torch.Tensor) -> float:
    """Chi-square of drawn tokens against a distribution, rare tokens taken together."""
    observed = torch.bincount(tokens, minlength=len(p_V)).double()
    expected = p_V.double() * len(tokens)
    rare = expected < 5
    observed, expected = (torch.cat((x[~rare], x[rare].sum()[None])) for x in (observed, expected))
    return chisquare(observed, expected * observed.sum() / expected.sum())


@torch.inference_mode()
def test_proposals_are_distributed_as_the_inner_level_says(sampled):
    """And accepted as often as two such distributions allow: the sum of their smaller values."""
    sampled.restart()
    proposal = sampled.draft.propose(sampled.decoder.state, 3)
    q_V, p_V = proposal.q_BGV[0, 0], following([*PROMPT, FIRST])
    assert p_value(proposal.tokens_BG[:, 0], q_V) > 1e-3
    sampled.restart()
    sampled.decoder.round(sampled.draft, 3, 0)
    accepted_B = sampled.decoder.state.accepted_RB[0]
    expected = float(torch.minimum(p_V, q_V).sum())
    error = (expected * (1 - expected) / ROWS) ** 0.5
    assert float((accepted_B > 0).double().mean()) == pytest.approx(expected, abs=4 * error)


def test_output_is_distributed_as_the_targets(sampled):
    """The second token, and the third behind the commonest second one."""
    tokens = torch.tensor(sampled.decoder.generate(sampled.draft).tokens)
    assert p_value(tokens[:, 1], following([*PROMPT, FIRST])) > 1e-3
    common = int(tokens[:, 1].mode().values)
    assert p_value(tokens[tokens[:, 1] == common, 2], following([*PROMPT, FIRST, common])) > 1e-3


@pytest.mark.parametrize("shared", ["ACCEPT", "DECIDE"])
def test_levels_that_shared_random_numbers_would_be_found_out(sampled, shared, monkeypatch):
    """The same test with an outer level that reuses a random number of the inner one: it can
    fail.
    """
    uses = {
        "INNER_ACCEPT": Use.INNER_ACCEPT,
        "INNER_DECIDE": Use.INNER_DECIDE,
        f"INNER_{shared}": Use[shared],
    }
    monkeypatch.setattr(hierarchical, "Use", SimpleNamespace(**uses))
    monkeypatch.setattr(State, "places_in_round_BT", State.next_positions_BT)
    tokens = torch.tensor(sampled.decoder.generate(sampled.draft).tokens)
    assert p_value(tokens[:, 1], following([*PROMPT, FIRST])) < 1e-4


class Table:
    """A model whose logits depend on the position alone: it says `likely[p]` at position p, by
    default 0, and each of its three tokens as often as the others where that is None.
    """

    config = ModelConfig(3, 2, 2, 1, 1, 1, 2, 64)
    attention = SdpaAttention()
    embed = SimpleNamespace(weight=torch.zeros(3, 2))
    dtype, is_compiled = torch.float32, False

    def __init__(self, likely):
        self.logits_SV = torch.tensor([50.0, 0.0, 0.0]).repeat(64, 1)
        for position, token in likely.items():
            self.logits_SV[position] = (
                torch.eye(3)[token] * 50 if token is not None else torch.zeros(3)
            )

    def __call__(self, tokens_BT, cache, taps=None):
        positions_BT = cache.positions_BT(tokens_BT.shape[1])
        cache.advance(tokens_BT.shape[1])
        return positions_BT[..., None].float()

    def logits(self, hidden_BT1):
        return self.logits_SV[hidden_BT1[..., 0].long() + 1]


@torch.inference_mode()
def test_a_guess_in_place_of_a_sampled_token_leaves_the_distribution_as_it_is():
    """The small model is wrong twice, so that the inner rounds write too few tokens; the last
    position of the round is a guess. The autoregressive pass before, on the same random numbers,
    has written its own sample there.
    """
    first = len(PROMPT) + 1
    target, small = Table({first + 5: None}), Table({first: 1, first + 1: 1})
    settings = {"sampling": SAMPLING, "generate_len": 8, "prefill_chunk": 64}
    engine = new_engine(
        target, draft_name="hierarchical", draft_model=small, gamma=6, policy="full", **settings
    )
    batch = engine.open([[0] * len(PROMPT)] * ROWS)
    batch.decoder.prefill(64)
    plain, fast = batch.decoder.generate(), batch.decoder.generate(batch.draft)
    assert fast.accepted_RB[0].unique().tolist() == [5, 6]
    for generation in (plain, fast):
        assert chisquare(torch.tensor(generation.tokens)[:, 6].bincount(minlength=3)) > 1e-3
