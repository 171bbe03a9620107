"""The number of repeats of a run: as many as asked for, or as many as its interval takes."""

from dataclasses import replace
from itertools import count
from math import exp, sqrt
from statistics import fmean, stdev

import numpy as np
import pytest

from magicdec.config.load import compose, to_dict
from magicdec.config.scenario_settings import Compare
from magicdec.measure.intervals import t_quantile
from magicdec.scenarios import repeats
from magicdec.scenarios.repeats import Goal
from magicdec.scenarios.stored_units import Unit
from magicdec.tracking.run_id import run_id
from tests.measure.test_metrics import GENERATION
from tests.runs import run_here


def generation(seconds):
    end = GENERATION.round_seconds[-1]
    return replace(
        GENERATION, round_seconds=[seconds * one / end for one in GENERATION.round_seconds]
    )


def measure(settings, ratios, before=0, num_batches=1):
    """Measure the first batch as long as the settings ask for it. Return its units."""
    units, goal = [], Goal(settings, before)
    for ratio in ratios:
        if goal.is_reached(units, num_batches):
            break
        units.append(
            Unit(0, 0.0, {"autoregressive": generation(ratio), "speculative": generation(1.0)})
        )
    return units


def auto(precision=0.02, max_minutes=10.0):
    return Compare("compare", "auto", 1, precision, max_minutes)


def test_a_number_is_a_number():
    assert len(measure(Compare("compare", 4, 1), count(1))) == 4


def test_a_quiet_machine_stops_soon():
    assert len(measure(auto(), [1.5] * 100)) == repeats.FIRST


def test_earlier_repeats_of_a_disturbed_run_do_not_count_towards_those_asked_for():
    assert len(measure(Compare("compare", 3, 1), count(1), before=3)) == 6
    assert len(measure(auto(), [1.5] * 100, before=7)) == 7 + repeats.FIRST


def test_the_interval_at_the_end_is_as_narrow_as_asked_for_and_covers_the_truth():
    """The rule looks at the interval again and again, which makes a lucky one likelier."""
    random, covered, studies = np.random.default_rng(0), 0, 400
    for _ in range(studies):
        logs = random.normal(0, 0.03, 200)
        kept = logs[: len(measure(auto(), (exp(one) for one in logs)))]
        half = t_quantile(len(kept) - 1) * stdev(kept) / sqrt(len(kept))
        assert half <= 0.02
        covered += abs(fmean(kept)) <= half
    assert 0.91 <= covered / studies <= 0.97  # 0.93, within three standard errors above and below


def test_the_limit_of_minutes_is_that_of_decoding_and_shared_by_the_batches():
    noisy = [10.0, 20.0] * 100  # seconds, and one for speculation
    assert sum(1 + ratio for ratio in noisy[:7]) < 120 <= sum(1 + ratio for ratio in noisy[:8])
    assert len(measure(auto(max_minutes=2.0), noisy)) == 8
    assert len(measure(auto(max_minutes=2.0), noisy, num_batches=4)) == 2


def test_a_slow_first_repeat_is_the_only_one():
    assert len(measure(auto(), [700.0] * 9)) == 1


@pytest.mark.parametrize("draft", ["self", "none"])
def test_a_run_says_how_many_repeats_it_took(tmp_path, draft):
    run = run_here(tmp_path, "scenario.repeats=auto", "scenario.precision=90%", f"draft={draft}")
    assert run.metrics["repeats"] >= repeats.FIRST


def test_how_often_a_run_is_repeated_is_no_part_of_its_id():
    def id_of(*overrides):
        return run_id(to_dict(compose(overrides)), {}, "cpu")

    often = (
        "scenario.repeats=auto",
        "scenario.repeats=7",
        "scenario.precision=5%",
        "scenario.max_minutes=3",
    )
    assert {id_of(one) for one in often} == {id_of()}
    assert id_of("scenario.profile_repeats=9") != id_of()


@pytest.mark.parametrize(
    ("asked", "result", "is_met"),
    [
        (Compare("compare", 3, 1), {"repeats": 2}, False),
        (Compare("compare", 3, 1), {"repeats": 2, "repeats_disturbed": 1}, True),
        (auto(), {"repeats": 5, "speedup_precision": 0.01}, True),
        (auto(), {"repeats": 4, "speedup_precision": 0.01}, False),
        (auto(), {"repeats": 9, "speedup_precision": 0.03, "repeats_minutes": 9.0}, False),
        (auto(), {"repeats": 9, "speedup_precision": 0.03, "repeats_minutes": 11.0}, True),
        (auto(), {"repeats": 1, "repeats_minutes": 11.0}, True),
    ],
)
def test_a_stored_result_has_what_is_asked_for(asked, result, is_met):
    assert Goal(asked).is_met_by(result) == is_met


@pytest.mark.parametrize(("given", "value"), [("2%", 0.02), ("0.5%", 0.005), ("0.1", 0.1)])
def test_a_percentage(given, value):
    assert compose([f"scenario.precision={given}"]).scenario.precision == pytest.approx(value)
