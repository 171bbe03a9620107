"""Metrics from hand-made counters, each checked against arithmetic done by hand."""

import math
from dataclasses import replace

import pytest
import torch

from magicdec.config.omega import omega
from magicdec.config.registry import DRAFTS
from magicdec.engine.decoder import Generation
from magicdec.measure import metrics
from magicdec.measure.intervals import acceptance_intervals
from magicdec.measure.round_profile import profile_round
from magicdec.scenarios.outputs import speeds
from magicdec.scenarios.stored_units import Repeats, Unit
from magicdec.units import WAYS
from tests.clock import count_slots
from tests.small import as_on_cpus, drafting, small_model

# Two rows, gamma 2. Row 0 takes 3 + 1 tokens and ends in round 1; row 1 takes 1 + 2 + 1, cut at the
# limit in round 2.
GENERATION = Generation(
    tokens=[[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]],
    accepted_RB=torch.tensor([[2, 0], [0, 1], [-1, 2]], dtype=torch.int32),
    committed_RB=torch.tensor([[3, 1], [1, 2], [0, 1]], dtype=torch.int32),
    round_seconds=[1.0, 2.0, 4.0],
    setup_seconds=0.5,
    gammas=[2, 2, 2],
    generate_len=5,
)


def test_a_row_is_timed_to_its_own_last_token():
    assert metrics.row_times(GENERATION, 3.0) == [(3.5, 2.0, 4), (3.5, 4.0, 4)]


def test_speed():
    result = metrics.speed_metrics([metrics.row_times(GENERATION, 3.0)])
    assert result["tokens_per_second"] == 8 / 4.0
    assert result["time_per_output_token_ms"] == 750.0
    assert result["time_to_first_token_ms"] == 3500.0
    assert result["wall_s"] == 7.5


def test_rows_that_start_at_different_times():
    """Where rows are prefilled one after another, the mean row waits less than the batch."""
    batch = [metrics.RowTimes(1.0, 2.0, 4), metrics.RowTimes(3.0, 1.0, 4)]
    result = metrics.speed_metrics([batch, batch])
    assert result["time_to_first_token_ms"] == 2000.0
    assert result["time_per_output_token_ms"] == 375.0
    assert result["tokens_per_second"] == 16 / 4.0
    assert result["wall_s"] == 2 * (3.0 + 2.0)


def test_a_surplus_round_is_not_counted():
    accepted_RB = torch.cat((GENERATION.accepted_RB, torch.full((1, 2), -1, dtype=torch.int32)))
    committed_RB = torch.cat((GENERATION.committed_RB, torch.zeros(1, 2, dtype=torch.int32)))
    surplus = Generation(
        GENERATION.tokens, accepted_RB, committed_RB, [1.0, 2.0, 4.0, 9.0], gammas=[2] * 4
    )
    assert metrics.row_times(surplus, 0.0)[1].decode == 4.0


def test_a_round_cut_at_the_limit_counts_as_it_was_verified():
    result = metrics.acceptance_metrics([GENERATION])
    assert result["acceptance_rounds"] == 5
    assert result["acceptance_rate"] == pytest.approx((2 + 0 + 0 + 1 + 2) / 10)
    assert result["acceptance_length"] == pytest.approx(2.0)
    assert result["acceptance_rate/position_0"] == pytest.approx(3 / 5)
    assert result["acceptance_rate/position_1"] == pytest.approx(2 / 5)
    assert omega(2, result["alpha"]) == pytest.approx(2.0)


def test_a_round_cut_at_an_end_of_sequence_does_not_count():
    result = metrics.acceptance_metrics([replace(GENERATION, generate_len=9)])
    assert result["acceptance_rounds"] == 4
    assert result["acceptance_length"] == pytest.approx(1.75)


def intervals_of(plain, fast):
    pairs = [zip(*ways, strict=True) for ways in zip(plain, fast, strict=True)]
    units = [
        [Unit(batch, 0.0, dict(zip(WAYS, ways, strict=True))) for batch, ways in enumerate(pair)]
        for pair in pairs
    ]
    rounds = metrics.rounds_of_prompts(fast)
    return metrics.interval_metrics(rounds, Repeats(tuple(map(tuple, units))).times)


