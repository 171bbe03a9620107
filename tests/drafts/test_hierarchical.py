"""Two levels of drafts: what each accepts, that the inner cache keeps up, and the distribution of sampled tokens."""

import pytest
import torch

from magicdec.verification.sampling import Sampling
from tests.small import noisy_copy, open_batch, random_prompts, small_model

TARGET = small_model()


def opened(model=TARGET, prompts=None, **options):
    settings = {"draft_name": "hierarchical", "draft_model": model, "gamma": 6, "policy": "full", "inner_gamma": 2}
    return open_batch(TARGET, prompts or random_prompts([50, 61]), **(settings | options))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_the_target_at_every_level_all_is_accepted_everywhere(temperature):
    """So the inner rounds yield three tokens each, the outer ones seven, and the caches hold what they should."""
    batch = opened(sampling=Sampling(temperature=temperature), generate_len=40)
    accepted = batch.decoder.generate(batch.draft).accepted_RB
    assert (accepted[accepted >= 0] == 6).all()


def test_the_inner_level_is_verified_over_the_retrieval_cache():
    """The target over the same entries, drafting alone, proposes the same tokens, whoever drafts for it."""
    options = {"policy": "streaming", "budget": 16, "num_sink": 2}
    batch = opened(small_model(7), inner_gamma=1, **options)  # an inner draft that is nearly never right
    alone = opened(None, draft_name="self", inner_gamma=0, **options)
    for one in (batch, alone):
        one.restart()
    proposal, expected = (one.draft.propose(one.decoder.state).tokens_BG for one in (batch, alone))
    assert torch.equal(proposal[:, : batch.draft.rounds], expected[:, : batch.draft.rounds])


@pytest.mark.parametrize("policy", ["full", "streaming"])
def test_the_inner_cache_holds_the_committed_tokens(policy):
    """After every round, rejected proposals or not: its entries are those of a model that has only read the output."""
    model = noisy_copy(TARGET, 0.2)
    batch = opened(model, inner_policy=policy, inner_cache_options={"budget": 400, "num_sink": 2}, generate_len=30)
    tokens = batch.decoder.generate(batch.draft).tokens
    cache, state = batch.draft.inner.cache, batch.decoder.state
    reference = open_batch(model, [state.tokens_BS[r, :n].tolist() for r, n in enumerate(state.num_tokens_B.tolist())])
    for row, new in enumerate(tokens):
        length = int(cache.length_B[row])
        assert length <= len(new) + int(state.prompt_len_B[row])
        torch.testing.assert_close(
            cache.k_LBKSD[:, row, :, :length], reference.decoder.cache.k_LBKSD[:, row, :, :length], atol=1e-4, rtol=1e-4
        )


def test_sampled_tokens_are_distributed_as_the_targets():
    """Many rows of one prompt: the frequencies of the first, second and third new token after the prefill's."""
    prompts, rows = random_prompts([12]), 3000
    batch = opened(
        noisy_copy(TARGET, 0.4),
        prompts * rows,
        sampling=Sampling(temperature=0.7, seed=3),
        gamma=3,
        policy="streaming",
        budget=8,
        num_sink=1,
        generate_len=4,
    )
    fast = torch.tensor(batch.decoder.generate(batch.draft).tokens)
    plain = torch.tensor(batch.decoder.generate().tokens)
    for position in range(1, 4):
        counts = [torch.bincount(one[:, position], minlength=61).double() for one in (fast, plain)]
        common = counts[1] >= 20
        statistic = ((counts[0] - counts[1])[common] ** 2 / (counts[0] + counts[1])[common]).sum()
        freedom = int(common.sum())
        assert statistic < freedom + 4 * (2 * freedom) ** 0.5
