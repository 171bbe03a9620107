"""The parts of a round: which are timed for which policy."""

import time

import pytest

from magicdec.cache.verify_guided import VerifyGuidedCache
from magicdec.config.registry import POLICIES
from magicdec.decoding import timers
from magicdec.measure.profile import profile_round
from tests.small import noisy_copy, open_batch, random_prompts, small_model

PARTS = {"target_decode_ms", "draft_ms", "verify_ms", "round_ms", "overhead_ms"}


def parts(draft: str, policy: str) -> dict[str, float]:
    target = small_model()
    options = {"draft_name": draft, "draft_model": noisy_copy(target, 0.1) if draft == "model" else None, "gamma": 2}
    batch = open_batch(target, random_prompts([40, 50]), policy=policy, budget=16, num_sink=2, page_size=4, **options)
    return profile_round(batch, 2)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_selection_is_timed_where_entries_are_chosen_by_their_attention(policy):
    times = parts("self", policy)
    assert set(times) == PARTS | ({"select_ms"} if POLICIES[policy].facts.selects != "never" else set())
    assert all(times[name] > 0 for name in times if name != "overhead_ms")


@pytest.mark.parametrize(("policy", "is_timed"), [("topk", True), ("snapkv", False), ("streaming", False)])
def test_what_an_independent_draft_selects_at_its_prefill_is_a_part_of_it(policy, is_timed):
    assert ("select_ms" in parts("model", policy)) == is_timed


@pytest.mark.parametrize("refresh", [1, 2, 3])
def test_the_choice_of_a_round_is_its_own_part(monkeypatch, refresh):
    """A choice that takes a second by a clock of its own, in one of `refresh` rounds: no part of the overhead."""
    late, now, choose = [0.0], time.perf_counter, VerifyGuidedCache._refresh

    def slow(*arguments):
        late[0] += 1.0
        choose(*arguments)

    monkeypatch.setattr(timers.time, "perf_counter", lambda: now() + late[0])
    monkeypatch.setattr(VerifyGuidedCache, "_refresh", slow)
    keys = {"policy": "verify_guided", "budget": 16, "refresh": refresh, "generate_len": 60}
    batch = open_batch(small_model(), random_prompts([40, 50]), draft_name="self", gamma=2, **keys)
    times = profile_round(batch, 4)
    assert times["select_ms"] == pytest.approx(1000, abs=100)
    assert times["round_ms"] == pytest.approx(1000 / refresh, abs=100)
    assert abs(times["overhead_ms"]) < 100


def test_no_draft_has_one_part():
    batch = open_batch(small_model(), random_prompts([20]))
    assert set(profile_round(batch, 2)) == {"target_decode_ms"}
