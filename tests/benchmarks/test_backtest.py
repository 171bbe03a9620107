"""The backtest of the cost model: published measurements, their predictions, and the page about
them.
"""

import re
from collections import Counter
from statistics import median

import backtest
import pytest

from tests.programs import ROOT

RESULTS = ROOT / "docs/results"
REQUIRED = {
    "publisher",
    "source",
    "model",
    "hardware",
    "engine",
    "draft",
    "batch",
    "context",
    "gamma",
    "speedup",
}

LOOKUPS = ("mixed, synthetic", 4)  # task and gamma of some that differ in their batch
# What a row of refutation.csv may assume where its source is silent.
ASSUMABLE = {"hardware", "model", "batch", "context", "gamma", "acceptance"}


@pytest.fixture(scope="module")
def refuting():
    return backtest.read_csv(RESULTS / "refutation.csv")


def test_measurements_are_complete_and_from_many_sources():
    rows = backtest.read_csv(RESULTS / "backtest.csv")
    assert len(rows) >= 80
    assert len({row["publisher"] for row in rows}) >= 8
    assert all(row[column] is not None for row in rows for column in REQUIRED)
    assert all(row["source"].startswith("https://") and row["assumed"] for row in rows)
    assert all(1 <= (row["acceptance_length"] or 1) <= row["gamma"] + 1 for row in rows)
    assert any(row["speedup"] < 1 for row in rows)


@pytest.mark.parametrize("name", ["backtest", "refutation", "backtest-blocks"])
def test_predictions_are_those_of_the_cost_model(name):
    """If this fails, run python benchmarks/backtest.py."""
    stored = backtest.read_csv(RESULTS / f"{name}-predictions.csv")
    rows = backtest.read_csv(RESULTS / f"{name}.csv")
    assert [row["measured"] for row in stored] == [row["speedup"] for row in rows]
    for row, known in list(zip(rows, stored, strict=True))[::10]:
        needed = backtest.predict(row).get("needed_length", 0.0)
        assert needed == pytest.approx(known["needed_length"] or 0.0, rel=1e-4)


def test_measurements_of_blocks_are_complete_and_judge_nothing():
    rows = backtest.read_csv(RESULTS / "backtest-blocks.csv")
    matched = {(row["draft"], row["draft_model"]) for row in rows if row["source"].endswith("2342")}
    assert len(matched) == 6
    assert all(row[column] is not None for row in rows for column in REQUIRED)
    assert all(row["source"].startswith("https://") and row["assumed"] for row in rows)
    assert all(1 <= row["acceptance_length"] <= row["gamma"] + 1 for row in rows)
    assert any(row["speedup"] < 1 for row in rows)
    assert backtest.BLOCKS_FILE not in backtest.FILES


def test_a_block_costs_one_pass():
    row = next(
        row
        for row in backtest.read_csv(RESULTS / "backtest-blocks.csv")
        if row["draft"] == "dflash"
    )
    steps = [backtest.predict(row | {"gamma": gamma})["round_steps"] for gamma in (7, 15)]
    chain = [
        backtest.predict(row | {"gamma": gamma, "draft": "eagle3"})["round_steps"]
        for gamma in (7, 15)
    ]
    assert steps[1] / steps[0] < 1.1
    assert chain[1] / chain[0] > 1.2


def test_the_headline_follows_from_the_predictions():
    rows = backtest.read_csv(RESULTS / "backtest-predictions.csv")
    known = [row for row in rows if row["predicted"] and not row["carried"]]
    right = sum((row["predicted"] > 1) == (row["measured"] > 1) for row in known)
    error = median(abs(row["predicted"] / row["measured"] - 1) for row in known)
    opening = " ".join((RESULTS / "backtest.md").read_text(encoding="utf-8").split("![")[0].split())
    counts = re.search(r"Of (\d+) published .* in \*\*(\d+)\*\* .* \*\*([\d.]+)%\*\*", opening)
    assert counts is not None
    assert (int(counts[1]), int(counts[2])) == (len(known), right)
    assert float(counts[3]) == pytest.approx(100 * error, abs=0.06)


