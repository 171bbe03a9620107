"""A model's sliding window in every cache policy: what a token sees is read from the attention
itself.

Values are one-hot at their token's position and queries are zero: the output names the tokens that
were seen.
"""

import itertools
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.architectures.model_config import ModelConfig
from magicdec.attention.sdpa import SdpaAttention
from magicdec.cache.compact import CompactCache
from magicdec.cache.draft_cache import DraftCache
from magicdec.cache.dynamic import DynamicCache
from magicdec.cache.full import FullCache
from magicdec.cache.pyramidkv import PyramidKVCache
from magicdec.config.choices import CacheSpec
from magicdec.config.registry import POLICIES
from magicdec.models.kv_cache import KVCache
from tests.small import cache_config

L, B, K, H, S = 3, 2, 2, 4, 64  # positions fit into the head dim
SLIDING, GAMMA, MAX_LEN = (0, 2), 3, 56
STEPS = (2, 1)  # tokens of a round's passes
HEADS = [(row, head) for row in range(B) for head in range(K)]


def of_rows(least: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(least, most), min_size=B, max_size=B)


SIZES = {
    "window": st.integers(1, 24),
    "budget": st.integers(GAMMA + 2, 24),
    "lengths": of_rows(1, 40),
}
SIZES |= {"seed": st.integers(0, 99)}


def one_hot(positions_BT: torch.Tensor) -> torch.Tensor:
    """Values (B, T, K, D)."""
    return torch.nn.functional.one_hot(positions_BT, S).float()[:, :, None].expand(-1, -1, K, -1)


def filled(window: int, lengths: list[int], generator: torch.Generator) -> KVCache:
    """A target's cache with an entry in every slot."""
    sizes = {
        "num_layers": L,
        "num_heads": H,
        "num_kv_heads": K,
        "head_dim": S,
        "max_position_embeddings": 4096,
    }
    config = ModelConfig(10, 8, 8, **sizes, sliding_window=window, sliding_layers=SLIDING)
    target = KVCache(config, B, S, torch.float32, "cpu")
    target.k_LBKSD.normal_(generator=generator)
    target.v_LBKSD.copy_(torch.eye(S))
    target.rollback(torch.tensor(lengths, dtype=torch.int32))
    return target


