"""Policies that choose by attention, against lists: for given scores, exactly these tokens are
kept.

Every key carries its token's number, so that a test can read from a cache which tokens each KV head
holds.
"""

import itertools
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.architectures.model_config import ModelConfig
from magicdec.cache.h2o import H2O, H2OCache
from magicdec.cache.pyramidkv import PyramidKV, PyramidKVCache
from magicdec.cache.snapkv import SnapKV, SnapKVCache
from magicdec.config.choices import CacheSpec
from magicdec.decoding.scoring import score
from magicdec.models.kv_cache import KVCache
from tests.small import random_prompts, small_model

L, B, K, S = 3, 2, 2, 60
CONFIG = ModelConfig(
    10, 8, 8, num_layers=L, num_heads=4, num_kv_heads=K, head_dim=2, max_position_embeddings=4096
)


def filled(lengths: list[int]) -> KVCache:
    """A target's cache in which every slot's key is the number of its position."""
    cache = KVCache(CONFIG, B, S, torch.float32, "cpu")
    cache.k_LBKSD.copy_(torch.arange(S)[:, None].expand(S, 2))
    cache.v_LBKSD.copy_(-cache.k_LBKSD)
    cache.rollback(torch.tensor(lengths, dtype=torch.int32))
    return cache


def held(cache: KVCache, layer: int, row: int, head: int) -> list[int]:
    count = int(cache.seqlens_B[row])
    keys = cache.k_LBKSD[layer, row, head, :count, 0]
    values = cache.v_LBKSD[layer, row, head, :count, 0]
    assert torch.equal(keys, -values)
    return [int(x) for x in keys]


def propose(cache: KVCache, lengths: list[int], num_new: int) -> None:
    """Append proposals, marked by negative keys that must never be kept."""
    slots, new = cache.slots_BT(num_new), torch.full((B, num_new, K, 2), -7.0)
    assert cache.positions_BT(num_new)[:, 0].tolist() == lengths
    for layer in range(L):
        cache.place(layer, slots).write(new, -new)
    cache.advance(num_new)


def pooled(scores: list[float], kernel: int) -> list[float]:
    """Return the mean over neighbours, with 0 outside of the sequence."""
    half = kernel // 2
    return [sum(scores[max(0, i - half) : i + half + 1]) / kernel for i in range(len(scores))]


def snapkv_keeps(
    scores: list[float],
    prompt: int,
    length: int,
    budget: int,
    window: int,
    kernel: int,
    first: int = 0,
) -> set[int]:
    """SnapKV, the slow and obvious way. A row that fitted at first keeps its first tokens. Tokens
    before the `first` that is seen come last.
    """
    if length <= budget:
        return set(range(length))
    fixed = range(budget - window)
    if prompt > budget:
        prefix = pooled(scores[: prompt - window], kernel)
        worth = [(token >= first, mean) for token, mean in enumerate(prefix)]
        fixed = sorted(range(len(prefix)), key=worth.__getitem__)[len(prefix) - (budget - window) :]
    return set(fixed) | set(range(length - window, length))


def equally_good(got: list[int], expected: set[int], scores: list[float], kernel: int) -> bool:
    """The same tokens, or others with the same pooled scores: near its end a short prefix has
    ties.
    """
    means = pooled(scores, kernel)
    other, missed = set(got) - expected, expected - set(got)
    return (
        len(got) == len(expected)
        and abs(sum(means[t] for t in other) - sum(means[t] for t in missed)) < 1e-5
    )


COUNTS = st.lists(st.integers(0, 4), min_size=B, max_size=B)
CASES = {"budget": st.integers(4, 20), "gamma": st.integers(1, 3), "seed": st.integers(0, 99)}
CASES |= {
    "prompts": st.lists(st.integers(1, 40), min_size=B, max_size=B),
    "rounds": st.lists(COUNTS, max_size=4),
}
OBSERVED = CASES | {"observation_window": st.integers(1, 12), "kernel": st.sampled_from([1, 3, 5])}


