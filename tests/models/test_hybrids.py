"""Targets with recurrent layers against transformers' own `generate`, token for token in fp32."""

import random
from copy import copy
from dataclasses import replace
from functools import cache
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from magicdec.attention.cpp import CppAttention
from magicdec.commands import doctor
from magicdec.config.groups import SamplingConfig
from magicdec.config.load import compose
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.conformance.examine import both_ways
from magicdec.engine.native import warm_up
from magicdec.engine.output_audit import audit
from magicdec.errors import UserError
from magicdec.kernels.library import compiler
from magicdec.models.adapter.modules_transformer import ModulesTransformer
from magicdec.models.description import describe
from magicdec.planning.resolve import resolve
from magicdec.serving.request import Params, Request
from magicdec.serving.scheduler import Scheduler
from magicdec.serving.slots import Slots
from magicdec.verification.sampling import Sampling
from tests.checkpoints import (
    HYBRIDS,
    SIZES,
    load_model,
    load_modules,
    load_reference,
    make_checkpoint,
    written,
)
from tests.small import accepted, new_engine, open_batch, random_prompts, small_drafter

LENGTHS, NEW_TOKENS, VOCABULARY = [37, 9, 50, 2], 12, 96
ROLLBACKS = ("keep", "replay")
KEYS = {"budget": 16, "num_sink": 2, "page_size": 4, "generate_len": NEW_TOKENS}
POLICIES_OVER_STATES = [name for name in POLICIES if not POLICIES[name].facts.replays]
needs_compiler = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that makes a family's checkpoint at its first use."""

    @cache
    def folder(family: str) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp(family), family, eos_token_id=None)

    return folder


@cache
def target_of(folder: Path, rollback: str = "replay", cpp: bool = False) -> ModulesTransformer:
    target = load_modules(folder, attention=CppAttention() if cpp else None)
    assert target.config.recurrence is not None
    recurrence = replace(target.config.recurrence, rollback=rollback)
    target.config = replace(target.config, recurrence=recurrence)
    return target


@cache
def expected_of(folder: Path) -> list[list[int]]:
    return written(load_reference(folder), prompts(), NEW_TOKENS)


def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS, vocab=VOCABULARY)


@pytest.mark.parametrize(("family", "chunk"), list(zip(HYBRIDS, (16, 64, 7), strict=True)))
def test_autoregressive_tokens_are_those_of_generate(family, chunk, folders):
    batch = open_batch(target_of(folders(family)), prompts(), prefill_chunk=chunk, **KEYS)
    assert batch.decoder.generate().tokens == expected_of(folders(family))


def test_tokens_are_varied_enough_to_tell_models_apart(folders):
    rows = [tuple(row) for family in HYBRIDS for row in expected_of(folders(family))]
    assert len(set(rows)) == len(rows)
    assert sum(len(set(row)) for row in rows) / len(rows) > 4


@pytest.mark.parametrize(
    ("policy", "family", "rollback"),
    list(zip(POLICIES_OVER_STATES, cycle(HYBRIDS), cycle(ROLLBACKS), strict=False)),
)
def test_every_policy_writes_the_same_tokens(policy, family, rollback, folders):
    target = target_of(folders(family), rollback)
    batch = open_batch(target, prompts(), draft_name="self", policy=policy, gamma=3, **KEYS)
    fast, expected = batch.decoder.generate(batch.draft), expected_of(folders(family))
    assert fast.tokens == expected
    assert audit(batch.decoder, expected, fast.tokens).passed is True


@pytest.mark.parametrize("policy", POLICIES_OVER_STATES)
def test_a_budget_of_everything_accepts_everything(policy, folders):
    """Each draft step goes on with the states behind the last one, and not with the target's."""
    target, keys = target_of(folders("qwen3.5")), KEYS | {"budget": 200}
    batch = open_batch(target, prompts(), draft_name="self", policy=policy, gamma=3, **keys)
    fast = batch.decoder.generate(batch.draft)
    assert fast.tokens == expected_of(folders("qwen3.5"))
    assert (accepted(fast) == 3).all()


