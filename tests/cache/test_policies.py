"""What each policy says of itself, and how it divides its budget: every number here is written out
by hand.
"""

import pytest
import torch

from magicdec.architectures.model_config import ModelConfig
from magicdec.attention.sdpa import SdpaAttention
from magicdec.cache.h2o import H2O
from magicdec.cache.pyramidkv import PyramidKV
from magicdec.cache.quantized import Quantized
from magicdec.cache.quest import Quest
from magicdec.cache.random import Random
from magicdec.cache.snapkv import SnapKV
from magicdec.cache.streaming import Streaming
from magicdec.cache.topk import TopK
from magicdec.cache.verify_guided import VerifyGuided
from magicdec.cache.window import Window
from magicdec.config.choices import CacheConfig, CacheSpec
from magicdec.config.registry import POLICIES
from magicdec.errors import UserError
from magicdec.inputs.rules import parse
from magicdec.models.kv_cache import KVCache
from tests.small import cache_config

L, B, K, D = 3, 2, 2, 4
CONFIG = ModelConfig(
    10, 8, 8, num_layers=L, num_heads=4, num_kv_heads=K, head_dim=D, max_position_embeddings=4096
)
FLAGS = "compact reads_everything quantized replays needs_target bounds_positions has_budget"
# The flags that are true of a policy, and the values of its keys.
POLICY_FACTS = {
    "full": ("reads_everything", ()),
    "h2o": ("compact replays has_budget", ()),
    "pyramidkv": ("compact has_budget", (32, 5, 20)),
    "quantized": ("reads_everything quantized needs_target has_budget", (4, 32)),
    "quest": ("has_budget", (16,)),
    "random": ("compact has_budget", (0, 32, 0)),
    "snapkv": ("compact has_budget", (32, 5)),
    "streaming": ("compact bounds_positions has_budget", (0,)),
    "topk": ("has_budget", ()),
    "verify_guided": ("needs_target has_budget", (1, 32)),
    "window": ("compact bounds_positions has_budget", ()),
}
OBSERVES = {"h2o": 57, "pyramidkv": 6, "snapkv": 6, "verify_guided": 6}
PHASES = {"verify_guided": (1, 2)}
# A budget of 13 and rounds of 4 tokens are 17 slots; 57 tokens and a round are 61.
SLOTS = {"full": 61, "quantized": 61, "quest": 61, "topk": 61, "verify_guided": 61, "pyramidkv": 0}


def built(settings: CacheConfig, gamma: int, max_len: int, **keys):
    """Return a cache of its own for two rows."""
    spec = CacheSpec(settings, gamma, max_len, **keys)
    return POLICIES[settings.policy].work.build(spec, CONFIG, B, torch.float32, "cpu", None)


@pytest.mark.parametrize("policy", POLICY_FACTS)
def test_each_policy_has_these_facts_and_default_keys(policy):
    facts = POLICIES[policy].facts
    flags, settings = POLICY_FACTS[policy]
    assert facts().policy == policy
    assert [flag for flag in FLAGS.split() if getattr(facts, flag)] == flags.split()
    assert facts().settings == settings


@pytest.mark.parametrize("policy", POLICY_FACTS)
def test_a_cache_says_what_it_observes_its_kinds_of_rounds_and_its_slots(policy):
    cache = built(cache_config(policy, budget=13, observation_window=6, refresh=3), 3, 57)
    slots = SLOTS.get(policy, 17)
    assert cache.observes == OBSERVES.get(policy, 0)
    assert cache.phases == PHASES.get(policy, (1,))
    assert cache.k_LBKSD.shape == (L, B, K, slots, D)
    assert cache.num_slots(cache.spec, shares_target=True) == (slots if slots == 17 else 0)


@pytest.mark.parametrize(
    ("settings", "gamma", "max_len", "split"),
    [
        (Window(budget=13), 2, 40, (0, 13)),
        (Streaming(budget=13, num_sink=2), 2, 40, (2, 11)),
        # Sequences of 5 tokens: sinks leave a slot to the window.
        (Streaming(budget=8, num_sink=6), 2, 5, (4, 1)),
        (Random(budget=13, recent=4), 2, 40, (9, 4)),
        (Random(budget=13, recent=40), 2, 40, (6, 7)),
        (SnapKV(budget=13, observation_window=40), 2, 40, (6, 7)),
        (SnapKV(budget=13, observation_window=1), 2, 40, (10, 3)),
        (H2O(budget=13), 2, 40, (6, 7)),
        (H2O(budget=13), 9, 40, (3, 10)),
        # Sequences shorter than the recent tokens.
        (H2O(budget=20), 3, 3, (0, 3)),
        (SnapKV(budget=20), 3, 3, (0, 3)),
        (Random(budget=20), 3, 3, (0, 3)),
    ],
)
def test_a_budget_is_divided_into_selected_and_recent_entries(settings, gamma, max_len, split):
    cache = built(settings, gamma, max_len)
    assert (cache.num_fixed, cache.window) == split


@pytest.mark.parametrize(
    ("budget", "gamma", "max_len", "window"),
    [(18, 2, 40, 4), (20, 2, 40, 5), (8, 3, 40, 4), (16, 2, 2, 2)],
)
def test_verify_guided_reads_a_quarter_of_its_budget_of_recent_tokens(
    budget, gamma, max_len, window
):
    """But those of a round at least, and no more than there can be."""
    assert built(VerifyGuided(budget=budget), gamma, max_len).window == window


