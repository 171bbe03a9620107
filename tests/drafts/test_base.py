"""What every draft must have, what each one declares, and what it is given."""

from dataclasses import FrozenInstanceError

import pytest
import torch
from pydantic import ValidationError

from magicdec.config.choices import DraftConfig, ModelChoice
from magicdec.config.registry import DRAFTS
from magicdec.decoding.state import State
from magicdec.drafts.base import Draft, DraftSpec
from magicdec.drafts.hierarchical import Hierarchical
from magicdec.drafts.layer_skip import LayerSkip
from magicdec.drafts.mtp import MultiTokenPrediction
from magicdec.drafts.ngram import PromptLookup
from magicdec.drafts.suffix import SuffixLookup
from magicdec.errors import UserError
from magicdec.models.kv_cache import KVCache
from magicdec.verification.sampling import RowSampling
from tests.small import (
    drafting,
    new_engine,
    open_batch,
    random_prompts,
    small_block,
    small_drafter,
    small_head,
    small_model,
    small_modules,
)

METHODS = ("build", "prefill", "propose")
TARGET = small_model()


@pytest.mark.parametrize("missing", METHODS)
def test_a_draft_that_lacks_a_method_says_which(missing):
    methods = {name: lambda *_: None for name in METHODS if name != missing}
    unfinished = type("Unfinished", (Draft,), methods)
    with pytest.raises(TypeError, match=rf"abstract method '?{missing}\b"):
        unfinished()


OF_STATES = {"needs_model", "listens", "keeps_entries", "pauses"}
FACTS = {
    "dflash": OF_STATES | {"proposes_blocks"},
    "eagle3": OF_STATES,
    "mtp": OF_STATES | {"ships_with_target"},
    "model": {"needs_model", "pauses"},
    "self": {"shares_target", "is_target", "pauses"},
    "layer_skip": {"shares_target", "pauses"},
    "hierarchical": {"needs_model", "shares_target", "one_rank"},
    "ngram": {"pauses"},
    "suffix": {"pauses"},
}


@pytest.mark.parametrize("draft", FACTS)
def test_a_draft_declares_these_facts(draft):
    """All of them serve. Plans, predictions and refusals go by these facts."""
    of_all = {name for name, value in vars(DraftConfig).items() if isinstance(value, bool)}
    names = {name for name in of_all if not name.startswith("_")}
    expected = FACTS[draft] | {"serves"}
    expected |= set() if draft in ("ngram", "suffix") else {"is_model"}
    expected |= set() if draft == "hierarchical" else {"is_predicted"}
    assert {name for name in names if getattr(DRAFTS[draft].facts, name)} == expected


@pytest.mark.parametrize(
    ("facts", "key", "default", "least"),
    [
        (PromptLookup, "max_ngram", 8, 1),
        (SuffixLookup, "max_suffix", 32, 1),
        (SuffixLookup, "history", 65536, 0),
        (LayerSkip, "num_layers", 0, 0),
        (Hierarchical, "inner_gamma", 0, 0),
    ],
)
def test_a_key_has_this_default_and_this_bound(facts, key, default, least):
    assert getattr(facts(), key) == default
    assert getattr(facts(**{key: least}), key) == least
    with pytest.raises(ValidationError, match=key):
        facts(**{key: least - 1})


MODELS = {"block": small_block, "head": small_head, "modules": small_modules}
MODELS = {name: make(TARGET).config for name, make in MODELS.items()} | {"whole": TARGET.config}


@pytest.mark.parametrize(
    ("draft", "kind"),
    [("dflash", "block"), ("eagle3", "head"), ("mtp", "modules"), ("model", "whole")],
)
def test_a_draft_takes_models_of_its_own_kind(draft, kind):
    facts = DRAFTS[draft].facts
    assert {name for name, model in MODELS.items() if facts.takes(model)} == {kind}