def test_intervals_take_a_row_of_every_repeat_and_batch_once():
    slow = replace(GENERATION, round_seconds=[2.0, 4.0, 8.0])
    found = intervals_of([[slow, slow]] * 3, [[GENERATION, GENERATION]] * 3)
    counts = [{(2, 2): 3, (2, 0): 3}, {(2, 0): 3, (2, 1): 3, (2, 2): 3}] * 2
    twice = dict.fromkeys(("speedup_ci95", "speedup_wall_ci95"), pytest.approx([2.0, 2.0]))
    assert found == acceptance_intervals(counts) | twice


def test_a_row_that_ends_at_its_first_token_has_no_part_in_the_interval_of_the_speedup():
    none = replace(
        GENERATION,
        tokens=[[1], [1]],
        committed_RB=torch.zeros(3, 2, dtype=torch.int32),
        generate_len=9,
    )
    found = intervals_of([[none, GENERATION]] * 3, [[none, GENERATION]] * 3)
    assert [key for key in found if "speedup" in key] == ["speedup_wall_ci95"]
    assert intervals_of([[none, none]] * 3, [[none, none]] * 3) == {}


@pytest.mark.parametrize("generate_len", [4, 9, 40])
def test_measured_acceptance_is_that_of_the_draft_however_little_is_generated(generate_len):
    settings = {
        "gamma": 4,
        "policy": "full",
        "generate_len": generate_len,
        "synthetic_acceptance": 0.8,
    }
    batch = drafting("self", as_on_cpus(small_model()), [5] * 400, **settings)
    measured = metrics.acceptance_metrics([batch.decoder.generate(batch.draft)])
    assert measured["alpha"] == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("draft", list(DRAFTS))
def test_synthetic_acceptance_works_with_every_draft(draft):
    settings = {"gamma": 3, "policy": "streaming", "budget": 16, "num_sink": 2, "generate_len": 12}
    batch = drafting(
        draft, as_on_cpus(small_model()), [20] * 200, 0.1, synthetic_acceptance=0.6, **settings
    )
    assert metrics.acceptance_metrics([batch.decoder.generate(batch.draft)])[
        "alpha"
    ] == pytest.approx(0.6, abs=0.05)


def test_history():
    history = metrics.round_history(GENERATION)
    assert [row["rows"] for row in history] == [2, 2, 1]
    assert [row["accepted"] for row in history] == [1.0, 0.5, 2.0]
    assert [row["seconds"] for row in history] == [1.0, 1.0, 2.0]


def test_a_row_that_ends_at_its_first_token_has_no_time_per_token_and_no_speedup():
    empty = torch.zeros(0, 1, dtype=torch.int32)
    times = metrics.row_times(Generation([[7]], empty, empty, []), 1.0)
    assert times == [(1.0, 0.0, 0)]
    one = metrics.speed_metrics([times])
    assert math.isnan(one["tokens_per_second"])
    result = speeds([one, one], [one, one])
    assert result["speculative/time_to_first_token_ms"] == 1000.0
    assert not [key for key in result if key.startswith("speedup") or key == "noisy"]


def test_the_interval_of_a_speedup_is_that_of_its_repeats():
    plain = [{"time_per_output_token_ms": 10.0, "decode_s": 1.0}] * 3
    fast = [
        {"time_per_output_token_ms": 10.0 / ratio, "decode_s": 1.0} for ratio in (1.55, 1.1, 1.5)
    ]
    result = speeds(plain, fast)
    found = [result[f"speedup{end}"] for end in ("", "_min", "_max", "_spread")]
    assert found == pytest.approx([1.5, 1.1, 1.55, 0.3])


# The same rows, a token at a time: the last two steps are of one row alone.
STEPS = Generation(
    tokens=[[1, 2, 3], [1, 2, 3, 4, 5]],
    accepted_RB=torch.tensor([[0, 0], [0, 0], [-1, 0], [-1, 0]], dtype=torch.int32),
    committed_RB=torch.tensor([[1, 1], [1, 1], [0, 1], [0, 1]], dtype=torch.int32),
    round_seconds=[0.009, 0.020, 0.021, 0.022],
    gammas=[0, 0, 0, 0],
    generate_len=5,
)
PROFILE = {"time/target_decode_ms": 10.0, "time/round_ms": 1000.0, "gamma": 2}


