"""The random policy against its definition: what must be kept is, the rest is drawn, and nothing
else has a say.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.cache.random import Random, RandomCache
from magicdec.config.choices import CacheSpec
from magicdec.models.kv_cache import KVCache
from tests.cache.test_scored import CONFIG, B, K, L, S, filled, held
from tests.small import new_engine, open_batch, random_prompts, small_model

TARGET = small_model()
LENGTHS = st.lists(st.integers(1, 50), min_size=B, max_size=B)


def loaded(lengths: list[int], sequence: int = 0, gamma: int = 1, **keys) -> RandomCache:
    spec = CacheSpec(Random(**keys), gamma, 58, sequence=sequence)
    cache = RandomCache.build(spec, CONFIG, B, torch.float32, "cpu", None)
    cache.load(filled(lengths))
    return cache


def kept(cache: KVCache, layer: int, row: int) -> set[int]:
    """The tokens that a row keeps, which all its heads must agree on, each once."""
    heads = [held(cache, layer, row, head) for head in range(K)]
    assert all(len(set(one)) == len(one) and set(one) == set(heads[0]) for one in heads)
    return set(heads[0])


@settings(max_examples=100)
@given(st.integers(4, 30), st.integers(1, 3), st.integers(0, 6), st.integers(1, 12), LENGTHS)
def test_sinks_and_recent_tokens_are_kept_and_the_budget_is_filled(
    budget, gamma, num_sink, recent, lengths
):
    cache = loaded(lengths, gamma=gamma, budget=budget, num_sink=num_sink, recent=recent)
    window = min(budget, max(min(recent, (budget + 1) // 2), gamma + 1))
    for layer in range(L):
        for row, length in enumerate(lengths):
            tokens = kept(cache, layer, row)
            assert len(tokens) == min(budget, length)
            assert tokens <= set(range(length))
            assert tokens >= set(range(max(0, length - window), length))
            assert tokens >= set(range(min(num_sink, budget - window, length)))


def test_the_tokens_of_a_round_leave_less_room_for_sinks():
    """A small budget: gamma + 1 of 12 entries are recent, more than half, and 3 of 4 sinks fit."""
    cache = loaded([50] * B, gamma=8, budget=12, num_sink=4, recent=6)
    assert kept(cache, 0, 0) == {0, 1, 2, *range(41, 50)}


def test_every_other_token_is_kept_as_often_as_any():
    """Over many sequences: 50 tokens, of which 2 and 6 are always kept, and 8 of the other 42 are
    drawn.
    """
    counts, draws = torch.zeros(S), 0
    for sequence in range(0, 300, B):
        cache = loaded([50] * B, sequence, budget=16, num_sink=2, recent=6)
        for layer in range(L):
            for row in range(B):
                counts[list(kept(cache, layer, row))] += 1
                draws += 1
    assert (counts[[0, 1, *range(44, 50)]] == draws).all()
    share, expected = counts[2:44] / draws, 8 / 42
    assert (share - expected).abs().max() < 5 * (expected * (1 - expected) / draws) ** 0.5


def test_a_draw_depends_on_seed_sequence_and_layer_alone():
    keys = {"budget": 16, "num_sink": 2, "recent": 6}
    drawn = loaded([50, 40], 4, **keys)
    assert torch.equal(drawn.k_LBKSD, loaded([50, 40], 4, **keys).k_LBKSD)
    # The second row's sequence, now in the first row, with another neighbour.
    moved = loaded([40, 33], 5, **keys)
    assert [kept(moved, layer, 0) for layer in range(L)] == [
        kept(drawn, layer, 1) for layer in range(L)
    ]
    alike = loaded([50, 50], 4, **keys)
    assert kept(alike, 0, 0) != kept(alike, 0, 1)
    assert kept(alike, 0, 0) != kept(alike, 1, 0)
    assert kept(alike, 0, 0) != kept(loaded([50, 50], 4, **keys, seed=1), 0, 0)


def test_proposals_accepted_are_those_of_a_batch_of_its_own():
    """The third sequence of a run, next to others and alone."""
    prompts = random_prompts([60, 71, 66])
    keys = {"policy": "random", "budget": 24, "num_sink": 2, "gamma": 3}
    together = open_batch(TARGET, prompts, draft_name="self", **keys)
    fast = together.decoder.generate(together.draft)
    engine = new_engine(TARGET, draft_name="self", **keys)
    batch = engine.open(prompts[2:], 2)
    batch.decoder.prefill(engine.prefill_chunk)
    alone = batch.decoder.generate(batch.draft)
    of_row = fast.accepted_RB[:, 2]
    assert alone.accepted_RB[:, 0].tolist() == of_row[of_row >= 0].tolist()
    assert 0 < of_row[of_row >= 0].float().mean() < 3


def test_no_two_layers_share_random_numbers():
    """Not at other positions either: each number is drawn for one layer, row and position."""
    cache, slot_S = loaded([50] * B, budget=16), torch.arange(S)
    numbers = torch.stack([cache._numbers_BS(layer, slot_S) for layer in range(L)])
    assert numbers.unique().numel() == L * B * S
