"""The predictions of trained heads: benchmarks/heads_predictions.py."""

from itertools import product

import heads_predictions as heads
import pytest

CELL = ("device", "batch", "context")


@pytest.fixture(scope="module")
def rows():
    return heads.predictions()


def test_the_csv_file_is_what_the_program_predicts(rows, tmp_path):
    """If this fails, run python benchmarks/heads_predictions.py."""
    heads.write_csv(tmp_path / "heads.csv", rows)
    known = heads.read_csv(heads.FOLDER / "heads.csv")
    found = heads.read_csv(tmp_path / "heads.csv")
    assert len(found) == len(known)
    for ours, theirs in zip(found, known, strict=True):
        for key, value in ours.items():
            assert (
                pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
            ) == theirs[key]


def test_speedups_are_the_published_lengths_over_the_steps_of_a_round(rows):
    lengths = heads.published_lengths()
    assert sorted(lengths) == [2, 3, 4, 5, 6, 7]
    for row in rows:
        if row["draft"] == "EAGLE-3":
            assert row["acceptance_length"] == lengths[row["gamma"]]
        if row["speedup"] is not None:
            assert row["speedup"] * row["needed_length"] == pytest.approx(row["acceptance_length"])
    unknown = {row["draft"] for row in rows if row["speedup"] is None}
    assert unknown == {"self", "DFlash", "P-EAGLE"}, "no acceptance is invented"


def test_a_streaming_cache_gains_more_the_more_kv_there_is(rows):
    by = {
        (row["draft"], row["cache"], *(row[key] for key in CELL)): row["needed_length"]
        for row in rows
    }
    cells = {tuple(row[key] for key in CELL) for row in rows}
    assert ("8xH100", 64, 32000) in cells
    assert ("H100", 64, 100000) not in cells, "which does not fit"
    for cell, draft in product(cells, ("DFlash", "P-EAGLE", "MTP")):
        assert by[draft, "streaming", *cell] <= by[draft, "full", *cell]
    for draft in ("DFlash", "P-EAGLE"):
        gains = [
            by[draft, "full", "8xH100", 64, s] / by[draft, "streaming", "8xH100", 64, s]
            for s in (1000, 32000)
        ]
        assert gains[0] < gains[1]


def test_one_pass_over_one_layer_costs_what_a_step_of_a_head_costs():
    setup = heads.Setup(heads.TARGET, heads.hardware_named("h100", "magicdec"), 16, 4000)
    single = heads.Head(
        layers=1, gamma=1, taps=heads.HeadConfig.like(heads.TARGET).num_taps, own_vocabulary=True
    )
    at, times = heads.parallel_times(setup, single, "full")
    assert times.round_s == pytest.approx(heads.round_times(at, 1).round_s)
    four = heads.parallel_times(setup, single._replace(layers=4), "full")[1]
    assert four.draft.kv == pytest.approx(4 * times.draft.kv)
