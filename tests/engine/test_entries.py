"""The prompts' entries: faults that the audit finds wherever they are, clean ones that it passes,
and what decoding, profile, warm-up and audit leave behind.
"""

import hashlib
from collections.abc import Callable
from itertools import product

import pytest
import torch

from magicdec.attention.cpp import CppAttention
from magicdec.attention.sdpa import SdpaAttention
from magicdec.config import choices
from magicdec.engine import prompt_audit
from magicdec.engine.decoder import Decoder
from magicdec.engine.native import warm_up
from magicdec.engine.output_audit import audit
from magicdec.engine.prompt_audit import MAX_ERROR, check_prompts
from magicdec.kernels.library import compiler
from magicdec.measure.round_profile import profile_round
from magicdec.models.kv_cache import KVCache
from tests.small import CROSS, drafting, new_engine, open_batch, random_prompts, small_model

LENGTHS = (60, 75, 90, 110)
DTYPES = [torch.float32, torch.bfloat16]
NEEDS_CPP = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
BACKENDS = [SdpaAttention, pytest.param(CppAttention, marks=NEEDS_CPP)]


def zeroed(entries_LBKSD, first):
    entries_LBKSD[:, :, :, first : first + 10] = 0


def swapped(entries_LBKSD, first):
    entries_LBKSD[:, :, :, [first, first + 7]] = entries_LBKSD[:, :, :, [first + 7, first]]


def shifted(entries_LBKSD, first):
    entries_LBKSD[:, :, :, first : first + 20] = entries_LBKSD[
        :, :, :, first + 1 : first + 21
    ].clone()


FAULTS = [zeroed, swapped, shifted]
PLACES: dict[str, Callable[[int, int], tuple[slice, slice]]] = {  # which layers and rows
    "one row": lambda layer, row: (slice(None), slice(row, row + 1)),
    "one layer": lambda layer, row: (slice(layer, layer + 1), slice(None)),
    "one row of one layer": lambda layer, row: (slice(layer, layer + 1), slice(row, row + 1)),
}


def prefilled(seed: int, dtype=torch.float32, backend=SdpaAttention) -> Decoder:
    """A batch on a model of its own, whose prompts are prefilled."""
    target = small_model(seed, num_layers=3, hidden_size=64, intermediate_size=128, head_dim=16).to(
        dtype
    )
    target.attention = backend()
    return open_batch(target, random_prompts(LENGTHS, seed)).decoder


def faulty(seed: int, fault, place: str, dtype) -> Decoder:
    """A batch with a fault in keys and values of the prompts; the place changes with the seed."""
    decoder = prefilled(seed, dtype)
    layers, rows = PLACES[place](seed % 3, seed % 4)
    for cached in (decoder.cache.k_LBKSD, decoder.cache.v_LBKSD):
        fault(cached[layers, rows], 5 + seed)
    return decoder


@pytest.mark.parametrize("dtype", DTYPES)
def test_prompts_without_a_fault_pass(dtype):
    assert not any(check_prompts(prefilled(seed, dtype)).wrong for seed in range(2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("fault", "place"), list(product(FAULTS, PLACES)))
def test_faults_of_the_prompts_are_found(fault, place, dtype):
    assert all(check_prompts(faulty(seed, fault, place, dtype)).wrong for seed in range(3))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("fault", "place"), list(product(FAULTS, PLACES)))
def test_faults_of_the_prompts_are_found_20_times_of_20(fault, place, dtype):
    assert [check_prompts(faulty(seed, fault, place, dtype)).wrong > 0 for seed in range(20)].count(
        True
    ) == 20


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_clean_prompts_never_fail(dtype, backend):
    """50 runs of each kind, 200 in all, stay below a quarter of the largest error that is
    allowed.
    """
    worst = max(
        check_prompts(prefilled(seed, dtype, backend), seed).max_error for seed in range(50)
    )
    assert worst < MAX_ERROR[dtype] / 4