def test_batches_carry_the_acceptance_of_the_smallest():
    """As if the acceptance of the smallest were stated of them; a lookup's matches follow from
    it.
    """
    rows = [row for row in backtest.read_csv(RESULTS / "refutation.csv") if row["draft"] == "ngram"]
    small, large, *_ = (row for row in rows if (row["task"], row["gamma"]) == LOOKUPS)
    carried = backtest.carried([small, large], [backtest.predict(row) for row in (small, large)])
    assert "predicted" not in carried[0]
    length = carried[0]["needed_length"]
    stated = backtest.predict(large | {"acceptance_length": length})
    assert carried[1]["predicted"] == stated["predicted"]
    assert carried[1]["carried"] is True
    assert carried[1]["acceptance_length"] is None


def test_rows_that_can_refute_are_many_and_of_many_sources(refuting):
    rows_of = Counter(row["publisher"] for row in refuting)
    assert len(refuting) >= 150
    assert len(rows_of) >= 12
    assert max(rows_of.values()) <= 0.15 * len(refuting)
    assert sum(row["speedup"] < 1 for row in refuting) >= 60
    assert sum(row["batch"] >= 32 for row in refuting) >= 60
    assert sum(row["context"] > 16_000 for row in refuting) >= 40


def test_rows_that_can_refute_are_new(refuting):
    known = {row["source"] for row in backtest.read_csv(RESULTS / "backtest.csv")}
    assert known.isdisjoint(row["source"] for row in refuting)
    assert len({tuple(row.values()) for row in refuting}) == len(refuting)


def test_rows_that_can_refute_state_what_was_assumed(refuting):
    for row in refuting:
        assumed = set((row["assumes"] or "").split())
        assert assumed <= ASSUMABLE
        assert len(assumed) <= 2
        assert row["assumed"]
        assert row["source"].startswith("https://")


def test_rows_to_predict_are_of_known_models_and_machines(refuting):
    for row in refuting:
        if row["unpredicted"]:
            continue
        assert all(row[column] is not None for column in REQUIRED)
        assert 1 <= (row["acceptance_length"] or 1) <= row["gamma"] + 1
        assert backtest.model_named(row["model"]).num_layers
        assert backtest.machine(row).bandwidth > 0
        if row["draft"] == "model":
            assert backtest.model_named(row["draft_model"]).num_layers


def test_rows_that_are_not_predicted_say_why(refuting):
    stored = backtest.read_csv(RESULTS / "refutation-predictions.csv")
    assert [row["unpredicted"] for row in stored] == [row["unpredicted"] for row in refuting]
    assert all((row["needed_length"] is None) == bool(row["unpredicted"]) for row in stored)


def test_scores_follow_from_the_predictions():
    rows = [
        row for row in backtest.read_csv(RESULTS / "refutation-predictions.csv") if row["predicted"]
    ]
    stored = {
        (row["by"], row["stratum"]): row
        for row in backtest.read_csv(RESULTS / "refutation-scores.csv")
    }
    right = [(row["predicted"] > 1) == (row["measured"] > 1) for row in rows]
    assert stored["all", "all"]["right"] == sum(right)
    assert stored["all", "all"]["rows"] == len(rows)
    large = [row for row in rows if row["batch"] >= 32]
    assert stored["batch", "32 and more"]["rows"] == len(large)
    error = median(abs(row["predicted"] / row["measured"] - 1) for row in large)
    assert stored["batch", "32 and more"]["error"] == pytest.approx(error, rel=1e-4)
    for by in ("batch", "context", "draft", "source"):
        assert sum(row["rows"] for key, row in stored.items() if key[0] == by) == len(rows)


def test_a_constant_has_half_the_balanced_accuracy():
    rows = [
        {"measured": measured, "error": 0.1, "right": measured > 1}
        for measured in (1.2, 1.5, 2.0, 0.9)
    ]
    scored = backtest.score(rows)
    assert (scored["right"], scored["constant"], scored["balanced"]) == (3, 3, 0.5)


def test_texts_name_the_scores_on_rows_that_can_refute():
    score = backtest.read_csv(RESULTS / "refutation-scores.csv")[0]
    claim = f"On {score['rows']} harder ones (losses, large batches, long contexts) it is"
    for text in (ROOT / "README.md", ROOT / "docs/cost-model.md"):
        assert f"{claim} {score['error']:.0%}" in " ".join(text.read_text(encoding="utf-8").split())
