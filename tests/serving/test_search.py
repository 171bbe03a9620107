"""The highest load within a bound, against thresholds that are known."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.config.load import compose
from magicdec.config.scenario_settings import LOWEST_RATE
from magicdec.errors import UserError
from magicdec.serving.load_generator import NEAR, highest, keeps, latency_metrics, load_metrics
from magicdec.serving.request import Stats

SEARCH = ["scenario=serve", "scenario.latency_ms=100"]


def found(kind: str, most: float, threshold: float) -> tuple[float, list[float]]:
    """Return what a search finds if all levels up to the threshold keep the bounds, and what it has
    tried.
    """
    search, tried = highest(kind, most), []
    level = next(search)
    while True:
        tried.append(level.value)
        assert len(tried) < 100, "the search does not end"
        try:
            level = search.send(level.value <= threshold)
        except StopIteration as end:
            return end.value, tried


@given(st.integers(0, 300), st.integers(1, 200))
def test_users_are_found_exactly(threshold, most):
    value, tried = found("concurrency", most, threshold)
    assert value == min(threshold, most)
    assert all(1 <= one <= most and one == int(one) for one in tried)
    assert len(tried) == len(set(tried)) <= 2 * math.log2(most) + 3


def test_a_part_of_a_user_is_none():
    assert found("concurrency", 10.5, 300) == (10, [1, 2, 4, 8, 9, 10])
    with pytest.raises(UserError, match=r"^scenario.slo_most=0.5: must be at least 1, the fewest"):
        compose([*SEARCH, "scenario.slo=concurrency", "scenario.slo_most=0.5"])
    assert compose([*SEARCH, "scenario.slo=rate", "scenario.slo_most=0.5"])


@given(st.floats(LOWEST_RATE, 500), st.floats(1, 200))
def test_rates_are_found_to_a_tenth(threshold, most):
    value, tried = found("rate", most, threshold)
    reachable = min(threshold, most)
    assert value <= threshold
    assert max(tried) <= most
    assert value >= reachable / NEAR or reachable < 2 * LOWEST_RATE
    assert len(tried) < 30


def test_no_load_keeps_the_bounds():
    assert found("concurrency", 8, 0) == (0, [1])
    value, tried = found("rate", 8, 0)
    assert (value, min(tried)) == (0, LOWEST_RATE)


def test_a_search_among_no_rates_is_a_mistake():
    keys = ["scenario=serve", "scenario.slo=rate", "scenario.latency_ms=5"]
    assert compose([*keys, "scenario.slo_most=0.03125"])
    with pytest.raises(UserError, match=r"scenario.slo_most=0.02: must be at least 0.03125"):
        compose([*keys, "scenario.slo_most=0.02"])


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, True),
        ({"a/ttft_p99": 50.1}, False),
        ({"a/ttft_p99": math.nan}, True),  # of no request
        ({"a/ttft_p99": None}, True),  # the same, as it is stored
        ({"a/ttft_p50": 1e9}, True),
        ({"a/failed_requests": 1}, False),
        ({"b/failed_requests": 1}, True),
        ({"a/tpot_p99": 1e9}, True),
    ],
)
def test_bounds(changes, kept):
    metrics = {"a/ttft_p99": 50.0, "a/ttft_p50": 1.0, "a/tpot_p99": 7.0} | changes
    assert keeps(metrics, "a", 99, {"ttft": 50.0, "tpot": None}) is kept


def test_answers_of_one_token_are_good_and_keep_a_bound_of_the_time_per_token():
    """They have no time per output token."""
    answers = [
        Stats(8, 1, 0.01, None, 0.01, [], proposed=0, accepted=0, acceptance_rate=None,
              acceptance_length=None)
    ] * 4  # fmt: skip
    found = load_metrics(answers, 2.0, latency_ms=5.0)
    assert found["goodput_rps"] == 4 / 2.0
    figures = {f"a/{name}": value for name, value in found.items()}
    assert keeps(figures, "a", 99, {"time_per_output_token_ms": 5.0}) is True
    unanswered = replace(answers[0], time_to_first_token_s=None, request_latency_s=None)
    assert latency_metrics([*answers, unanswered])["time_to_first_token_ms"] == pytest.approx(10.0)


def test_a_latency_without_figures_does_not_keep_its_bound():
    assert keeps({}, "a", 99, {"ttft": 50.0}) is False