@torch.inference_mode()
def lose(decoder: Decoder) -> None:
    """Lose a part of the prompts for good: the last token reads the wrong entries, as later chunks
    would.
    """
    for cached in (decoder.cache.k_LBKSD, decoder.cache.v_LBKSD):
        zeroed(cached, 20)
    decoder.cache.rollback(decoder.state.prompt_len_B - 1)
    last_B1 = decoder.state.tokens_BS.gather(1, decoder.state.prompt_len_B.long()[:, None] - 1)
    decoder.resume(decoder.target(last_B1, decoder.cache)[:, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_entries_that_were_lost_before_the_first_token_fail_the_audit(dtype):
    """Both outputs agree, and with what the audit reads again."""
    decoder = prefilled(0, dtype)
    plain = decoder.generate().tokens
    assert audit(decoder, plain, plain).passed
    lose(decoder)
    plain = decoder.generate().tokens
    found = audit(decoder, plain, plain)
    assert found.speculative.outside == found.different == 0
    assert found.passed is False
    assert "prompt tokens" in found.verdict[1]


def test_a_last_hidden_state_that_is_not_the_targets_is_found():
    decoder = prefilled(0)
    decoder.last_BE = decoder.last_BE.roll(1, 0)
    assert check_prompts(decoder).wrong == len(LENGTHS)


def test_many_tokens_are_sampled_at_other_places_in_every_row(monkeypatch):
    """Every stride of 4 holds a token of every row, and the four rows cover all places. In the
    first layer all are compared.
    """
    monkeypatch.setattr(prompt_audit, "FEWEST", 1)
    monkeypatch.setattr(prompt_audit, "SHARE", 4)
    target, length = small_model(), 64
    decoder = open_batch(target, random_prompts([length] * 4)).decoder
    _, checked_BS = prompt_audit.errors(decoder, seed=3)
    by_stride_BIS = checked_BS[:, : length - 4].unflatten(1, (-1, 4))
    assert (by_stride_BIS.sum(2) == 1).all()
    assert (by_stride_BIS.sum(0) == 1).all()
    assert check_prompts(decoder).checked <= 4 * (length // 4 + 1)
    row, place = (~checked_BS[:, :length]).nonzero()[20].tolist()
    decoder.cache.k_LBKSD[0, row, :, place] = 0
    error_BS, _ = prompt_audit.errors(decoder, seed=3)
    assert error_BS[row, place] > 0.5
    assert not error_BS[torch.arange(4) != row].gt(0.01).any()


def test_windows_and_rows_of_any_length_are_computed_as_the_prefill_does():
    target = small_model(sliding_window=12, sliding_layers=(0,), qk_norm=True, qkv_bias=True)
    decoder = open_batch(target, random_prompts([1, 2, 30, 90])).decoder
    found = check_prompts(decoder)
    assert (found.checked, found.wrong) == (123, 0)
    assert found.max_error < 1e-4


def entries_hash(cache: KVCache, lengths: list[int]) -> str:
    """Return a hash of the prompts' entries, bit by bit."""
    digest = hashlib.sha256()
    for row, length in enumerate(lengths):
        for cached in (cache.k_LBKSD, cache.v_LBKSD):
            digest.update(
                cached[:, row, :, :length].contiguous().view(torch.uint8).numpy().tobytes()
            )
    return digest.hexdigest()


@pytest.mark.parametrize(("draft", "policy"), CROSS)
def test_the_prompts_entries_stay_as_they_are(draft, policy, monkeypatch):
    """Without a warm-up before it, too, and with several gammas. The next job on these entries
    writes the same.
    """
    monkeypatch.setattr(choices, "AUTO_GAMMAS", (1, 3))
    lengths, target = [30, 44], small_model()
    batch = drafting(
        draft, target, lengths, gamma="auto", policy=policy, budget=40, num_sink=2, generate_len=12
    )
    decoder = batch.decoder
    before, last_BE = entries_hash(decoder.cache, lengths), decoder.last_BE.clone()
    plain = decoder.generate()
    fast = decoder.generate(batch.draft)
    fixed = decoder.generate(batch.draft, gamma=3)
    assert entries_hash(decoder.cache, lengths) == before
    warm_up(batch)
    assert entries_hash(decoder.cache, lengths) == before
    assert audit(decoder, plain.tokens, fast.tokens).passed
    assert entries_hash(decoder.cache, lengths) == before
    profile_round(batch, 2, 3)
    assert entries_hash(decoder.cache, lengths) == before
    assert torch.equal(decoder.last_BE, last_BE)
    again = (
        new_engine(target, generate_len=12).open(random_prompts(lengths), 0, decoder.cache).decoder
    )
    again.resume(last_BE)
    assert again.generate().tokens == plain.tokens == fast.tokens == fixed.tokens


@NEEDS_CPP
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_audit_in_cpp_leaves_no_trace(dtype):
    decoder = prefilled(1, dtype, CppAttention)
    before = entries_hash(decoder.cache, list(LENGTHS))
    plain = decoder.generate().tokens
    audit(decoder, plain, plain)
    assert entries_hash(decoder.cache, list(LENGTHS)) == before


@pytest.mark.parametrize("gamma", [2, "auto"])
def test_no_round_of_a_draft_runs_before_its_prefill(gamma):
    """Neither a round itself nor one of a cycle that was made for an earlier pass."""
    batch = drafting("self", small_model(), [30, 44], gamma=gamma, policy="full")
    decoder, draft = batch.decoder, batch.draft
    with pytest.raises(RuntimeError, match="not prefilled"):
        decoder.round(draft, 2, 0)
    cycle = decoder.cycle_for(draft)
    cycle()  # whoever makes it first prefills the draft
    decoder.restart()
    with pytest.raises(RuntimeError, match="not prefilled"):
        cycle()
    decoder.restart(draft)
    cycle()
