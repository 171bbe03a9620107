"""A decoder, and numbers that are not finite: what it must not fail for, and how it goes on."""

import pytest

from magicdec.cache.streaming import Streaming
from magicdec.errors import NonFinite
from tests.small import VOCAB, noisy_copy, open_batch, random_prompts, small_model

PROMPTS = random_prompts([20, 33])


def test_logits_behind_a_rejected_proposal_need_not_be_finite():
    target = small_model()
    plain = open_batch(target, PROMPTS).decoder.generate().tokens
    strange = min(set(range(VOCAB)).difference(*plain, *PROMPTS))  # so it is always rejected
    batch = open_batch(target, PROMPTS, draft_name="ngram", gamma=3)
    propose, logits = batch.draft.propose, target.logits

    def strange_last(state, gamma):
        proposal = propose(state, gamma)
        proposal.tokens_BG[:, -1] = strange
        return proposal

    def not_finite_last(hidden):
        found = logits(hidden)
        found[:, 3:] = float("nan")
        return found

    batch.draft.propose = strange_last
    target.logits = not_finite_last
    assert batch.decoder.generate(batch.draft).tokens == plain


def test_logits_behind_a_rejected_inner_proposal_need_not_be_finite():
    """The last proposal is always rejected, by both verifications of a hierarchical draft."""
    target = small_model()
    plain = open_batch(target, PROMPTS).decoder.generate().tokens
    strange = min(set(range(VOCAB)).difference(*plain, *PROMPTS))
    batch = open_batch(
        target,
        PROMPTS,
        draft_name="hierarchical",
        draft_model=noisy_copy(target, 0.1),
        inner=Streaming(budget=16, num_sink=2),
        inner_gamma=3,
        gamma=3,
    )
    logits = target.logits

    def with_strange_last(propose):
        def changed(state, gamma):
            proposal = propose(state, gamma)
            proposal.tokens_BG[:, -1] = strange
            return proposal

        return changed

    def not_finite_last(hidden):
        found = logits(hidden)
        found[:, 3:] = float("nan")
        return found

    inner = batch.draft.inner
    inner.propose = with_strange_last(inner.propose)
    inner.propose_first = with_strange_last(inner.propose_first)
    batch.draft.propose = with_strange_last(batch.draft.propose)
    target.logits = not_finite_last
    assert batch.decoder.generate(batch.draft).tokens == plain


def test_a_decoder_goes_on_once_the_weights_are_finite():
    """With its draft, without it, and after another prefill."""
    target = small_model()
    model = noisy_copy(target, 0.1)
    keys = {"draft_name": "model", "draft_model": model, "gamma": 3}
    batch = open_batch(target, PROMPTS, **keys)
    plain = batch.decoder.generate().tokens
    for broken, draft in ((model, batch.draft), (target, None)):
        kept = broken.embed.weight.data.clone()
        broken.embed.weight.data.fill_(float("nan"))
        with pytest.raises(NonFinite):
            batch.decoder.generate(draft)
        broken.embed.weight.data.copy_(kept)
        batch.decoder.prefill(16)
        batch.decoder.state.check_finite("in the prefill")
        assert batch.decoder.generate().tokens == plain
        assert batch.decoder.generate(batch.draft).tokens == plain


def test_a_second_prefill_is_inspected_in_all_rows():
    """In the first pass all rows have finished."""
    target = small_model()
    batch = open_batch(target, PROMPTS)
    batch.decoder.generate()
    target.embed.weight.data.fill_(float("nan"))
    batch.decoder.prefill(16)
    with pytest.raises(NonFinite, match="for token 20 of row 0, in the prefill"):
        batch.decoder.state.check_finite("in the prefill")


def test_rounds_of_more_proposals_than_a_batch_has_room_for_are_refused():
    batch = open_batch(small_model(), PROMPTS, draft_name="self", gamma=2)
    with pytest.raises(ValueError, match="gamma=9: must be at most 2"):
        batch.decoder.generate(batch.draft, gamma=9)
