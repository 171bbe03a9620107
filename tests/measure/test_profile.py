"""The parts of a round: which are timed for which policy."""

import time

import pytest
import torch

from magicdec.cache.verify_guided import VerifyGuidedCache
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.decoding import timers
from magicdec.measure.round_profile import profile_round
from tests.clock import SECONDS, count_slots
from tests.small import drafting, small_model

PARTS = {"target_decode_ms", "draft_ms", "verify_ms", "round_ms", "overhead_ms"}


def parts(draft: str, policy: str) -> dict[str, float]:
    keys = {"policy": policy, "gamma": 2, "budget": 16, "num_sink": 2, "page_size": 4}
    return profile_round(drafting(draft, small_model(), [40, 50], 0.1, **keys), 2)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_selection_is_timed_where_entries_are_chosen_by_their_attention(policy):
    times = parts("self", policy)
    assert set(times) == PARTS | (
        {"select_ms"} if POLICIES[policy].facts.selects != "never" else set()
    )
    assert all(times[name] > 0 for name in times if name != "overhead_ms")


@pytest.mark.parametrize(
    ("policy", "is_timed"), [("topk", True), ("snapkv", False), ("streaming", False)]
)
def test_what_an_independent_draft_selects_at_its_prefill_is_a_part_of_it(policy, is_timed):
    assert ("select_ms" in parts("model", policy)) == is_timed


@pytest.mark.parametrize("refresh", [1, 2, 3, 4, 1_000_000_000])
def test_the_choice_of_a_round_is_its_own_part(monkeypatch, refresh):
    """A choice that takes a second by a clock of its own, in one of `refresh` rounds: no part of
    the overhead.
    """
    late, now, choose = [0.0], time.perf_counter, VerifyGuidedCache._refresh

    def slow(*arguments):
        late[0] += 1.0
        choose(*arguments)

    monkeypatch.setattr(timers.time, "perf_counter", lambda: now() + late[0])
    monkeypatch.setattr(VerifyGuidedCache, "_refresh", slow)
    keys = {
        "policy": "verify_guided",
        "gamma": 2,
        "budget": 16,
        "refresh": refresh,
        "generate_len": 60,
    }
    times = profile_round(drafting("self", small_model(), [40, 50], **keys), 4)
    assert times["select_ms"] == pytest.approx(1000, abs=100)
    assert times["round_ms"] == pytest.approx(1000 / refresh, abs=100)
    assert abs(times["overhead_ms"]) < 100


@pytest.mark.parametrize("limits", [[1, 12, 12], [1, 1, 1], [2, 12, 7], [12, 12, 12]])
@pytest.mark.parametrize(
    ("draft", "policy"), [("self", "full"), ("self", "streaming"), ("model", "streaming")]
)
def test_every_part_is_of_all_rows(draft, policy, limits, monkeypatch):
    """Rows that end at their first token, or while rounds are timed, cost what they did. Time is
    what is read.
    """
    count_slots(monkeypatch)
    lengths, gamma, budget = [100, 140, 120], 5, 16
    keys = {"policy": policy, "gamma": gamma, "budget": budget, "num_sink": 2, "generate_len": 12}
    batch = drafting(draft, small_model(), lengths, 0.1, **keys)
    state = batch.decoder.state
    state.limit_B.copy_(state.prompt_len_B + torch.tensor(limits))
    times = profile_round(batch, 6)
    slots = {name: ms / 1e3 / SECONDS for name, ms in times.items()}
    assert slots["target_decode_ms"] == pytest.approx(sum(lengths) + len(lengths))
    assert slots["verify_ms"] == pytest.approx(sum(lengths) + len(lengths) * (gamma + 1))
    # By which the passes of a round may be longer.
    longest = len(lengths) * (gamma + 1) * max(limits)
    assert 0 <= round(slots["overhead_ms"], 6) <= longest


@pytest.mark.parametrize("draft", list(DRAFTS))
def test_rows_at_their_limit_go_on_being_timed(draft):
    """Many more rounds than the text has tokens, of every draft: no buffer overflows, all logits
    stay finite.
    """
    keys = {"policy": "streaming", "gamma": 3, "budget": 16, "num_sink": 2, "generate_len": 2}
    times = profile_round(drafting(draft, small_model(), [40, 50], 0.1, **keys), 5)
    assert times["round_ms"] > 0


def test_no_draft_has_one_part():
    assert set(profile_round(drafting("none", small_model(), [20]), 2)) == {"target_decode_ms"}
