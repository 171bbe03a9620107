"""Calibration of this machine by a few steps of our engine."""

import pytest

from magicdec.calibrate import steps
from magicdec.commands import calibrate
from magicdec.config.load import compose
from magicdec.planning.resolve import resolve
from magicdec.planning.setup import setup_of


def test_this_machine_is_calibrated_in_a_few_steps(here, monkeypatch, capsys):
    pytest.importorskip("scipy")
    monkeypatch.setitem(steps.GRIDS, "cpu", ((1, 2), (256, 512), (2,)))
    monkeypatch.setattr(steps, "BUDGET", 64)
    for _ in range(2):  # it may replace what it wrote itself
        assert calibrate.main(["target=tiny", "hardware=cpu"]) == 0
    assert "conf/hardware/calibrated.yaml: predictions take it" in capsys.readouterr().out
    keys = [
        "scenario=predict",
        "hardware=calibrated",
        "batch.size=2",
        "batch.context_len=512",
        "cache.budget=64",
    ]
    assert setup_of(resolve(compose(keys))).target_time.total > 0


def test_rows_describe_what_was_timed(monkeypatch):
    monkeypatch.setitem(steps.GRIDS, "cpu", ((1,), (256,), (2,)))
    measured = steps.measure_here(
        ["target=tiny", "hardware=cpu", "draft=model", "cache=snapkv", "cache.budget=48"]
    )
    (row,) = measured.rows
    assert (row.draft, row.policy, row.kv_budget) == ("tiny-draft", "snapkv", 48)
    assert (row.element_bytes, row.weight_bytes) == (4, 2), "of a float32 run: stored as bfloat16"


@pytest.mark.parametrize("share", [None, "other programs took 81% of the processors"])
def test_a_calibration_of_a_busy_machine_warns(here, monkeypatch, capsys, share):
    pytest.importorskip("scipy")
    monkeypatch.setitem(steps.GRIDS, "cpu", ((1, 2), (256, 512), (2,)))
    monkeypatch.setattr(steps, "BUDGET", 64)
    monkeypatch.setattr(steps.Interference, "description", lambda _: share)
    assert calibrate.main(["target=tiny", "hardware=cpu"]) == 0
    said = "predictions with hardware=calibrated will be too slow"
    warnings = [line for line in capsys.readouterr().err.splitlines() if said in line]
    remedy = "stop the other programs, then calibrate again"
    assert warnings == ([] if share is None else [f"warning: {share}: {said}; {remedy}"])
