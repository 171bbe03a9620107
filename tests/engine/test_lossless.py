"""The losslessness matrix: speculative output equals autoregressive output, token for token, in
fp32.

Every registered draft and cache policy is a part of it; a new one joins by being registered.
"""

import functools
import itertools

import pytest
import torch

from magicdec.attention.base import Attention
from magicdec.attention.sdpa import SdpaAttention
from magicdec.cache.streaming import Streaming
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.conformance.examine import both_ways
from magicdec.engine.decoder import Generation
from magicdec.engine.output_audit import audit
from magicdec.verification.sampling import Sampling
from tests.small import (
    CROSS,
    PAIRS,
    VOCAB,
    accepted,
    as_on_cpus,
    drafting,
    new_engine,
    noisy_copy,
    open_batch,
    random_prompts,
    small_model,
)

TARGET = as_on_cpus(small_model())
GAMMAS, BATCHES, BUDGETS = (1, 2, 5, 8), (1, 3, 8), (12, 40, 400)
# Every gamma meets every batch size and every budget, and every batch size meets every budget: a
# third of all combinations.
MET = [
    (gamma, rows, BUDGETS[(i + j) % len(BUDGETS)])
    for i, gamma in enumerate(GAMMAS)
    for j, rows in enumerate(BATCHES)
]
# Of each pair, every gamma with a number of rows that changes along is marked slow; the others are
# a soak.
WHOLE = [
    pytest.param(*pair, *sizes, marks=pytest.mark.slow if (i + j) % 3 == 0 else pytest.mark.soak)
    for i, pair in enumerate(PAIRS)
    for j, sizes in enumerate(MET)
]
# For every run, each pair with sizes that change along, and with the smallest valid budget, one
# more than gamma.
SIZES = list(itertools.product((1, 3, 3, 8), (12, 40), GAMMAS))
SAMPLE = [
    (*pair, gamma, rows, budget)
    for pair, (rows, budget, gamma) in zip(PAIRS, itertools.cycle(SIZES[::5]))
]
SMALLEST = [
    (*pair, gamma, rows, gamma + 1)
    for pair, (gamma, rows) in zip(PAIRS, itertools.cycle([(3, 2), (5, 1)]))
]


def lengths_of(rows: int) -> list[int]:
    return [50 + 7 * row for row in range(rows)]


@functools.cache
def plain_tokens(rows: int, seed: int, attention: type[Attention], **settings) -> list[list[int]]:
    """What the target writes alone: the same for every draft, policy and budget."""
    batch = open_batch(TARGET, random_prompts(lengths_of(rows), seed), **settings)
    return batch.decoder.generate().tokens


def check(draft: str, policy: str, gamma: int, rows: int, budget: int, **settings) -> Generation:
    """Decode speculatively, check that the tokens are the target's, and return what was decoded."""
    expected = plain_tokens(rows, gamma, type(TARGET.attention), **settings)
    settings |= {"gamma": gamma, "policy": policy, "budget": budget, "num_sink": 2}
    batch = drafting(draft, TARGET, lengths_of(rows), seed=gamma, **settings)
    fast = batch.decoder.generate(batch.draft)
    assert audit(batch.decoder, expected, fast.tokens).passed is True
    return fast


@pytest.mark.parametrize(("draft", "policy", "gamma", "rows", "budget"), SAMPLE + SMALLEST)
def test_sampled_matrix(draft, policy, gamma, rows, budget):
    fast = check(draft, policy, gamma, rows, budget, generate_len=16)
    assert all(len(row) == 16 for row in fast.tokens)


@pytest.mark.parametrize(
    ("draft", "policy", "gamma", "rows", "budget"), [each for each in SAMPLE if each[:2] in CROSS]
)
def test_sampled_matrix_by_the_reference(draft, policy, gamma, rows, budget, monkeypatch):
    """Use PyTorch's attention, and a call for each operator, as on GPUs."""
    monkeypatch.setattr(TARGET, "attention", SdpaAttention())
    check(draft, policy, gamma, rows, budget, generate_len=16)


@pytest.mark.parametrize(("draft", "policy", "gamma", "rows", "budget"), WHOLE)
def test_whole_matrix(draft, policy, gamma, rows, budget, monkeypatch):
    monkeypatch.setattr(TARGET, "attention", SdpaAttention())
    check(draft, policy, gamma, rows, budget)


@pytest.mark.parametrize("draft", ["self", "model", "mtp", "dflash"])
def test_end_of_sequence_in_the_middle_of_a_round(draft):
    """Rows stop at their own end of sequence, the others go on, and both ways agree."""
    lengths = [30, 41, 52, 33]
    plain = open_batch(TARGET, random_prompts(lengths)).decoder.generate().tokens
    eos = plain[0][7]  # a token that row 0 writes in the middle
    target = as_on_cpus(small_model(eos_token_ids=(eos,)))
    batch = drafting(draft, target, lengths, 0.1, gamma=5, policy="full", ignore_eos=False)
    stopped, fast = batch.decoder.generate(), batch.decoder.generate(batch.draft)
    expected = [row[: row.index(eos) + 1] if eos in row else row for row in plain]
    assert stopped.tokens == expected
    assert fast.tokens == expected


