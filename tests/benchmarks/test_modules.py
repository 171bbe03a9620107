"""The program that measures transformers' modules: its predictions, by cells that are made up."""

import modules
import pytest

from magicdec.costmodel import hardware
from magicdec.costmodel.hardware import configured
from magicdec.costmodel.round import round_times
from magicdec.costmodel.stacks import OWN_STACK

TIMES = ("target", "draft", "verify")


def cells() -> list[dict]:
    """Return cells of a machine that behaves as the cost model says."""
    machine = configured(hardware.CPU, 1, 30.0, 0.1, stack=OWN_STACK)
    rows = []
    for batch in (1, 4, 16):
        for context in (1024, 4096):
            for gamma in (1, 8):
                row = {"model": "qwen3-moe", "batch": batch, "context": context, "gamma": gamma}
                row |= dict.fromkeys([f"{step}_ms" for step in (*TIMES, "round")], 1.0)
                setup = modules.fitted_row(row).setup(modules.architecture, machine)
                times = round_times(setup, gamma)
                row |= {f"{step}_ms": 1e3 * getattr(times, step).total for step in TIMES}
                row |= {"round_ms": 1e3 * times.round_s, "bandwidth": 30e9, "rate": 1e11}
                rows.append(row)
    return rows


def test_each_half_of_the_cells_predicts_the_other():
    rows = cells()
    predicted = modules.with_predictions(rows)
    assert [row["gamma"] for row in predicted] == [row["gamma"] for row in rows]
    for row in predicted:
        assert row["predicted_verify_ms"] == pytest.approx(row["verify_ms"], rel=0.05)
        assert row["verify_error"] == row["predicted_verify_ms"] / row["verify_ms"] - 1


def test_a_cell_does_not_predict_itself():
    """Cells of one half that are slower are predicted too fast by the other."""
    rows = cells()
    slow = [
        row | {"target_ms": 2 * row["target_ms"], "verify_ms": 2 * row["verify_ms"]}
        if (row["batch"], row["context"]) in ((1, 1024), (4, 4096), (16, 1024))
        else row
        for row in rows
    ]
    errors = {
        (row["batch"], row["context"]): row["verify_error"]
        for row in modules.with_predictions(slow)
    }
    assert errors[1, 1024] < -0.4
    assert errors[1, 4096] > 0.5
