"""Caches against plain lists: whatever is appended, rolled back and committed, the right tokens are
kept.

Every key carries its token's number, so that a test can read from a cache which tokens it holds.
"""

import cmath
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.architectures.model_config import ModelConfig
from magicdec.cache.compact import CompactCache, wide
from magicdec.cache.draft_cache import DraftCache
from magicdec.cache.dynamic import DynamicCache
from magicdec.cache.streaming import Streaming, StreamingCache
from magicdec.cache.window import WindowCache
from magicdec.config.choices import CacheSpec
from magicdec.config.registry import POLICIES
from magicdec.conformance.contracts import watch_cache
from magicdec.models.kv_cache import KVCache
from tests.small import cache_config, small_model

CONFIG = ModelConfig(
    10, 8, 8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=2, max_position_embeddings=4096
)
CONFIG_IN_CACHE = replace(CONFIG, head_dim=4)
ROWS = 3


def write(cache: KVCache, tokens: list[list[int]]) -> None:
    """Append a list of equal length to every row, all layers, then advance."""
    values = torch.tensor(tokens, dtype=torch.float32)
    slots = cache.slots_BT(values.shape[1])
    for layer in range(CONFIG.num_layers):
        kv = (values + 1000 * layer)[:, :, None, None].expand(-1, -1, 1, CONFIG.head_dim)
        cache.place(layer, slots).write(kv, -kv)
    cache.advance(values.shape[1])


def held(cache: KVCache, row: int) -> list[int]:
    """Return the tokens in a row's valid slots; keys and values of all layers must agree."""
    count = int(cache.seqlens_B[row])
    keys, values = cache.k_LBKSD[:, row, 0, :count, 0], cache.v_LBKSD[:, row, 0, :count, 0]
    assert torch.equal(keys, -values)
    assert torch.equal(keys[0] + 1000, keys[1])
    return [int(x) for x in keys[0]]