@pytest.mark.parametrize(
    ("draft", "make"), [("dflash", small_block), ("eagle3", small_head), ("mtp", small_modules)]
)
def test_a_draft_over_states_is_one_of_its_target(draft, make):
    facts = DRAFTS[draft].facts

    def named(target):
        return facts(gamma=3, model=ModelChoice("d", architecture=make(target).config))

    named(TARGET).check(TARGET.config)
    with pytest.raises(UserError, match="made for another target: a hidden size of 64"):
        named(small_model(hidden_size=64)).check(TARGET.config)
    facts(gamma=3).check(TARGET.config)  # of a model that nothing is known about yet
    assumed = facts(gamma=3).assumed_model(TARGET.config)
    assert facts.takes(assumed)
    assert assumed.num_layers == {"dflash": 2}.get(draft, 1)


def test_a_step_runs_one_module():
    facts = MultiTokenPrediction(gamma=3)
    assert facts.step_model(small_modules(TARGET, 3).config) == small_modules(TARGET, 1).config


@pytest.mark.parametrize(("draft", "tokens"), [("self", 4), ("model", 4), ("hierarchical", 6)])
def test_a_cache_has_slots_for_all_that_a_round_may_write(draft, tokens):
    """Those of inner proposals, too. Its random numbers go by the sequence of row 0 in the run; a
    served request is the first of its batch.
    """
    settings = {"policy": "streaming", "budget": 16, "num_sink": 2, "gamma": 4, "inner_gamma": 2}
    settings |= {"draft_model": small_drafter(draft, TARGET, 0.1), "generate_len": 24}
    engine = new_engine(TARGET, draft, **settings)
    batch = engine.open(random_prompts([10, 8]), first=5)
    spec = batch.draft.cache.spec
    assert (spec.gamma, spec.max_len, spec.sequence) == (tokens, 34, 5)
    assert batch.draft.cache.capacity == 16 + tokens + 1
    served = engine.open_on(batch.decoder.state, RowSampling(2, "cpu"))
    assert served.draft.cache.spec.sequence == 0


@pytest.mark.parametrize(("trained", "is_longer"), [(33, True), (34, False)])
def test_positions_are_those_in_the_cache_where_a_sequence_outgrows_the_trained_context(
    trained, is_longer
):
    settings = {"policy": "streaming", "budget": 16, "num_sink": 2, "gamma": 4}
    settings["draft_model"] = small_model(max_position_embeddings=trained)
    batch = new_engine(TARGET, "model", generate_len=24, **settings).open(random_prompts([10, 8]))
    assert batch.draft.cache.spec.in_cache_positions == is_longer


def test_what_a_draft_is_given_stays_as_it_is():
    spec = DraftSpec(*[None] * 8)
    with pytest.raises(FrozenInstanceError):
        spec.gamma = 1


@pytest.mark.parametrize("draft", ["ngram", "suffix"])
def test_a_lookup_has_no_cache_and_no_prefill(draft):
    batch = drafting(draft, TARGET, [10, 8], gamma=3)
    lookup, cache, state = batch.draft, batch.decoder.cache, batch.decoder.state
    assert (lookup.gamma, lookup.phases, lookup.caches, lookup.cache_bytes) == (3, (1,), (), 0)
    assert (lookup.taps, lookup.heard_seconds, lookup.selection(state)) == (None, 0.0, None)
    assert lookup.watch(cache, 0) is cache
    assert lookup.pause(state).tokens_BG.shape == (2, 0)


@pytest.mark.parametrize(
    ("draft", "policy", "at"),
    [
        ("self", "streaming", None),
        ("self", "snapkv", "prefill"),
        ("eagle3", "snapkv", "prefill"),
        ("layer_skip", "h2o", "prefill"),
        ("model", "snapkv", None),  # it has no entries any more to select from
        ("model", "topk", "step"),
        ("self", "quest", "step"),
        ("self", "verify_guided", "round"),
    ],
)
@torch.inference_mode()
def test_a_selection_that_is_timed_is_one_that_decoding_makes(draft, policy, at, monkeypatch):
    settings = {"policy": policy, "budget": 16, "gamma": 3, "page_size": 4}
    batch = drafting(draft, TARGET, [40, 3], **settings)
    batch.restart()
    cache, reselected = batch.draft.cache, []
    monkeypatch.setattr(cache, "reselect", reselected.append)
    selection = batch.draft.selection(batch.decoder.state)
    assert (selection and selection.at) == at
    if selection is None:
        return
    if at == "prefill":
        before, lengths = cache.k_LBKSD.clone(), cache.length_B.tolist()
        cache.k_LBKSD.zero_()
        selection.run()
        assert torch.equal(cache.k_LBKSD, before)
        assert before.abs().max() > 0
        assert cache.length_B.tolist() == lengths
    else:
        selection.run()
    assert len(reselected) == (at != "prefill")