@pytest.mark.parametrize(
    ("changes", "growth", "expected"),
    [
        ({}, 1.1, (1.0, 1.0)),  # steps of both rows take 10 ms on average, rounds 1 s
        ({"time/target_decode_ms": 0.2}, 1.0, (50.0, 1.0)),
        ({"time/target_decode_ms": 20.0}, 2.0, (0.5, 1.0)),
        ({"time/round_ms": 500.0}, 1.5, (1.0, 4 / 3)),
        ({"time/round_ms": 4000.0}, 1.0, (1.0, 0.25)),
        ({"gamma": 3}, 1.0, (1.0, None)),  # no round of that gamma
    ],
)
def test_what_is_measured_twice_must_agree(changes, growth, expected):
    """As far as all rows take part."""
    found = metrics.agreement(PROFILE | changes, [STEPS], [GENERATION], growth)
    factors = tuple(found.get(f"agreement/{name}") for name in ("target_decode", "round"))
    assert factors == pytest.approx(expected)


def test_without_a_draft_the_step_alone_is_measured_twice():
    found = metrics.agreement({"time/target_decode_ms": 5.0}, [STEPS], [], 1.0)
    assert found == pytest.approx({"agreement/target_decode": 2.0})


def test_rows_that_end_at_their_first_token_leave_nothing_to_compare():
    accepted_RB = torch.tensor([[-1, 0], [-1, 0]], dtype=torch.int32)
    alone = Generation([[1], [1, 2, 3]], accepted_RB, accepted_RB + 1, [1.0, 2.0], gammas=[0, 0])
    assert metrics.agreement(PROFILE, [alone], [], 1.0) == {}


@pytest.mark.parametrize("ends", [[60] * 4, [60, 6, 6, 6], [60, 50, 4, 4]])
def test_undisturbed_passes_agree_with_the_profile_wherever_rows_end(ends, monkeypatch):
    """Time is what is read. The profile's rounds are not quite the first ones: their contexts are a
    little longer.
    """
    count_slots(monkeypatch)
    keys = {"policy": "streaming", "gamma": 2, "budget": 16, "num_sink": 2, "generate_len": 60}
    batch = drafting("self", small_model(), [200, 240, 220, 210], **keys)
    state = batch.decoder.state
    state.limit_B.copy_(state.prompt_len_B + torch.tensor(ends))
    plain, fast = batch.decoder.generate(), batch.decoder.generate(batch.draft)
    times = {f"time/{name}": ms for name, ms in profile_round(batch, 3).items()}
    found = metrics.agreement(times | {"gamma": 2}, [plain], [fast], 1 + 60 / 200)
    assert found == pytest.approx(
        {"agreement/target_decode": 1.0, "agreement/round": 1.0}, rel=0.02
    )


def test_a_rounds_time_counts_once_for_each_of_its_rows():
    assert metrics.mean_round_s(GENERATION) == pytest.approx((2 * 1.0 + 2 * 1.0 + 1 * 2.0) / 5)


def test_the_mean_round_is_that_of_all_rows_where_most_end_early(monkeypatch):
    """Seven of eight rows end soon: what they wait for are rounds of all rows."""
    count_slots(monkeypatch)
    keys = {"policy": "streaming", "gamma": 2, "budget": 16, "num_sink": 2, "generate_len": 40}
    batch = drafting("self", small_model(), [200] * 8, **keys)
    state = batch.decoder.state
    state.limit_B.copy_(state.prompt_len_B + torch.tensor([40] + [8] * 7))
    fast = batch.decoder.generate(batch.draft)
    whole = fast.round_seconds[0]
    assert 0.6 * whole < metrics.mean_round_s(fast) < 1.1 * whole
    assert fast.round_seconds[-1] / len(fast.round_seconds) < 0.5 * whole
