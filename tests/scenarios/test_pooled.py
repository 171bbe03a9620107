"""resume=noisy: disturbed runs are measured again, and their attempts count together."""

import json
from functools import partial
from math import sqrt
from statistics import median, stdev

import numpy as np
import pytest

from magicdec.measure.intervals import t_quantile
from magicdec.scenarios import Job
from tests.runs import run_here

PRECISELY = ("resume=noisy", "scenario.precision=0.1%")


@pytest.fixture
def measure(tmp_path):
    """Measure a run of three repeats in a sweep."""
    return partial(
        run_here, tmp_path, "batch.num_batches=2", "scenario.repeats=3", job=Job((), tmp_path / "sweeps" / "one")
    )


@pytest.fixture
def disturbed(measure):
    return disturb(measure())


def disturb(run):
    changes = {"noisy": True, "speedup_precision": 0.5}
    (run.folder / "result.json").write_text(json.dumps(run.metrics | changes))
    return run


def seconds(run):
    """The seconds of every row, by way: (rows, repeats)."""
    rows = run.generations
    assert len({len(row["autoregressive"]) for row in rows}) == 1
    ways = ("autoregressive", "speculative")
    return {way: np.array([row["decode_s"][way] for row in rows]) for way in ways}, len(rows[0]["speculative"]) - 1


def test_a_disturbed_run_is_measured_again_and_all_repeats_count(measure, disturbed):
    second = measure(*PRECISELY)
    assert second.folder.name == f"{disturbed.folder.name}-2"
    assert (disturbed.metrics["repeats"], second.metrics["repeats"]) == (3, 6)
    before, tokens = seconds(disturbed)
    both, _ = seconds(second)
    for way, times in both.items():
        assert times[:, :3] == pytest.approx(before[way])
        tpot = 1e3 * median(times.mean(0) / tokens)
        assert second.metrics[f"{way}/time_per_output_token_ms"] == pytest.approx(tpot)
    ratios = both["autoregressive"].sum(0) / both["speculative"].sum(0)
    assert second.metrics["speedup"] == pytest.approx(median(ratios))
    assert second.metrics["speedup_precision"] == pytest.approx(t_quantile(5) * stdev(np.log(ratios)) / sqrt(6))
    disturb(second)
    assert measure(*PRECISELY).metrics["repeats"] == 9


def test_what_is_known_well_enough_is_skipped(measure, disturbed):
    assert measure("resume=noisy", "scenario.precision=60%").folder == disturbed.folder
    assert measure().folder == disturbed.folder, "resume=true does not look at noise"


def other_tokens(text):
    first, *rest = text.splitlines()
    row = json.loads(first)
    row["speculative"][0] += 1
    return "\n".join([json.dumps(row), *rest])


@pytest.mark.parametrize("change", [other_tokens, lambda text: text[:-40]], ids=["other tokens", "damaged"])
def test_other_tokens_and_damaged_files_are_not_pooled(measure, disturbed, change):
    path = disturbed.folder / "generations.jsonl"
    path.write_text(change(path.read_text()))
    assert measure(*PRECISELY).metrics["repeats"] == 3
