"""The levels of load of scenario=serve: their figures, and how they are shown."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from magicdec.config.load import compose
from magicdec.config.scenario_settings import Serve
from magicdec.errors import UserError
from magicdec.measure.contexts import Speculated, context_acceptance
from magicdec.scenarios import levels
from magicdec.scenarios.level_units import LevelUnit, ServedRequest
from magicdec.serving.load_generator import Load
from magicdec.serving.request import Params, Request
from magicdec.units import WAYS
from tests.runs import run_here, shown
from tests.serving.conftest import SETTINGS
from tests.serving.test_load import stats


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


def answer(per_token_s=None):
    """A request with its first token after a second, and then four more; None: it has failed."""
    if per_token_s is None:
        return ServedRequest(Request([1], Params()).stats, [], [], error="no connection")
    return ServedRequest(stats(0.0, [(1.0, 1), (1.0 + 4 * per_token_s, 4)]), [7] * 5, [])


def test_requests_that_fail_in_one_way_lower_no_figure_of_the_other():
    plain, fast = [answer(0.4)] * 3, [answer(0.2)] * 3
    load, scenario = Load("concurrency", 2), compose(["scenario=serve"]).settings(Serve)
    units = {
        "autoregressive": LevelUnit(load, "autoregressive", 10.0, plain + [answer()] * 3, {}),
        "speculative": LevelUnit(load, "speculative", 5.0, fast + [answer(0.1)] * 3, {}),
    }
    found = levels.level_metrics(units, scenario, "aaabbb")
    assert found["autoregressive/requests_per_second"] == 3 / 10
    assert found["speculative/requests_per_second"] == 6 / 5
    assert found["speculative/tokens_per_second"] == 6 * 5 / 5
    assert found["speedup"] == pytest.approx(0.4 / 0.2), "of the three that both have answered"
    assert "speedup_duration" not in found
    assert [found[f"category/{name}/rows"] for name in "ab"] == [3, 3]
    assert "category/a/autoregressive/time_to_first_token_ms" in found
    assert "category/b/autoregressive/time_to_first_token_ms" not in found, "none was answered"
    whole = {way: replace(unit, requests=unit.requests[:3]) for way, unit in units.items()}
    assert levels.level_metrics(whole, scenario)["speedup_duration"] == 10 / 5


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        ((2, 2.4), (2, 1.4), "(2 requests each: too few to compare)"),
        ((3, 2.4), (9, 1.4), "(3 and 9 requests: too few to compare)"),
        ((9, 2.4), (9, 1.4), "a length measured on the shortest contexts is 71% too high for the"),
        ((9, 1.2), (9, 1.6), "a length measured on the shortest contexts is 25% too low for the"),
    ],
)
def test_lengths_at_two_contexts_are_compared_where_both_have_an_interval(first, last, said):
    """One accepted length for all requests of a context: four of them make an interval."""
    requests = [
        Speculated(context, 10, round(10 * (length - 1)))
        for context, (number, length) in ((512, first), (8192, last))
        for _ in range(number)
    ]
    console = Console(file=io.StringIO(), width=100)
    console.print(levels.by_context(context_acceptance(requests)))
    assert said in console.file.getvalue()
