"""The parts of a round: which are timed for which policy."""

import pytest

from magicdec.measure.profile import profile_round
from magicdec.registry import POLICIES
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


def test_no_draft_has_one_part():
    batch = open_batch(small_model(), random_prompts([20]))
    assert set(profile_round(batch, 2)) == {"target_decode_ms"}