def texts(state: State) -> list[list[int]]:
    pairs = zip(state.tokens_BS.tolist(), state.num_tokens_B.tolist(), strict=True)
    return [row[:count] for row, count in pairs]


@pytest.mark.parametrize(
    ("draft", "policy"),
    [
        ("self", "streaming"),
        ("self", "snapkv"),
        ("layer_skip", "full"),
        ("model", "full"),
        ("model", "streaming"),
        ("eagle3", "streaming"),
        ("mtp", "full"),
        ("dflash", "full"),
        ("ngram", "full"),
        ("suffix", "full"),
    ],
)
@torch.inference_mode()
def test_after_rounds_without_proposals_a_draft_proposes_as_behind_a_prompt(draft, policy):
    """The same tokens as a batch whose prompts are all that was written, over a budget of
    everything.
    """
    settings = {"gamma": 3, "policy": policy, "budget": 64, "num_sink": 2}
    paused = drafting(draft, TARGET, [20, 3, 33], **settings)
    paused.restart()
    for _ in range(3):
        paused.decoder.round(paused.draft, 0, 0)
    written = texts(paused.decoder.state)
    assert [len(text) for text in written] == [24, 7, 37]
    prompts, model = [text[:-1] for text in written], small_drafter(draft, TARGET, 0.15)
    fresh = open_batch(TARGET, prompts, draft_name=draft, draft_model=model, **settings)
    fresh.restart()
    assert texts(fresh.decoder.state) == written
    proposals = []
    for batch in (paused, fresh):
        batch.draft.prepare(batch.decoder.state, 3)
        proposals.append(batch.draft.propose(batch.decoder.state, 3))
    assert proposals[0].q_BGV is None
    assert proposals[0].tokens_BG.shape == (3, 3)
    assert torch.equal(proposals[0].tokens_BG, proposals[1].tokens_BG)


@torch.inference_mode()
def test_a_token_beyond_the_drafts_vocabulary_is_read_as_its_last_one():
    """Of 56 tokens here; the target's are 61."""
    model = small_model(1, vocab_size=56)
    prompts = [[3, 60, 55, 54, 57, 0, 9], [58, 1]]
    batch = open_batch(
        TARGET, prompts, draft_name="model", draft_model=model, policy="full", gamma=2
    )
    batch.restart()
    for row, read in enumerate([[3, 55, 55, 54, 55, 0], [55]]):
        alone = KVCache(model.config, 1, len(read), torch.float32, "cpu")
        model(torch.tensor([read]), alone)
        assert int(batch.draft.cache.length_B[row]) == len(read)
        torch.testing.assert_close(
            batch.draft.cache.k_LBKSD[:, row, :, : len(read)], alone.k_LBKSD[:, 0]
        )


@pytest.mark.parametrize("lengths", [[1, 1], [2, 1], [2, 2]])
def test_a_model_can_draft_behind_prompts_of_one_or_two_tokens(lengths):
    """Before the first round its cache lacks the last prompt token and the first new one."""
    settings = {"draft_name": "model", "draft_model": TARGET, "gamma": 3, "policy": "full"}
    batch = open_batch(TARGET, random_prompts(lengths), **settings)
    batch.restart()
    assert batch.draft.cache.length_B.tolist() == [length - 1 for length in lengths]
    accepted_RB = batch.decoder.generate(batch.draft).accepted_RB
    assert (accepted_RB[accepted_RB >= 0] == 3).all()
