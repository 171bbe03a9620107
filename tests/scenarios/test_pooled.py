"""resume=noisy: disturbed runs are measured again, and their attempts count together."""

import json
from math import sqrt
from statistics import median, stdev

import numpy as np
import pytest

from magicdec.config.load import compose
from magicdec.measure.intervals import t_quantile
from magicdec.scenarios import Job, run
from tests.test_run import SMALL


@pytest.fixture
def measure(tmp_path):
    """Measure a run of three repeats in a sweep."""

    def measured(*overrides):
        keys = [*SMALL, "batch.num_batches=2", "scenario.repeats=3", "tracker=[]", f"runs_dir={tmp_path}"]
        return run(compose([*keys, *overrides]), Job((), tmp_path / "sweeps" / "one"))

    return measured


def seconds(runs_dir, result):
    """The seconds of every row, by way: (rows, repeats)."""
    lines = [json.loads(line) for line in (runs_dir / result["id"] / "generations.jsonl").read_text().splitlines()]
    assert len({len(line["autoregressive"]) for line in lines}) == 1
    ways = ("autoregressive", "speculative")
    return {way: np.array([line["decode_s"][way] for line in lines]) for way in ways}, len(lines[0]["speculative"]) - 1


def disturb(runs_dir, result):
    path = runs_dir / result["id"] / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"noisy": True, "speedup_precision": 0.5}))


def test_a_disturbed_run_is_measured_again_and_all_repeats_count(measure, tmp_path):
    first = measure()
    disturb(tmp_path, first)
    second = measure("resume=noisy", "scenario.precision=0.1%")
    assert second["id"] == f"{first['id']}-2"
    assert (first["repeats"], second["repeats"]) == (3, 6)
    before, tokens = seconds(tmp_path, first)
    both, _ = seconds(tmp_path, second)
    for way, times in both.items():
        assert times[:, :3] == pytest.approx(before[way])
        tpot = 1e3 * median(times.mean(0) / tokens)
        assert second[f"{way}/time_per_output_token_ms"] == pytest.approx(tpot)
    ratios = both["autoregressive"].sum(0) / both["speculative"].sum(0)
    assert second["speedup"] == pytest.approx(median(ratios))
    assert second["speedup_precision"] == pytest.approx(t_quantile(5) * stdev(np.log(ratios)) / sqrt(6))
    disturb(tmp_path, second)
    assert measure("resume=noisy", "scenario.precision=0.1%")["repeats"] == 9


def test_what_is_known_well_enough_is_skipped(measure, tmp_path):
    first = measure()
    disturb(tmp_path, first)
    assert measure("resume=noisy", "scenario.precision=60%")["id"] == first["id"]
    assert measure()["id"] == first["id"], "resume=true does not look at noise"


def test_other_tokens_are_not_pooled(measure, tmp_path):
    first = measure()
    disturb(tmp_path, first)
    path = tmp_path / first["id"] / "generations.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["speculative"][0] += 1
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert measure("resume=noisy", "scenario.precision=0.1%")["repeats"] == 3


def test_a_damaged_file_is_not_pooled(measure, tmp_path):
    first = measure()
    disturb(tmp_path, first)
    path = tmp_path / first["id"] / "generations.jsonl"
    path.write_text(path.read_text()[:-40])
    assert measure("resume=noisy", "scenario.precision=0.1%")["repeats"] == 3