@pytest.mark.parametrize(
    ("family", "rollback", "gamma"),
    [
        ("qwen3-next", "keep", 4),
        ("qwen3.5", "replay", 4),
        ("qwen3.5-moe", "keep", 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in product(HYBRIDS, ROLLBACKS, (1, 4))
        ),
    ],
)
def test_rows_end_at_different_rounds_and_accept_from_0_to_gamma(family, rollback, gamma, folders):
    target = target_of(folders(family), rollback)
    batch = open_batch(target, prompts(), draft_name="self", policy="window", gamma=gamma, **KEYS)
    fast = batch.decoder.generate(batch.draft)
    assert fast.tokens == expected_of(folders(family))
    assert {0, gamma} <= {*accepted(fast).tolist()}
    rounds_B = (fast.accepted_RB >= 0).sum(0)
    assert len({*rounds_B.tolist()}) > 1


@needs_compiler
@pytest.mark.parametrize(
    "family", ["qwen3.5-moe", *(pytest.param(name, marks=pytest.mark.slow) for name in HYBRIDS)]
)
def test_kernels_for_cpus_write_the_same_tokens(family, folders):
    target = target_of(folders(family), cpp=True)
    batch = open_batch(target, prompts(), draft_name="self", policy="streaming", gamma=3, **KEYS)
    passed, plain, fast = both_ways(batch)
    assert passed
    assert plain.tokens == fast.tokens == expected_of(folders(family))


@pytest.mark.parametrize(
    ("draft", "family", "rollback"),
    list(zip(DRAFTS, cycle(HYBRIDS), cycle(ROLLBACKS), strict=False)),
)
def test_every_draft_writes_the_same_tokens(draft, family, rollback, folders, tmp_path):
    target, model = target_of(folders(family), rollback), None
    if DRAFTS[draft].facts.listens:
        model = small_drafter(draft, target, 0.0)
    elif DRAFTS[draft].facts.needs_model:
        model = load_model(make_checkpoint(tmp_path, "llama", eos_token_id=None))
    keys = KEYS | {"gamma": 3, "policy": "streaming", "num_layers": 3}
    if not DRAFTS[draft].facts.is_model:
        keys["policy"] = "full"
    batch = open_batch(target, prompts(), draft_name=draft, draft_model=model, **keys)
    fast, expected = batch.decoder.generate(batch.draft), expected_of(folders(family))
    assert fast.tokens == expected
    assert audit(batch.decoder, expected, fast.tokens).passed is True


def states_of(batch: Any) -> list[Tensor]:
    return [state.clone() for state in batch.decoder.cache.states.now]


@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_passes_over_a_prefill_leave_it_as_it_was(rollback, folders):
    """The baseline, the draft, the audit and repeats begin with the same states."""
    target, expected = target_of(folders("qwen3.5"), rollback), expected_of(folders("qwen3.5"))
    batch = open_batch(target, prompts(), draft_name="self", policy="window", gamma=3, **KEYS)
    decoder, behind_prompts = batch.decoder, states_of(batch)
    for draft in (None, batch.draft, batch.draft):
        assert decoder.generate(draft).tokens == expected
        assert audit(decoder, expected, expected).passed
        decoder.restart()
        for now, before in zip(states_of(batch), behind_prompts, strict=True):
            assert torch.equal(now, before)


@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_who_takes_over_a_prefill_holds_no_notes_of_rounds_with_another_gamma(rollback, folders):
    target, expected = target_of(folders("qwen3.5"), rollback), expected_of(folders("qwen3.5"))
    keys = KEYS | {"draft_name": "self", "policy": "window"}
    first, alone = (open_batch(target, prompts(), gamma=gamma, **keys) for gamma in (5, 2))
    for batch in (first, alone):
        batch.decoder.generate(batch.draft)
    second = new_engine(target, gamma=2, **keys).open(prompts(), cache=first.decoder.cache)
    second.decoder.resume(first.decoder.last_BE)
    assert second.decoder.generate(second.draft).tokens == expected
    held, usual = (batch.decoder.cache.states.num_bytes for batch in (second, alone))
    assert held == usual


@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_a_proposal_and_a_verification_leave_the_states_of_the_target(rollback, folders):
    target = target_of(folders("qwen3-next"), rollback)
    batch = open_batch(target, prompts(), draft_name="self", policy="window", gamma=3, **KEYS)
    decoder, draft = batch.decoder, batch.draft
    decoder.restart(draft)
    before = states_of(batch)
    for _ in range(2):
        decoder.verify(draft.propose(decoder.state, 3), decoder.cache)
        for now, then in zip(states_of(batch), before, strict=True):
            assert torch.equal(now, then)
        none_B = torch.zeros_like(decoder.state.num_tokens_B)
        decoder.cache.commit(4, none_B)
        draft.commit(none_B, 3)
    drafted = draft.cache.states.matrix_LBHKV
    assert not torch.equal(drafted, decoder.cache.states.matrix_LBHKV)


