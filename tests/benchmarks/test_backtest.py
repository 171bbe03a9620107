"""The backtest of the cost model: published measurements, their predictions, and the page about them."""

import re
from statistics import median

import backtest
import pytest

from tests.programs import ROOT

RESULTS = ROOT / "docs/results"
REQUIRED = {"publisher", "source", "model", "hardware", "engine", "draft", "batch", "context", "gamma", "speedup"}


def test_measurements_are_complete_and_from_many_sources():
    rows = backtest.read_csv(RESULTS / "backtest.csv")
    assert len(rows) >= 80
    assert len({row["publisher"] for row in rows}) >= 8
    assert all(row[column] is not None for row in rows for column in REQUIRED)
    assert all(row["source"].startswith("https://") and row["assumed"] for row in rows)
    assert all(1 <= (row["acceptance_length"] or 1) <= row["gamma"] + 1 for row in rows)
    assert any(row["speedup"] < 1 for row in rows)


def test_predictions_are_those_of_the_cost_model():
    """If this fails, run python benchmarks/backtest.py."""
    stored = backtest.read_csv(RESULTS / "backtest-predictions.csv")
    rows = backtest.read_csv(RESULTS / "backtest.csv")
    assert [row["measured"] for row in stored] == [row["speedup"] for row in rows]
    for row, known in list(zip(rows, stored, strict=True))[::10]:
        assert backtest.predict(row)["needed_length"] == pytest.approx(known["needed_length"], rel=1e-4)


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
    row = dict.fromkeys(backtest.SERIES, "same") | {"acceptance_length": None}
    small = row | {"batch": 1, "measured": 2.0, "round_steps": 1.5, "needed_length": 3.0}
    large = row | {"batch": 64, "measured": 0.9, "round_steps": 2.0, "needed_length": 1.8}
    carried = backtest.carried([dict(small), dict(large)])
    assert "predicted" not in carried[0]
    assert carried[1]["predicted"] == 1.5
    assert carried[1]["right"] is False
