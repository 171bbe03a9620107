"""The number of repeats of a run: as many as asked for, or as many as its interval takes."""

from itertools import count
from math import exp, sqrt
from statistics import fmean, stdev

import numpy as np
import pytest

from magicdec.config.load import compose, to_dict
from magicdec.config.schema import Compare
from magicdec.engine.decoder import Generation
from magicdec.measure.intervals import t_quantile
from magicdec.scenarios import repeats
from magicdec.tracking.identity import run_id
from tests.measure.test_metrics import GENERATION
from tests.runs import run_here


def generation(seconds):
    end = GENERATION.round_seconds[-1]
    times = [seconds * one / end for one in GENERATION.round_seconds]
    return Generation(GENERATION.tokens, GENERATION.accepted_RB, GENERATION.committed_RB, times)


def measure(settings, ratios, num_batches=1):
    """Measure as long as the settings ask for it. Return the repeats."""
    measured = []
    for _ in range(num_batches):
        for one, ratio in zip(repeats.repeats(settings, num_batches, measured), ratios, strict=False):
            one.autoregressive.append(generation(ratio))
            one.speculative.append(generation(1.0))
    return measured


def auto(precision=0.02, max_minutes=10.0):
    return Compare("compare", "auto", 1, precision, max_minutes)


def test_a_number_is_a_number():
    assert len(measure(Compare("compare", 4, 1), count(1))) == 4


def test_a_quiet_machine_stops_soon_and_every_batch_has_as_many_repeats():
    measured = measure(auto(), iter([1.5] * 100), num_batches=3)
    assert len(measured) == repeats.FIRST
    assert {len(one.speculative) for one in measured} == {3}


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


def test_the_limit_of_minutes_is_shared_by_the_batches(monkeypatch):
    monkeypatch.setattr(repeats.time, "monotonic", count(0, 10).__next__)
    noisy = [1.0, 2.0] * 100
    assert len(measure(auto(max_minutes=2.0), iter(noisy))) == 1 + 120 // 10 - 1
    assert len(measure(auto(max_minutes=2.0), iter(noisy * 9), num_batches=3)) == 1 + 40 // 10 - 1


def test_a_slow_first_repeat_is_the_only_one(monkeypatch):
    monkeypatch.setattr(repeats.time, "monotonic", count(0, 1000).__next__)
    assert len(measure(auto(), iter([1.0] * 9))) == 1


@pytest.mark.parametrize("draft", ["self", "none"])
def test_a_run_says_how_many_repeats_it_took(tmp_path, draft):
    run = run_here(tmp_path, "scenario.repeats=auto", "scenario.precision=90%", f"draft={draft}")
    assert run.metrics["repeats"] >= repeats.FIRST


def test_the_keys_of_auto_are_part_of_an_id_with_auto_alone():
    def id_of(*overrides):
        return run_id(to_dict(compose(overrides)), {}, "cpu")

    limits = ("scenario.precision=5%", "scenario.max_minutes=3")
    assert {id_of(limit) for limit in limits} == {id_of()}
    ids = {id_of("scenario.repeats=auto"), *(id_of("scenario.repeats=auto", limit) for limit in limits)}
    assert len(ids | {id_of()}) == 4


@pytest.mark.parametrize(("given", "value"), [("2%", 0.02), ("0.5%", 0.005), ("0.1", 0.1)])
def test_a_percentage(given, value):
    assert compose([f"scenario.precision={given}"]).scenario.precision == pytest.approx(value)