@pytest.mark.parametrize(("policy", "draft"), [("snapkv", "self"), ("pyramidkv", "layer_skip")])
def test_a_policy_that_would_run_the_prompt_again_is_refused(policy, draft, folders):
    """Also where no plan has refused it. The states behind the prompts stay as they are."""
    target, expected = target_of(folders("qwen3.5")), expected_of(folders("qwen3.5"))
    keys = KEYS | {"policy": policy, "observation_window": 257, "gamma": 3, "num_layers": 2}
    batch = open_batch(target, prompts(), draft_name=draft, **keys)
    before = states_of(batch)
    with pytest.raises(UserError, match="recurrent layers cannot go back"):
        batch.decoder.generate(batch.draft)
    for now, then in zip(states_of(batch), before, strict=True):
        assert torch.equal(now, then)
    assert batch.decoder.generate().tokens == expected


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3-next"])
def test_an_end_of_sequence_within_a_round(family, folders):
    expected = expected_of(folders(family))
    ends, target = expected[0][5], copy(target_of(folders(family)))
    target.config = replace(target.config, eos_token_ids=(ends,))
    batch = open_batch(
        target, prompts(), draft_name="self", policy="full", gamma=4, ignore_eos=False, **KEYS
    )
    cut = [row[: row.index(ends) + 1] if ends in row else row for row in expected]
    assert batch.decoder.generate(batch.draft).tokens == cut


@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_sampled_tokens_are_samples_of_the_target(rollback, folders):
    target = target_of(folders("qwen3.5"), rollback)
    keys = KEYS | {"generate_len": 60, "policy": "streaming", "gamma": 3}
    sampling = SamplingConfig(temperature=0.8)
    batch = open_batch(target, prompts(), draft_name="self", sampling=sampling, **keys)
    passed, plain, fast = both_ways(batch)
    assert passed
    assert plain.tokens != fast.tokens


@pytest.mark.parametrize(
    ("family", "draft", "rollback"),
    [
        ("qwen3.5", "self", "replay"),
        pytest.param("qwen3-next", "self", "keep", marks=pytest.mark.slow),
        pytest.param("qwen3.5", "ngram", "replay", marks=pytest.mark.slow),
    ],
)
def test_served_tokens_are_those_of_generate(family, draft, rollback, folders):
    target = target_of(folders(family), rollback)
    keys = KEYS | {"policy": "full" if draft == "ngram" else "streaming", "gamma": 3}
    engine = new_engine(target, draft, prefill_chunk=16, ignore_eos=False, **keys)
    scheduler = Scheduler(Slots(engine, 2, max(LENGTHS) + NEW_TOKENS))
    params = Params(NEW_TOKENS, Sampling(ignore_eos=True))
    requests = [Request(prompt, params) for prompt in (*prompts(), *prompts())]
    left, generator = list(requests), random.Random(0)
    while left or not scheduler.idle:
        if left and generator.random() < 0.5:
            scheduler.submit(left.pop())
        scheduler.step()
    assert [request.tokens for request in requests] == 2 * expected_of(folders(family))


@pytest.mark.parametrize(
    "lose",
    [
        lambda cache: cache.v_LBKSD[0, 1, :, 3].fill_(1.0),
        lambda cache: cache.states.marked[1][1, 0].zero_(),
        lambda cache: cache.states.marked[0][0, 2, :, -1].zero_(),
    ],
    ids=["entry", "matrix", "column"],
)
def test_the_audit_finds_what_a_prompt_has_lost(lose, folders):
    batch = open_batch(target_of(folders("qwen3-next")), prompts(), generate_len=4)
    tokens = batch.decoder.generate().tokens
    assert audit(batch.decoder, tokens, tokens).passed
    with torch.inference_mode():
        lose(batch.decoder.cache)
    lost = audit(batch.decoder, tokens, tokens)
    assert lost.passed is False
    assert lost.prompts.wrong > 0


