"""Dynamic policies: which slots each KV head reads, against choices written out with lists."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.architectures.model_config import ModelConfig
from magicdec.attention.sdpa import SdpaAttention
from magicdec.cache.dynamic import DynamicCache
from magicdec.cache.observed import ObservedCache
from magicdec.cache.quest import Quest, QuestCache
from magicdec.cache.topk import TopK, TopKCache
from magicdec.cache.verify_guided import VerifyGuided, VerifyGuidedCache
from magicdec.config.choices import CacheSpec
from magicdec.config.registry import POLICIES
from magicdec.models.kv_cache import KVCache
from tests.small import drafting, small_model

L, B, K, H, D, S = 2, 2, 2, 4, 4, 70
CONFIG = ModelConfig(
    10, 8, 8, num_layers=L, num_heads=H, num_kv_heads=K, head_dim=D, max_position_embeddings=4096
)
HEADS = [(row, head) for row in range(B) for head in range(K)]
COUNTS = st.lists(st.integers(0, 4), min_size=B, max_size=B)
SIZES = {"budget": st.integers(4, 20), "gamma": st.integers(1, 3), "seed": st.integers(0, 99)}
SIZES |= {
    "lengths": st.lists(st.integers(1, 50), min_size=B, max_size=B),
    "window": st.none() | st.integers(2, 40),
}


def random_target(
    lengths: list[int], generator: torch.Generator, window: int | None, slots: int = S
) -> KVCache:
    """Return random entries. A window is that of the second layer, which the tests look at."""
    config = replace(CONFIG, sliding_window=window, sliding_layers=(1,) if window else ())
    target = KVCache(config, B, slots, torch.float32, "cpu")
    target.k_LBKSD.normal_(generator=generator)
    target.v_LBKSD.normal_(generator=generator)
    target.rollback(torch.tensor(lengths, dtype=torch.int32))
    return target


def read(selected_BKN: torch.Tensor, row: int, head: int) -> list[int]:
    """The slots that a KV head reads: each once."""
    slots = [int(s) for s in selected_BKN[row, head] if s >= 0]
    assert len(slots) == len(set(slots))
    return slots


def choose(cache, layer: int, q_BTHD: torch.Tensor) -> torch.Tensor:
    attention, num_new = SdpaAttention(), q_BTHD.shape[1]
    return cache.select(
        layer, q_BTHD, attention, cache.plan(attention, num_new, torch.float32)[layer]
    )


@settings(max_examples=40)
@given(**SIZES, num_new=st.integers(1, 2))
def test_topk_retains_more_attention_than_any_other_choice(
    budget, gamma, lengths, seed, window, num_new
):
    generator = torch.Generator().manual_seed(seed)
    target = random_target(lengths, generator, window)
    cache = TopKCache.build(
        CacheSpec(TopK(budget=budget), gamma, 56), target.config, B, torch.float32, "cpu", target
    )
    cache.load(target)
    q = torch.randn(B, num_new, H, D, generator=generator)
    attention = SdpaAttention()
    plan = cache.plan(attention, num_new, torch.float32)[1]
    _, scores = attention.attend_scored(q, target.k_LBKSD[1], target.v_LBKSD[1], plan)
    for row, head in HEADS:
        mass, slots = scores[row, head], read(choose(cache, 1, q), row, head)
        assert len(slots) == min(budget, lengths[row])
        assert max(slots) < lengths[row]
        # No exchange of one for one can gain anything.
        others = sorted(set(range(lengths[row])) - set(slots))
        assert not others or mass[slots].min() >= mass[others].max() - 1e-6


def quest_reads(
    keys: list, queries: list, length: int, page_size: int, num_pages: int, window: int | None
) -> set[int]:
    """Bounds of every page feature by feature, shares of every query, and the last page in any
    case: the slow twin.

    Pages of nothing that the next token sees are no candidates.
    """
    seen = range(max(0, length + 1 - window) if window else 0, length)
    pages = [range(first, min(first + page_size, length)) for first in range(0, length, page_size)]
    pages = [page for page in pages if page[-1] in seen]
    share = [0.0] * len(pages)
    for q in queries:
        bounds = [
            sum(max(q[d] * keys[slot][d] for slot in page) for d in range(D)) for page in pages
        ]
        total = sum(math.exp(bound / D**0.5) for bound in bounds)
        share = [
            s + math.exp(bound / D**0.5) / total for s, bound in zip(share, bounds, strict=True)
        ]
    share[-1] = math.inf
    chosen = sorted(range(len(pages)), key=share.__getitem__, reverse=True)[:num_pages]
    return {slot for page in chosen for slot in pages[page] if slot in seen}


@settings(max_examples=40)
@given(**SIZES, page_size=st.integers(1, 8), rounds=st.lists(COUNTS, max_size=4))
def test_quest(budget, gamma, lengths, seed, window, page_size, rounds):
    """After the prefill, and after rounds that commit some of what was verified, and write others
    over the rest.
    """
    generator = torch.Generator().manual_seed(seed)
    target = random_target(lengths, generator, window)
    spec = CacheSpec(Quest(budget=budget, page_size=page_size), gamma, 66)
    cache = QuestCache.build(spec, target.config, B, torch.float32, "cpu", target)
    cache.load(target)
    q, size = torch.randn(B, 1, H, D, generator=generator), min(page_size, budget)
    for taken in ([0] * B, *rounds):
        taken = [min(count, gamma + 1) for count in taken]
        cache.take(target, cache.length_B, torch.tensor(taken, dtype=torch.int32), gamma + 1)
        lengths = [n + c for n, c in zip(lengths, taken, strict=True)]
        for row, head in HEADS:
            keys, queries = target.k_LBKSD[1, row, head], q[row, 0].view(K, -1, D)[head].tolist()
            pages = keys[: lengths[row]].split(size)
            for bounds, name in ((cache.least_LBKPD, "amin"), (cache.largest_LBKPD, "amax")):
                expected = torch.stack([getattr(page, name)(0) for page in pages])
                assert torch.equal(bounds[1, row, head, : len(pages)], expected)
            slots = read(choose(cache, 1, q), row, head)
            assert set(slots) == quest_reads(
                keys.tolist(), queries, lengths[row], size, budget // size, window
            )
            assert len(slots) <= budget
            keys[lengths[row] :].normal_(generator=generator)


@settings(max_examples=40)
@given(**SIZES, counts=COUNTS)
def test_verify_guided(budget, gamma, lengths, seed, window, counts):
    generator = torch.Generator().manual_seed(seed)
    target, counts = random_target(lengths, generator, window), [min(c, gamma + 1) for c in counts]
    spec = CacheSpec(VerifyGuided(budget=budget), gamma, 56)
    cache = VerifyGuidedCache.build(spec, target.config, B, torch.float32, "cpu", target)
    scores = torch.rand(L, B, K, S, generator=generator)
    cache.load(target, scores)
    q = torch.zeros(B, 1, H, D)
    for taken in ([0] * B, counts):
        watched = cache.watch(target, phase=0)
        watched.scores_LBKS.copy_(scores)
        watched.attention = SdpaAttention()
        cache.take(target, cache.length_B, torch.tensor(taken, dtype=torch.int32), gamma + 1)
        lengths = [n + c for n, c in zip(lengths, taken, strict=True)]
        for row, head in HEADS:
            older = scores[1, row, head, : max(0, lengths[row] - cache.window)].tolist()
            seen = range(max(0, lengths[row] + 1 - window) if window else 0, len(older))
            top = sorted(seen, key=older.__getitem__, reverse=True)[: budget - cache.window]
            recent = range(max(0, lengths[row] - cache.window), lengths[row])
            assert set(read(choose(cache, 1, q), row, head)) == {*top, *recent}
        scores = torch.rand(L, B, K, S, generator=generator)


@pytest.mark.parametrize("num_new", [1, 2, 5])
def test_a_verification_is_scored_by_its_first_and_its_last_token(num_new):
    """A later one replaces the scores, also those of slots that it does not reach."""
    target = random_target([20, 9], torch.Generator().manual_seed(3), None)
    observed, attention = ObservedCache(target, num_layers=1), SdpaAttention()
    q = torch.randn(B, num_new, H, D, generator=torch.Generator().manual_seed(4))
    entries = target.k_LBKSD[0], target.v_LBKSD[0]
    for length in ([20, 9], [12, 6]):
        observed.rollback(torch.tensor(length, dtype=torch.int32) - num_new)
        plan, *_ = observed.plan(attention, num_new, torch.float32)
        counted_BT = torch.zeros(B, num_new, dtype=torch.bool)
        counted_BT[:, [0, -1]] = True
        out_BTHD, right = attention.attend_scored(q, *entries, plan, counted_BT)
        assert torch.equal(observed.attend(0, q, attention, plan), out_BTHD)
        reading = observed.reads(0)
        assert torch.equal(reading.counted_BT, counted_BT)
        assert reading.scores_BKS.data_ptr() == observed.scores_LBKS.data_ptr()
        assert torch.equal(observed.scores_LBKS[0, ..., : right.shape[-1]], right)
        assert not observed.scores_LBKS[0, ..., right.shape[-1] :].any()
        assert observed.reads(1).scores_BKS is None, "this layer is not observed"


def test_verify_guided_is_refreshed_every_so_many_rounds():
    batch = drafting(
        "self", small_model(), [60], policy="verify_guided", gamma=2, budget=16, refresh=3
    )
    batch.restart()
    step, cache, chosen = batch.decoder.cycle_for(batch.draft), batch.draft.cache, []
    for _ in range(7):
        step()
        chosen.append(cache.read_LBKN[..., : cache.budget - cache.window].clone())
    changes = [not torch.equal(*pair) for pair in itertools.pairwise(chosen)]
    assert changes == [False, False, True, False, False, True]


def test_verify_guided_observes_the_layers_of_a_draft_that_skips_others():
    """Two of five layers draft; the verification passes through all of them and gives the
    baseline's tokens.
    """
    target = small_model(num_layers=5)
    batch = drafting(
        "layer_skip", target, [60, 45], policy="verify_guided", num_layers=2, gamma=2, budget=16
    )
    assert batch.decoder.generate(batch.draft).tokens == batch.decoder.generate().tokens


@pytest.mark.parametrize("draft", ["self", "hierarchical"])
@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_selection_says_when_it_is_made_and_dynamic_policies_copy_nothing(draft, policy):
    batch = drafting(draft, small_model(), [40], policy=policy, gamma=2, budget=16)
    if issubclass(POLICIES[policy].work, DynamicCache):
        assert batch.draft.cache.k_LBKSD.data_ptr() == batch.decoder.cache.k_LBKSD.data_ptr()
    found = batch.draft.selection(batch.decoder.state)
    assert (found.at if found else "never") == POLICIES[policy].facts.selects


@pytest.mark.parametrize("policy", ["topk", "quest"])
def test_a_selection_is_that_of_one_draft_step(policy, monkeypatch):
    batch = drafting("self", small_model(), [40, 9], policy=policy, gamma=2, budget=16)
    batch.restart()
    chosen, cache = [], batch.draft.cache
    monkeypatch.setattr(
        cache, "select", lambda layer, q_BTHD, *_: chosen.append((layer, q_BTHD.shape))
    )
    batch.draft.selection(batch.decoder.state).run()
    assert chosen == [
        (layer, (2, 1, cache.config.num_heads, cache.config.head_dim)) for layer in range(2)
    ]


def test_a_selection_is_timed_with_the_latest_keys_as_queries(monkeypatch):
    """Those of the last committed token, repeated for the query heads of a KV head."""
    target = random_target([20, 1], torch.Generator().manual_seed(0), None)
    spec = CacheSpec(TopK(budget=8), 2, 56)
    cache = TopKCache.build(spec, target.config, B, torch.float32, "cpu", target)
    cache.load(target)
    selecting = []
    monkeypatch.setattr(cache, "select", lambda *arguments: selecting.append(arguments))
    cache.reselect(SdpaAttention())
    assert [layer for layer, *_ in selecting] == [0, 1]
    for layer, q_BTHD, _, plan in selecting:
        assert plan.num_new == q_BTHD.shape[1] == 1
        assert plan.seqlens_B.tolist() == [21, 2]
        for row, last in ((0, 19), (1, 0)):
            keys = target.k_LBKSD[layer, row, :, last].tolist()
            assert q_BTHD[row, 0].tolist() == [keys[0], keys[0], keys[1], keys[1]]


def test_verify_guided_selects_by_verifications_of_this_context_alone():
    """A new context is not refreshed by the scores of the last one. Selecting for timing is."""
    generator = torch.Generator().manual_seed(0)
    target = random_target([30, 12], generator, None)
    old, new = torch.rand(2, L, B, K, S, generator=generator)
    spec = CacheSpec(VerifyGuided(budget=8), 2, 56)
    cache, by_new = (
        VerifyGuidedCache.build(spec, target.config, B, torch.float32, "cpu", target)
        for _ in range(2)
    )
    assert (cache.read_LBKN == -1).all(), "nothing is read before the first selection"
    assert cache.num_bytes == L * B * K * (8 + 3) * 8
    watched = cache.watch(target, phase=0)
    assert cache.num_bytes == L * B * K * ((8 + 3) * 8 + S * 4)
    watched.scores_LBKS.copy_(new)
    watched.attention = SdpaAttention()
    cache.load(target, old)
    chosen = cache.read_LBKN.clone()
    cache.take(target, cache.length_B, torch.zeros(B, dtype=torch.int32), 3)
    assert torch.equal(cache.read_LBKN, chosen)
    by_new.load(target, new)
    cache.reselect(SdpaAttention())
    assert torch.equal(cache.read_LBKN.sort().values, by_new.read_LBKN.sort().values)
    assert not torch.equal(cache.read_LBKN.sort().values, chosen.sort().values)


def test_each_verification_counts_its_own_first_and_last_token():
    """Whatever the size of the one before."""
    observed = ObservedCache(random_target([20, 9], torch.Generator().manual_seed(3), None))
    for counted in ([1, 0, 0, 1], [1, 1], [1], [1, 0, 1]):
        observed.plan(SdpaAttention(), len(counted), torch.float32)
        assert observed.reads(0).counted_BT.int().tolist() == [counted] * B