def of_rows(least: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(least, most), min_size=ROWS, max_size=ROWS)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 5), of_rows(0, 5)), max_size=8))
def test_kv_cache_against_lists(rounds):
    cache, lists = KVCache(CONFIG, ROWS, 64, torch.float32, "cpu"), [[] for _ in range(ROWS)]
    fresh = iter(range(1, 999))
    for appended, kept in rounds:
        tokens = [[next(fresh) for _ in range(appended)] for _ in range(ROWS)]
        write(cache, tokens)
        counts = [min(k, appended) for k in kept]
        cache.commit(appended, torch.tensor(counts, dtype=torch.int32))
        for row, count in enumerate(counts):
            lists[row] += tokens[row][:count]
            assert held(cache, row) == lists[row]
    cache.rollback(torch.tensor([len(x) // 2 for x in lists], dtype=torch.int32))
    assert [held(cache, row) for row in range(ROWS)] == [x[: len(x) // 2] for x in lists]


def streaming_view(tokens: list[int], budget: int, num_sink: int) -> set[int]:
    """Return the tokens that StreamingLLM keeps: the slow, obvious twin."""
    return (
        set(tokens)
        if len(tokens) <= budget
        else set(tokens[:num_sink] + tokens[num_sink - budget :])
    )


SIZES = {"budget": st.integers(3, 9), "num_sink": st.integers(0, 2), "gamma": st.integers(1, 4)}
SIZES |= {
    "prompts": of_rows(1, 20),
    "chunk": st.integers(1, 12),
    "rounds": st.lists(of_rows(0, 5), max_size=5),
}


@settings(max_examples=80)
@given(**SIZES, exact=st.booleans())
def test_streaming_against_lists(budget, num_sink, gamma, prompts, chunk, rounds, exact):
    """Load from a target or prefill in chunks, then commit round by round: only sinks and window
    are kept.
    """
    spec = CacheSpec(Streaming(budget=budget, num_sink=num_sink), gamma, 64)
    cache = (StreamingCache if num_sink else WindowCache).build(
        spec, CONFIG, ROWS, torch.float32, "cpu", None
    )
    target = KVCache(CONFIG, ROWS, 64, torch.float32, "cpu")
    sequences = [[100 * (row + 1) + i for i in range(64)] for row in range(ROWS)]
    lengths = torch.tensor(prompts, dtype=torch.int32)
    write(target, sequences)
    target.rollback(lengths)
    if exact:
        cache.load(target)
    else:
        view = cache.for_prefill(chunk)
        for start in range(0, max(prompts), chunk):
            write(view, [s[start : start + chunk] for s in sequences])
            view.take(view, view.committed_slots_B, (lengths - start).clamp(0, chunk), chunk)
        cache.adopt(view)
    width = gamma + 1
    for counts in [[0] * ROWS, *rounds]:
        counts = [min(c, width) for c in counts]
        proposals = [s[n : n + width] for s, n in zip(sequences, prompts, strict=True)]
        assert torch.equal(cache.positions_BT(1)[:, 0], torch.tensor(prompts))
        write(cache, proposals)
        for row in range(ROWS):
            kept = streaming_view(sequences[row][: prompts[row]], budget, num_sink)
            assert set(held(cache, row)) == kept | set(proposals[row])
        source, first = (target, cache.length_B) if exact else (cache, cache.committed_slots_B)
        cache.take(source, first.clone(), torch.tensor(counts, dtype=torch.int32), width)
        prompts = [n + c for n, c in zip(prompts, counts, strict=True)]
        for row in range(ROWS):
            kept = streaming_view(sequences[row][: prompts[row]], budget, num_sink)
            assert sorted(held(cache, row)) == sorted(kept)


def turned(key: list[float], position: int) -> list[float]:
    """Return a key of four features at a position: feature i turns with feature i + 2."""
    angles = [position, position * CONFIG_IN_CACHE.rope_theta**-0.5]
    plane = [complex(key[i], key[i + 2]) * cmath.exp(1j * angle) for i, angle in enumerate(angles)]
    return [number.real for number in plane] + [number.imag for number in plane]


@settings(max_examples=30)
@given(st.integers(1, 3), of_rows(1, 30), st.integers(1, 12), st.lists(of_rows(0, 4), max_size=6))
def test_sinks_move_along_with_the_window(num_sink, prompts, chunk, rounds):
    """After each chunk of a prefill and each round, sinks have the positions right before the
    window.
    """
    spec = CacheSpec(Streaming(budget=7, num_sink=num_sink), 3, 64, in_cache_positions=True)
    cache = StreamingCache.build(spec, CONFIG_IN_CACHE, ROWS, torch.float32, "cpu", None)
    own = torch.randn(64, 4, generator=torch.Generator().manual_seed(chunk)).tolist()
    lengths = [0] * ROWS

    def append(view, num_new: int, counts: list[int]) -> list[int]:
        """Write new tokens at their positions, commit some of them, and look at the sinks."""
        positions = view.positions_BT(num_new)
        assert positions.tolist() == [list(range(n, n + num_new)) for n in lengths]
        keys = torch.tensor(
            [[turned(own[at % 64], at) for at in row] for row in positions.tolist()]
        )
        for layer in range(CONFIG.num_layers):
            view.place(layer, view.slots_BT(num_new)).write(keys[:, :, None], keys[:, :, None])
        view.advance(num_new)
        view.take(view, view.committed_slots_B, torch.tensor(counts, dtype=torch.int32), num_new)
        return [n + count for n, count in zip(lengths, counts, strict=True)]

    def check(view) -> None:
        for row, length in enumerate(lengths):
            shift = max(0, length - 7)
            sinks = [turned(own[at], at + shift) for at in range(min(num_sink, length))]
            torch.testing.assert_close(
                view.k_LBKSD[1, row, 0, : len(sinks)].tolist(), sinks, atol=1e-4, rtol=1e-4
            )

    view = cache.for_prefill(chunk)
    for start in range(0, max(prompts), chunk):
        lengths = append(view, chunk, [min(max(n - start, 0), chunk) for n in prompts])
        check(view)
    cache.adopt(view)
    for counts in rounds:
        check(cache)
        lengths = append(cache, 4, counts)
    check(cache)


MISSING = [(CompactCache, "fixed_slots"), (CompactCache, "select"), (DynamicCache, "select")]
MISSING += [(DraftCache, name) for name in ("load", "for_prefill", "take", "set_length")]


@pytest.mark.parametrize(("base", "missing"), [*MISSING, (DraftCache, "committed_slots_B")])
def test_a_policy_that_lacks_a_method_says_which(base, missing):
    methods = {name: lambda *_: 0 for name in base.__abstractmethods__ if name != missing}
    unfinished = type("Unfinished", (base,), methods)
    spec = CacheSpec(Streaming(budget=8), 1, 16)
    with pytest.raises(TypeError, match=rf"abstract method '?{missing}\b"):
        unfinished.build(spec, CONFIG, ROWS, torch.float32, "cpu", None)


def test_selected_slots_outside_of_a_source_become_its_first_and_its_last():
    class Outside(CompactCache):
        def fixed_slots(self, budget):
            return 2

        def select(self, layer, source, scores_LBKS):
            return torch.tensor([-5, 999]).expand(ROWS, 1, 2)

    spec = CacheSpec(Streaming(budget=6), 1, 20)
    cache = Outside.build(spec, CONFIG, ROWS, torch.float32, "cpu", None)
    target = KVCache(CONFIG, ROWS, 20, torch.float32, "cpu")
    write(target, [list(range(20))] * ROWS)
    cache.load(target)
    assert [sorted(held(cache, row)) for row in range(ROWS)] == [[0, 16, 17, 18, 19, 19]] * ROWS


def loaded(policy: str, budget: int, lengths: list[int]) -> DraftCache:
    """Return a policy's cache of a target whose entries are numbered by position."""
    generator = torch.Generator().manual_seed(0)
    target = KVCache(CONFIG, ROWS, 44, torch.float32, "cpu")
    write(target, [list(range(44))] * ROWS)
    target.rollback(torch.tensor(lengths, dtype=torch.int32))
    spec = CacheSpec(cache_config(policy, budget=budget, num_sink=2, recent=3), 3, 40)
    cache = POLICIES[policy].work.build(spec, CONFIG, ROWS, torch.float32, "cpu", target)
    cache.load(target, torch.rand(CONFIG.num_layers, ROWS, 1, 44, generator=generator))
    return cache


@pytest.mark.parametrize("policy", ["h2o", "random", "snapkv", "streaming", "window"])
def test_entries_stay_in_the_slots_of_their_positions_up_to_the_whole_budget(policy):
    cache = loaded(policy, 11, [11, 10, 12])
    assert [held(cache, row) for row in (0, 1)] == [list(range(11)), list(range(10))]
    assert cache.k_LBKSD[0, 2, 0, :11, 0].unique().numel() == 11
    assert cache.positions_BT(1).tolist() == [[11], [10], [12]]


@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_row_is_emptied_and_the_others_stay(policy):
    cache = loaded(policy, 40, [20, 9, 33])
    cache.clear_row(1)
    assert cache.length_B.tolist() == [20, 0, 33]
    for level in getattr(cache, "levels", [cache]):
        assert level.seqlens_B.tolist() == [20, 0, 33]


@pytest.mark.parametrize(
    ("dim", "dtype", "count"),
    [
        (2, torch.float32, 2),
        (4, torch.float32, 1),
        (6, torch.float32, 6),
        (20, torch.float32, 5),
        (8, torch.bfloat16, 1),
        (14, torch.bfloat16, 14),
        (32, torch.bfloat16, 4),
    ],
)
def test_entries_are_moved_16_bytes_at_a_time_where_they_fit(dim, dtype, count):
    entries = torch.zeros(3, dim, dtype=dtype)
    assert wide(entries).shape == (3, count)
    assert wide(entries).data_ptr() == entries.data_ptr()


def test_sinks_leave_room_for_a_recent_token_in_sequences_shorter_than_they_are():
    """Three slots in all: two sinks at most, of four."""
    config = small_model().config
    spec = CacheSpec(cache_config("streaming", budget=8, num_sink=4), 1, 3)
    cache = POLICIES["streaming"].work.build(spec, config, 1, torch.float32, "cpu", None)
    assert cache.fixed_slots(cache.budget) == 2
    watch_cache(cache)  # finds nothing wrong