@pytest.mark.parametrize("family", HYBRIDS)
def test_caches_take_the_bytes_that_are_declared(family, folders):
    target = target_of(folders(family))
    batch = open_batch(target, prompts(), draft_name="self", policy="window", gamma=3, **KEYS)
    cache, drafted, rows = batch.decoder.cache, batch.draft.cache, len(LENGTHS)
    assert cache.num_bytes == rows * target.config.kept_bytes(cache.capacity, 4)
    assert drafted.num_bytes == rows * drafted.spec.stored_bytes(target.config, 4, True)
    with_entries = sum(kind == "full_attention" for kind in HYBRIDS[family][1]["layer_types"])
    assert len(cache.k_LBKSD) == with_entries


WIDE = "cache.observation_window=257"


def planned(folder: Path, *keys: str) -> Any:
    fixed = ["hardware=cpu", "data=random", "draft.synthetic_acceptance=0.5", "target=custom"]
    sizes = ["batch.context_len=64", "batch.generate_len=8", "batch.size=2", "cache.budget=16"]
    return resolve(compose([*fixed, *sizes, f"target.path={folder}", *keys]))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["draft=layer_skip", "draft.num_layers=1"], "the target's first layers are recurrent"),
        *(
            ([f"cache={name}"], f"cache.policy={name} scores the context")
            for name in POLICIES
            if POLICIES[name].facts.replays
        ),
        (["cache=snapkv", WIDE], f"{WIDE}: beyond 256 tokens"),
        (["cache=verify_guided", WIDE], f"{WIDE}: beyond 256 tokens"),
        (["draft=layer_skip", "draft.num_layers=2", "cache=pyramidkv", WIDE], f"{WIDE}: beyond"),
        (
            ["draft=model", "target@draft.model=custom", "draft.model.path={folder}"],
            "draft.model: it has recurrent layers",
        ),
    ],
)
def test_what_a_plan_refuses(keys, said, folders):
    folder = folders("qwen3.5")
    plan = planned(folder, "cache=snapkv", "cache.observation_window=256")
    assert plan.target.config.recurrence is not None
    with pytest.raises(UserError, match=said):
        planned(folder, *(key.format(folder=folder) for key in keys))


@pytest.mark.parametrize(
    "model_type",
    ["kimi_linear", "nemotron_h", "olmo_hybrid", "jamba", "lfm2", "minimax"],
)
def test_other_families_are_refused_by_name(model_type):
    with pytest.raises(UserError, match=f"model_type='?{model_type}|layer_types=|not supported"):
        describe({"model_type": model_type} | SIZES, "config.json")


@pytest.mark.parametrize(
    ("given", "taken"), [("auto", "replay"), ("keep", "keep"), ("replay", "replay")]
)
def test_a_key_says_how_a_verification_is_taken_back(given, taken, folders):
    plan = planned(folders("qwen3-next"), f"target.rollback={given}")
    assert plan.target.config.recurrence.rollback == taken


def test_a_way_to_take_back_is_refused_without_recurrent_layers(tmp_path):
    folder = make_checkpoint(tmp_path, "llama")
    with pytest.raises(UserError, match=r"target.rollback=keep: .* has no recurrent layers"):
        planned(folder, "target.rollback=keep")


def test_doctor_lists_what_works(folders, capsys):
    assert doctor.main(["--model", str(folders("qwen3.5"))]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "with the context grow the entries of 2 of 4 layers" in shown
    listed = shown.split("cache policies ")[1].split(" refused ")[0].split(", ")
    assert listed == POLICIES_OVER_STATES
    assert "cache=h2o with draft=self" in shown.split(" refused ", 1)[1]


@pytest.mark.gpu
@pytest.mark.parametrize("rollback", ROLLBACKS)
@pytest.mark.parametrize("family", HYBRIDS)
def test_captured_rounds_write_the_same_tokens(family, rollback, folders):
    expected = expected_of(folders(family))
    target = load_modules(folders(family)).to("cuda")
    recurrence = replace(target.config.recurrence, rollback=rollback)
    target.config = replace(target.config, recurrence=recurrence)
    keys = KEYS | {"policy": "streaming", "gamma": 3}
    engine = new_engine(target, "self", graphs=True, **keys)
    batch = engine.open(prompts())
    batch.decoder.prefill(engine.prefill_chunk)
    warm_up(batch)
    for draft in (None, batch.draft, batch.draft):
        assert batch.decoder.generate(draft).tokens == expected