@pytest.mark.parametrize("budget", [64 + 24, 10_000])
@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_budget_of_everything_accepts_everything(policy, budget):
    """The longest sequence of three rows exactly, and more than that."""
    fast = check("self", policy, 4, 3, budget=budget)
    assert (accepted(fast) == 4).all()


@pytest.mark.parametrize(
    ("draft", "policy"),
    [pair for pair in PAIRS if pair[0] in ("self", "model", "hierarchical") and pair[1] != "full"],
)
@pytest.mark.parametrize(("layers", "budget"), [((0, 1), 40), ((1,), 400)])
def test_a_draft_that_sees_what_a_target_with_a_sliding_window_sees_is_always_right(
    draft, policy, layers, budget
):
    """The budget holds the window, or everything where a layer has none; a draft model has the
    target's weights.
    """
    target = as_on_cpus(small_model(sliding_window=16, sliding_layers=layers))
    settings = {
        "policy": policy,
        "budget": budget,
        "num_sink": 2,
        "page_size": 4,
        "bits": 8,
        "generate_len": 15,
    }
    if draft == "hierarchical":
        settings |= {"inner": Streaming(budget=budget, num_sink=2)}
    model = target if DRAFTS[draft].facts.needs_model else None
    prompts = random_prompts([90, 80, 50])
    batch = open_batch(target, prompts, draft_name=draft, draft_model=model, gamma=4, **settings)
    plain, fast = batch.decoder.generate(), batch.decoder.generate(batch.draft)
    assert fast.tokens == plain.tokens
    assert (
        accepted(fast).float().mean() > 3.5
        if policy == "quantized"
        else (accepted(fast) == 4).all()
    )


def test_in_cache_positions_go_with_a_sliding_window():
    target = small_model(sliding_window=16, sliding_layers=(0, 1))
    draft = small_model(sliding_window=16, sliding_layers=(0, 1), max_position_embeddings=64)
    settings = {
        "draft_name": "model",
        "draft_model": draft,
        "policy": "streaming",
        "budget": 40,
        "num_sink": 2,
    }
    batch = open_batch(target, random_prompts([120, 110, 70]), gamma=4, **settings)
    assert batch.draft.cache.spec.in_cache_positions
    assert (accepted(batch.decoder.generate(batch.draft)) == 4).all()


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("draft", list(DRAFTS))
def test_the_shortest_prompts(draft, length):
    batch = drafting(
        draft, TARGET, [length, 5], 0.2, gamma=3, policy="streaming", budget=8, num_sink=2
    )
    assert batch.decoder.generate().tokens == batch.decoder.generate(batch.draft).tokens


def test_a_draft_may_be_used_beyond_its_trained_context():
    """In-cache positions: a draft trained for 24 tokens never sees a larger distance, and stays
    lossless.
    """
    draft = noisy_copy(small_model(max_position_embeddings=24), 0.1)
    settings = {"gamma": 3, "policy": "streaming", "budget": 12, "num_sink": 2}
    batch = open_batch(
        TARGET, random_prompts([90, 70]), draft_name="model", draft_model=draft, **settings
    )
    assert batch.draft.cache.spec.in_cache_positions
    assert batch.draft.chunk == 12  # behind a budget of 12
    assert batch.decoder.generate().tokens == batch.decoder.generate(batch.draft).tokens


@pytest.mark.parametrize("budget", [400, 508, 512, 600])
def test_a_large_budget_leaves_the_prefill_chunk_as_it_is(budget):
    """Sequences that fit into the draft's trained context of 512 tokens keep their positions in
    chunks of any size.
    """
    settings = {"gamma": 3, "policy": "streaming", "budget": budget, "num_sink": 2}
    batch = open_batch(
        TARGET, random_prompts([50, 60]), draft_name="model", draft_model=TARGET, **settings
    )
    chunks = []
    batch.decoder.restart()
    batch.draft.prefill(batch.decoder.state, chunks.append)
    assert chunks == [16, 16, 16, 11]
    assert (accepted(batch.decoder.generate(batch.draft)) == 3).all()


def test_sampling_is_reproducible_and_lossless_where_the_draft_is_the_target():
    """With the target as its own draft over a full cache every proposal is accepted at temperature
    1, too.
    """
    sampling = Sampling(temperature=1.0, seed=4)
    prompts = random_prompts([30, 44])
    batch = open_batch(
        TARGET, prompts, sampling=sampling, draft_name="self", gamma=3, policy="full"
    )
    first, second = batch.decoder.generate(batch.draft), batch.decoder.generate(batch.draft)
    assert first.tokens == second.tokens
    assert (accepted(first) == 3).all()
    other = open_batch(
        TARGET, prompts, sampling=Sampling(temperature=1.0, seed=5)
    ).decoder.generate()
    assert other.tokens != batch.decoder.generate().tokens