@settings(max_examples=60)
@given(**OBSERVED)
def test_snapkv(budget, gamma, prompts, rounds, observation_window, kernel, seed):
    spec = CacheSpec(
        SnapKV(budget=budget, observation_window=observation_window, kernel=kernel), gamma, 58
    )
    scores = torch.rand(L, B, K, S, generator=torch.Generator().manual_seed(seed))
    target, cache = filled(prompts), SnapKVCache.build(spec, CONFIG, B, torch.float32, "cpu", None)
    cache.load(target, scores)
    lengths, window = list(prompts), max(min(observation_window, (budget + 1) // 2), gamma + 1)
    for counts in [[0] * B, *rounds]:
        propose(cache, lengths, gamma)
        counts = torch.tensor([min(c, gamma + 1) for c in counts], dtype=torch.int32)
        cache.take(target, cache.length_B, counts, gamma + 1)
        lengths = [n + c for n, c in zip(lengths, counts.tolist(), strict=True)]
        for layer, row, head in torch.cartesian_prod(
            torch.arange(L), torch.arange(B), torch.arange(K)
        ).tolist():
            own = scores[layer, row, head].tolist()
            expected = snapkv_keeps(own, prompts[row], lengths[row], budget, window, kernel)
            got = held(cache, layer, row, head)
            assert equally_good(
                got, expected, own[: max(0, prompts[row] - window)] + [0.0] * S, kernel
            )


@settings(max_examples=40)
@given(**OBSERVED)
def test_pyramidkv_is_snapkv_with_a_budget_per_layer(
    budget, gamma, prompts, rounds, observation_window, kernel, seed
):
    spec = CacheSpec(
        PyramidKV(budget=budget, observation_window=observation_window, kernel=kernel, beta=4),
        gamma,
        58,
    )
    scores = torch.rand(L, B, K, S, generator=torch.Generator().manual_seed(seed))
    target = filled(prompts)
    cache = PyramidKVCache.build(spec, CONFIG, B, torch.float32, "cpu", None)
    cache.load(target, scores)
    window = cache.settings.window(spec)
    assert window == min(max(min(observation_window, (budget + 1) // 2), gamma + 1), budget)
    budgets = cache.settings.budgets(spec, L)
    assert [level.budget for level in cache.levels] == budgets
    for layer, row, head in torch.cartesian_prod(
        torch.arange(L), torch.arange(B), torch.arange(K)
    ).tolist():
        own = scores[layer, row, head].tolist()
        expected = snapkv_keeps(own, prompts[row], prompts[row], budgets[layer], window, kernel)
        got = held(cache.levels[layer], 0, row, head)
        assert equally_good(got, expected, own[: max(0, prompts[row] - window)] + [0.0] * S, kernel)
    assert cache.positions_BT(1)[:, 0].tolist() == prompts
    assert cache.committed_slots_B.tolist() == [min(n, max(budgets)) for n in prompts]


def test_a_pyramid_reads_the_source_that_it_is_given():
    """Entries of the second source are numbered from 100 on."""
    first, second = filled([40, 30]), filled([40, 30])
    second.k_LBKSD += 100
    second.v_LBKSD -= 100
    spec = CacheSpec(PyramidKV(budget=20, observation_window=6), 3, 58)
    cache = PyramidKVCache.build(spec, CONFIG, B, torch.float32, "cpu", None)
    scores = torch.rand(L, B, K, S, generator=torch.Generator().manual_seed(0))
    for source, is_second in ((first, False), (second, True), (first, False)):
        cache.load(source, scores)
        for level in cache.levels:
            assert {token >= 100 for token in held(level, 0, 0, 0)} == {is_second}
    cache.take(second, cache.length_B, torch.tensor([1, 0], dtype=torch.int32), 4)
    for level in cache.levels:
        assert [token for token in held(level, 0, 0, 0) if token >= 100] == [140]
    assert cache.length_B.tolist() == [41, 30]


def published(budget: int, window: int, beta: int, length: int, num_layers: int) -> list[int]:
    """PyramidKV's chosen entries by layer, as its code has them: steps rounded down, so that they
    add up to more.
    """
    mean, room = budget - window, length - window
    if length < budget:
        return [room] * num_layers
    if length < 2 * mean:
        return [mean] * num_layers
    last, first = mean // beta, 2 * mean - mean // beta
    if first >= room:
        last, first = 2 * mean - room, room
    return [first - i * ((first - last) // (num_layers - 1)) for i in range(num_layers)]


@settings(max_examples=200)
@given(st.integers(8, 500), st.integers(8, 1200), st.integers(2, 80), st.integers(1, 40))
def test_pyramid_budgets_are_the_published_ones_and_add_up(budget, length, num_layers, beta):
    """Within the rounding of their steps; theirs of everything is ours of no more than
    everything.
    """
    cache = PyramidKV(budget=budget, observation_window=8, beta=beta)
    spec = CacheSpec(cache, 3, length)
    window = cache.window(spec)
    ours = [min(chosen, length) - window for chosen in cache.budgets(spec, num_layers)]
    theirs = published(budget, window, beta, length, num_layers)
    assert sum(ours) == num_layers * (min(budget, length) - window)
    assert all(-num_layers - 2 <= a - b <= 1 for a, b in zip(ours, theirs, strict=True))
    assert all(later <= earlier + 1 for earlier, later in itertools.pairwise(ours))
    assert 0 <= min(ours) <= max(ours) <= length - window


@settings(max_examples=60)
@given(sliding=st.integers(2, 30), **CASES)
def test_h2o(budget, gamma, prompts, rounds, sliding, seed):
    """Accumulated scores by token, and evictions one at a time. In the layer with a sliding window,
    what it has left behind is evicted first, in any order.
    """
    generator = torch.Generator().manual_seed(seed)
    spec = CacheSpec(H2O(budget=budget), gamma, 58)
    scores = torch.rand(L, B, K, S, generator=generator)
    target = filled(prompts)
    target.config = replace(CONFIG, sliding_window=sliding, sliding_layers=(1,))
    cache = H2OCache.build(spec, target.config, B, torch.float32, "cpu", None)
    cache.load(target, scores)
    window = cache.window
    assert window == max((budget + 1) // 2, gamma + 1)
    heads = torch.cartesian_prod(torch.arange(L), torch.arange(B), torch.arange(K)).tolist()
    kept = {}
    for layer, row, head in heads:
        own = scores[layer, row, head].tolist()
        first = prompts[row] + 1 - sliding if layer == 1 else 0
        tokens = snapkv_keeps(own, prompts[row], prompts[row], budget, window, 1, first)
        kept[layer, row, head] = {token: own[token] for token in tokens}
    lengths = list(prompts)
    for counts in rounds:
        before = {at: held(cache, *at) for at in map(tuple, heads)}
        propose(cache, lengths, gamma)
        cache.step_scores_GLBKC.copy_(
            torch.rand(cache.step_scores_GLBKC.shape, generator=generator)
        )
        steps = cache.step_scores_GLBKC.clone()
        counts = [min(c, gamma + 1) for c in counts]
        cache.take(target, cache.length_B, torch.tensor(counts, dtype=torch.int32), gamma + 1)
        for at, mine in kept.items():
            layer, row, head = at
            new = list(range(lengths[row], lengths[row] + counts[row]))
            added = steps[: counts[row], layer, row, head].sum(0).tolist()
            first = lengths[row] + counts[row] + 1 - sliding if layer == 1 else 0
            for slot, token in enumerate(before[at] + new):
                if token in mine or token in new:
                    mine[token] = mine.get(token, 0.0) + added[slot]
            for token in new:
                if len([t for t in mine if t <= token]) > budget:
                    old = [t for t in mine if t <= token - window]
                    del mine[min(old, key=lambda t: mine[t] if t >= first else -1.0)]
            now = held(cache, layer, row, head)
            assert len(now) == len(set(now)) == len(mine)
            assert sorted(t for t in now if t >= first) == sorted(t for t in mine if t >= first)
            got = dict(zip(now, cache.scores_LBKC[layer, row, head].tolist(), strict=False))
            assert all(
                abs(got[token] - value) < 1e-4 for token, value in mine.items() if token >= first
            )
        lengths = [n + c for n, c in zip(lengths, counts, strict=True)]


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    last=st.integers(1, 100),
    seed=st.integers(0, 9),
)
def test_the_scoring_pass_sees_what_a_whole_prefill_would(lengths, last, seed):
    """Replayed in chunks over the filled cache, against the attention of one pass over
    everything.
    """
    model, prompts = small_model(seed), random_prompts(lengths, seed)
    longest, rows = max(lengths), len(lengths)
    tokens = torch.tensor([p + [0] * (longest - len(p)) for p in prompts])
    index, ends = torch.arange(longest), torch.tensor(lengths)[:, None]
    counted, seen = (index >= ends - last) & (index < ends), []

    class Recorder(KVCache):
        def attend(self, layer, q_BTHD, attention, plan):
            out, scores = attention.attend_scored(
                q_BTHD, self.k_LBKSD[layer], self.v_LBKSD[layer], plan, counted
            )
            seen.append(scores)
            return out

    cache = Recorder(model.config, rows, longest, torch.float32, "cpu")
    model(tokens, cache)
    cache.rollback(torch.tensor(lengths, dtype=torch.int32))
    before = cache.k_LBKSD.clone()

    def forward(index_BT, view):
        return model(tokens.gather(1, index_BT), view)

    scores = score(model, cache, forward, longest, last, lambda _: None)
    assert torch.equal(cache.k_LBKSD, before)
    assert cache.seqlens_B.tolist() == lengths
    torch.testing.assert_close(scores, torch.stack(seen), atol=1e-4, rtol=1e-4)
