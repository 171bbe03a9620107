"""The acceptance study decodes what a run decodes, and its page says what its lines hold."""

import json
from dataclasses import replace

import pytest

import magicdec
from magicdec.costmodel.acceptance import Curves, published
from magicdec.costmodel.hardware import hardware_named
from magicdec.costmodel.round import Setup
from magicdec.costmodel.targets import architecture
from magicdec.policies import SnapKV
from tests.programs import ROOT

TARGET = "smollm2-135m-q4"


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import acceptance_study

    return acceptance_study


def test_two_cells_are_a_run_of_two_batches(study, tmp_path):
    """With random numbers, which depend on a row's number in the run, and with first tokens that are drawn too."""
    cell = study.Cell("code", 512, temperature=0.7, policy="quest", budget=64)
    measured = study.Study(["target=tiny"], None, rows=2, generated=24)
    lines = [measured.measure(replace(cell, batch=batch)) for batch in (0, 1)]
    overrides = [*measured.overrides(replace(cell, batch=1)), *cell.overrides]
    short = ["scenario.repeats=1", "scenario.profile_repeats=1", "wandb.mode=disabled"]
    found = magicdec.run([*overrides, *short, f"runs_dir={tmp_path}"])
    rows = [[accepted for _, accepted in row["rounds"]] for row in found.generations]
    counted = [[row.count(accepted) for accepted in range(cell.gamma + 1)] for row in rows]
    assert [counts for line in lines for counts in line["rounds"]] == counted
    assert sum(sum(counts) for counts in counted) == found.metrics["acceptance_rounds"]
