"""The view of scenario=serve on its levels of load."""

import pytest

from magicdec.config.load import compose
from magicdec.errors import UserError
from magicdec.scenarios import levels
from magicdec.units import WAYS
from tests.runs import run_here, shown
from tests.serving.conftest import SETTINGS


def level(load, **others):
    latencies = {
        f"{way}/{key}{at}": 1e3 * value
        for way in WAYS
        for key in list(levels.LATENCIES)[:3]
        for at, value in (("", 20.0), ("_p50", 12.345), ("_p99", 98.765))
    }
    rates = {f"{way}/{key}": 1234.5 for way in WAYS for key in ("tokens_per_second", "goodput_rps")}
    return load | latencies | rates | others


def test_the_highest_load_within_a_bound(tmp_path):
    """On our engine, in both ways; a single-way level has no speedup."""
    bounds = ["scenario.slo=concurrency", "scenario.slo_most=2", "scenario.first_token_ms=1e9"]
    small = [
        "batch.size=2",
        "batch.context_len=40",
        "batch.generate_len=4",
        "scenario.num_requests=2",
    ]
    run = run_here(tmp_path, *SETTINGS, *small, *bounds, "scenario.concurrencies=[1]")
    assert [run.metrics[f"{way}/slo_concurrency"] for way in WAYS] == [2, 2]
    assert "speedup" in run.metrics, "of the level that was asked for"
    assert [row["concurrency"] for row in run.history] == [1, 1, 2, 1, 2]
    assert sum("speedup" in row for row in run.history) == 1
    with pytest.raises(
        UserError, match=r"scenario.slo=rate: needs a bound, scenario.latency_ms or"
    ):
        compose(["scenario=serve", "scenario.slo=rate"])


def test_the_acceptance_is_shown(tmp_path):
    keys = [
        "batch.size=2",
        "batch.context_len=40",
        "batch.generate_len=4",
        "scenario.num_requests=2",
    ]
    run = run_here(tmp_path, *SETTINGS, *keys, "scenario.concurrencies=[1]")
    rate, length = (run.metrics[f"acceptance_{name}"] for name in ("rate", "length"))
    assert (
        levels.accepted(run.history)
        == f"acceptance        {rate:.1%} of proposals, {length:.2f} tokens per round"
    )
    others = [
        {"acceptance_rate": 0.5, "acceptance_length": 1.5},
        {"acceptance_rate": 0.25, "acceptance_length": 1.5},
    ]
    assert (
        levels.accepted(others)
        == "acceptance        25.0% to 50.0% of proposals, 1.50 tokens per round"
    )
    assert levels.accepted([{"concurrency": 1}, {"acceptance_rate": None}]) == ""


@pytest.mark.parametrize("width", [80, 200])
def test_every_figure_fits_into_80_columns(width):
    history = [
        level({"rate": 1000.0}, speedup=1.4444, speedup_duration=1.1555),
        level({"rate": 2000.0}),
    ]
    text = shown(levels.speeds(history, WAYS), levels.latencies(history, WAYS), width=width)
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["tokens/s", *WAYS, "speedup", "per", "request", "per", "level"]
    assert ["1000", "a", "second", "1,234", "1,234", "1.44x", "1.16x"] in lines
    assert ["2000", "a", "second", "1,234", "1,234"] in lines, (
        "a level without a request that speculated"
    )
    ms, seconds = ["12,345", "|", "98,765"], ["12.3", "|", "98.8"]
    assert lines.count(["speculative", *ms, *ms, *seconds, "1,234"]) == 2