@pytest.mark.parametrize(
    ("num_layers", "max_len", "budgets"),
    [
        (3, 40, [29, 20, 11]),  # 12 + 9, 12 and 12 - 9 entries, and 8 recent ones
        (3, 24, [24, 20, 16]),  # all of 24 tokens in the first layer
        (3, 23, [20, 20, 20]),  # below twice the 12 entries
        (3, 12, [20, 20, 20]),
        (2, 40, [29, 11]),
        (1, 40, [20]),
    ],
)
def test_pyramid_budgets_of_a_few_layers(num_layers, max_len, budgets):
    settings = PyramidKV(budget=20, observation_window=8, beta=4)
    assert settings.budgets(CacheSpec(settings, 3, max_len), num_layers) == budgets


@pytest.mark.parametrize(
    ("max_len", "splits"),
    [(40, [(21, 8), (12, 8), (3, 8)]), (3, [(0, 3)] * 3)],
)
def test_the_levels_of_a_pyramid_have_rings_of_the_same_size(max_len, splits):
    cache = built(PyramidKV(budget=20, observation_window=8, beta=4), 3, max_len)
    assert [(level.num_fixed, level.window) for level in cache.levels] == splits


@pytest.mark.parametrize(
    ("settings", "num_bytes"),
    [
        (TopK(budget=13), 24 * 57 * 2),  # 24 features of keys by token, in 2 bytes
        (Quest(budget=13, page_size=4), 48 * 16 * 2),  # two bounds of 16 pages
        (Quest(budget=3, page_size=4), 48 * 21 * 2),  # 21 pages of 3 entries
        (VerifyGuided(budget=13), 2 * 6 * 57 * 4),  # scores of 6 heads, written and ranked
        (SnapKV(budget=13), 0),
    ],
)
def test_bytes_moved_by_a_selection(settings, num_bytes):
    assert settings.selection_bytes(CacheSpec(settings, 3, 57), CONFIG, 2) == num_bytes


@pytest.mark.parametrize(
    ("num_sink", "max_len", "in_cache", "sinks"),
    [(2, 57, True, 2), (2, 57, False, 0), (6, 5, True, 4)],
)
def test_sinks_are_stored_twice_where_they_move(num_sink, max_len, in_cache, sinks):
    """Their unrotated keys: as many bytes as are predicted, for each of two rows."""
    cache = built(Streaming(budget=8, num_sink=num_sink), 3, max_len, in_cache_positions=in_cache)
    num_bytes = L * K * sinks * D * 4
    assert cache.settings.extra_bytes(cache.spec, CONFIG, 4) == num_bytes
    assert (0 if cache.sink_k_LBKND is None else cache.sink_k_LBKND.nbytes) == B * num_bytes


def test_quantized_and_refreshed_policies_describe_their_steps():
    assert Quantized(bits=8).form == "quantized, 8 bits"
    # Half a byte of code; a scale and a least value of 4 bytes are shared by 24 tokens of a key's
    # feature, and by 4 features of a value.
    each = (0.5 + 4 / 24 + 0.5 + 4 / 4) / 2
    assert Quantized(bits=4, group_size=24).element_bytes(CONFIG, 2) == pytest.approx(each)
    assert VerifyGuided(refresh=3).rounds_per_selection == 3
    assert TopK().rounds_per_selection == 1


@pytest.mark.parametrize("settings", [Streaming, Random])
def test_sinks_must_leave_room_in_the_budget(settings):
    words = "to hold the sinks and a window of at least 1"
    for budget in (3, 4):
        line = f"x.budget={budget}: must be above x.num_sink=4, {words}"
        assert list(settings(budget=budget, num_sink=4).mistakes("x")) == [line]
    assert list(settings(budget=5, num_sink=4).mistakes("x")) == []


KERNEL, BITS = "must be an odd number from 1 to 2,147,483,647", "must be 8 or 4"


@pytest.mark.parametrize(
    ("settings", "key", "valid", "refused", "words"),
    [
        (Streaming, "num_sink", [0, 1], [-1], "must be at least 0"),
        (Random, "num_sink", [0, 1], [-1], "must be at least 0"),
        (Random, "seed", [0, 1], [-1], "must be at least 0"),
        (SnapKV, "kernel", [1, 3, 7], [-1, 0, 2, 4, 4_000_000_001], KERNEL),
        (Quantized, "bits", [4, 8], [3, 5, 7, 9], BITS),
        (VerifyGuided, "refresh", [1], [0], "must be at least 1"),
    ],
)
def test_values_of_keys_that_are_refused(settings, key, valid, refused, words):
    for value in valid:
        assert getattr(parse(settings, {key: value}, "cache"), key) == value
    for value in refused:
        with pytest.raises(UserError, match=rf"^cache\.{key}={value}: {words}$"):
            parse(settings, {key: value}, "cache")


def test_a_pyramid_counts_and_commits_in_every_level():
    """Levels of 29, 20 and 11 entries: appended tokens of which a part is kept, and a row that
    rests.
    """
    target = KVCache(CONFIG, B, 44, torch.float32, "cpu")
    target.rollback(torch.tensor([25, 9], dtype=torch.int32))
    cache = built(PyramidKV(budget=20, observation_window=8, beta=4), 3, 40)
    cache.load(target, torch.rand(L, B, K, 44, generator=torch.Generator().manual_seed(0)))
    cache.advance(4)
    cache.commit(4, torch.tensor([1, 3]))
    lengths = [[25 + 1, 9 + 3], [20 + 1, 9 + 3], [11 + 1, 9 + 3]]
    assert [level.seqlens_B.tolist() for level in cache.levels] == lengths
    assert cache.positions_BT(2).tolist() == [[26, 27], [12, 13]]
    cache.resting_B = torch.tensor([True, False])
    plans = cache.plan(SdpaAttention(), 2, torch.float32)
    assert [plan.seqlens_B.tolist() for plan in plans] == [[2, 14]] * L