@pytest.mark.parametrize("draft", ["none", "self"])
def test_a_prompt_draws_the_same_random_numbers_in_batches_of_any_size(draft):
    """The same prompt again and again: no two sequences of a run may share their numbers."""
    sampling, prompts = Sampling(temperature=1.0), random_prompts([30]) * 6
    options = {
        "draft_name": draft,
        "policy": "streaming",
        "budget": 12,
        "gamma": 3,
        "sampling": sampling,
    }
    engine, runs = new_engine(TARGET, **options), []
    for size in (6, 2, 3):
        batches = [engine.open(prompts[start : start + size], start) for start in range(0, 6, size)]
        for batch in batches:
            batch.decoder.prefill(16)
        runs.append(
            [row for batch in batches for row in batch.decoder.generate(batch.draft).tokens]
        )
    assert len(set(map(tuple, runs[0]))) == 6
    assert runs[0] == runs[1] == runs[2]


def test_batches_of_a_run_draw_synthetic_outcomes_of_their_own():
    engine = new_engine(TARGET, draft_name="self", policy="full", gamma=4, synthetic_acceptance=0.7)
    found = []
    for first in (0, 8):
        batch = engine.open(random_prompts([40] * 8), first)
        batch.decoder.prefill(16)
        found.append(batch.decoder.generate(batch.draft).accepted_RB[:4])
    assert not torch.equal(*found)


def test_the_state_counts_what_the_rounds_say():
    """Both passes keep their counts, although the second one counts into the same buffers on the
    device.
    """
    settings = {"gamma": 4, "policy": "streaming", "budget": 12, "num_sink": 2}
    passed, plain, fast = both_ways(drafting("model", TARGET, lengths_of(3), **settings))
    assert passed
    assert (plain.committed_RB == 1).all()
    assert (plain.accepted_RB == 0).all()
    for one in (plain, fast):
        assert torch.equal(
            one.committed_RB.sum(0) + 1, torch.tensor([len(row) for row in one.tokens])
        )
        assert len(one.round_seconds) == len(one.accepted_RB)


def caches_of(draft):
    """Every cache of a draft, those of its levels and of a draft within it included."""
    for one in (draft, getattr(draft, "inner", None)):
        if hasattr(one, "cache"):
            yield from getattr(one.cache, "levels", [one.cache])


def disturb(batch):
    """Write noise behind everything that is valid."""
    decoder, state = batch.decoder, batch.decoder.state
    behind_BS = torch.arange(state.tokens_BS.shape[1]) >= state.num_tokens_B[:, None]
    state.tokens_BS[behind_BS] = torch.randint(VOCAB, (int(behind_BS.sum()),))
    for cache in (decoder.cache, *caches_of(batch.draft)):
        behind_BKSD = (torch.arange(cache.capacity) >= cache.seqlens_B[:, None])[:, None, :, None]
        for entries_LBKSD in (cache.k_LBKSD, cache.v_LBKSD):
            entries_LBKSD.masked_fill_(behind_BKSD, 100.0)


@pytest.mark.parametrize(("draft", "policy"), CROSS)
@torch.inference_mode()
def test_a_pass_reads_only_what_it_has_written_itself(draft, policy):
    """A pass of a fresh batch proposes what another one does after an autoregressive pass and with
    noise around.
    """
    settings = {
        "budget": 16,
        "num_sink": 2,
        "generate_len": 8,
        "sampling": Sampling(temperature=0.7, seed=1),
    }
    batch = drafting(draft, TARGET, [40, 3, 25], 0.3, gamma=8, policy=policy, **settings)
    propose, proposals = batch.draft.propose, []
    batch.draft.propose = lambda *a: (proposals.append(propose(*a)), proposals[-1])[1]
    accepted_RB, expected = batch.decoder.generate(batch.draft).accepted_RB, proposals.copy()
    batch.decoder.generate()
    batch.restart()
    for proposal in expected:
        disturb(batch)
        batch.decoder.cycle_for(batch.draft)()
        assert torch.equal(proposals[-1].tokens_BG, proposal.tokens_BG)
        assert proposal.q_BGV is None or torch.equal(proposals[-1].q_BGV, proposal.q_BGV)
    assert torch.equal(batch.decoder.state.accepted_RB[: len(expected)], accepted_RB)


def test_a_new_pass_clears_the_tokens_of_the_last_one():
    batch = open_batch(TARGET, random_prompts([20, 31]))
    batch.decoder.generate()
    batch.decoder.restart()
    state = batch.decoder.state
    for tokens, length in zip(state.tokens_BS, state.num_tokens_B.tolist(), strict=True):
        assert tokens[length - 1] != 0
        assert (tokens[length:] == 0).all()


@pytest.mark.parametrize("padded", [VOCAB - 5, VOCAB + 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_vocabularies_may_be_padded_to_different_sizes(padded, temperature):
    """The models' logits differ in number; tokens stay within the target's."""
    settings = {
        "draft_name": "model",
        "draft_model": small_model(1, vocab_size=padded),
        "gamma": 3,
        "policy": "full",
    }
    prompts = random_prompts([30, 21], vocab=VOCAB - 5)
    batch = open_batch(TARGET, prompts, sampling=Sampling(temperature=temperature), **settings)
    tokens = batch.decoder.generate(batch.draft).tokens
    assert all(0 <= t < VOCAB for row in tokens for t in row)