def append(cache: DraftCache, num_new: int, layer: int, generator: torch.Generator) -> torch.Tensor:
    """Write new entries of one layer and attend: the attention (B, T, K, S) that tokens receive, by
    position.
    """
    attention = SdpaAttention()
    slots_BT = cache.slots_BT(num_new)
    positions_BT = cache.positions_BT(num_new)
    cache.place(layer, slots_BT).write(
        torch.randn(B, num_new, K, S, generator=generator), one_hot(positions_BT)
    )
    plan = cache.plan(attention, num_new, torch.float32)[layer]
    return cache.attend(layer, torch.zeros(B, num_new, H, S), attention, plan)[:, :, :: H // K]


def held(cache: DraftCache, layer: int, num_new: int) -> dict[tuple[int, int], set[int]]:
    """Tokens in valid slots of each row and head, new ones included."""
    if isinstance(cache, PyramidKVCache):
        cache, layer = cache.levels[layer], 0
    tokens_BKS, count_B = cache.v_LBKSD[layer].argmax(-1).tolist(), cache.seqlens_B.tolist()
    return {
        (row, head): set(tokens_BKS[row][head][: count_B[row] + num_new]) for row, head in HEADS
    }


def check(
    cache: DraftCache, seen_BTKS: torch.Tensor, layer: int, own: list[int], window: int
) -> None:
    """Each new token sees of what its head holds that within the window; a dynamic policy reads
    some of that.
    """
    num_new, span = seen_BTKS.shape[1], window if layer in SLIDING else S
    all_seen = defaultdict(set)
    for row, i, head, token in (seen_BTKS > 1e-3).nonzero().tolist():
        all_seen[row, i, head].add(token)
    for (row, head), tokens in held(cache, layer, num_new).items():
        for i in range(num_new):
            expected = {t for t in tokens if own[row] + i - span < t <= own[row] + i}
            seen = all_seen[row, i, head]
            if isinstance(cache, DynamicCache):
                assert {own[row] + i} <= seen <= expected
            else:
                assert seen == expected


@pytest.mark.parametrize(("policy", "exact"), [(p, e) for p in POLICIES for e in (True, False)])
@settings(max_examples=25)
@given(**SIZES, num_sink=st.integers(0, 2), rounds=st.lists(of_rows(0, 3), min_size=1, max_size=4))
def test_a_token_sees_what_is_held_within_its_window(
    policy, exact, window, budget, num_sink, lengths, rounds, seed
):
    """Committed from the target's cache, or (`exact` false) from the draft's own."""
    if not exact and issubclass(POLICIES[policy].work, FullCache):
        return  # there is nothing to move
    generator = torch.Generator().manual_seed(seed)
    settings = cache_config(
        policy, budget=budget, num_sink=num_sink, observation_window=6, page_size=4
    )
    spec = CacheSpec(settings, GAMMA, MAX_LEN)
    target = filled(window, lengths, generator)
    cache = POLICIES[policy].work.build(
        spec, target.config, B, torch.float32, "cpu", target if exact else None
    )
    cache.load(target, torch.rand(L, B, K, S, generator=generator))
    for counts in rounds:
        own = list(lengths)
        for num_new in STEPS:
            for layer in range(L):
                check(cache, append(cache, num_new, layer, generator), layer, own, window)
            cache.advance(num_new)
            own = [n + num_new for n in own]
        source, first_B = (
            (target, cache.length_B) if exact else (cache, cache.committed_slots_B.clone())
        )
        cache.take(source, first_B, torch.tensor(counts, dtype=torch.int32), GAMMA + 1)
        lengths = [n + c for n, c in zip(lengths, counts, strict=True)]


@pytest.mark.parametrize("policy", [p for p in POLICIES if p not in ("streaming", "window")])
@settings(max_examples=25)
@given(**SIZES)
def test_no_entry_is_chosen_that_is_out_of_sight(policy, window, budget, lengths, seed):
    """A draft sees all that its target sees where the budget suffices, or else as much as the
    budget allows.
    """
    generator = torch.Generator().manual_seed(seed)
    spec = CacheSpec(
        cache_config(policy, budget=budget, observation_window=6, page_size=1), GAMMA, MAX_LEN
    )
    target = filled(window, lengths, generator)
    cache = POLICIES[policy].work.build(spec, target.config, B, torch.float32, "cpu", target)
    cache.load(target, torch.rand(L, B, K, S, generator=generator))
    for layer in SLIDING:
        seen_BTKS = append(cache, 1, layer, generator)
        level = cache.levels[layer] if isinstance(cache, PyramidKVCache) else cache
        room = level.budget if isinstance(level, (CompactCache, DynamicCache)) else S
        for row, head in HEADS:
            count = int((seen_BTKS[row, 0, head] > 1e-3).sum()) - 1  # without the token itself
            assert count == min(window - 1, lengths[row], room)


def selected(policy: str, window: int, budget: int, scores_LBKS: torch.Tensor) -> DraftCache:
    """Return a cache of 50 and of 45 tokens."""
    settings = cache_config(policy, budget=budget, observation_window=6, recent=6, num_sink=2)
    target = filled(window, [50, 45], torch.Generator().manual_seed(0))
    spec, work = CacheSpec(settings, GAMMA, MAX_LEN), POLICIES[policy].work
    cache = work.build(spec, target.config, B, torch.float32, "cpu", None)
    cache.load(target, scores_LBKS)
    return cache


@pytest.mark.parametrize("policy", ["h2o", "pyramidkv", "random", "snapkv"])
def test_a_budget_for_more_than_is_in_sight_holds_no_entry_twice(policy):
    """A window of 4 tokens is within the recent ones, which have the highest scores here."""
    scores = torch.arange(S).float().expand(L, B, K, S)
    cache = selected(policy, 4, 20, scores)
    for layer, (row, head) in itertools.product(SLIDING, HEADS):
        level = cache.levels[layer] if isinstance(cache, PyramidKVCache) else cache
        assert len(held(cache, layer, 0)[row, head]) == level.budget


@pytest.mark.parametrize("policy", ["h2o", "pyramidkv", "snapkv"])
def test_what_is_in_sight_is_kept_before_what_is_not_even_without_attention(policy):
    """A window of 24 tokens, all of whose scores are 0; those of all others are 1."""
    position_S = torch.arange(S)
    first_B1 = torch.tensor([[50 + 1 - 24], [45 + 1 - 24]])
    scores_BS = (position_S < first_B1).float()
    cache = selected(policy, 24, 16, scores_BS[:, None].expand(L, B, K, S))
    for layer, (row, head) in itertools.product(SLIDING, HEADS):
        level = cache.levels[layer] if isinstance(cache, PyramidKVCache) else cache
        tokens = held(cache, layer, 0)[row, head]
        in_sight = {token for token in tokens if token >= int(first_B1[row])}
        assert len(in_sight) == min(level.budget, 23)
