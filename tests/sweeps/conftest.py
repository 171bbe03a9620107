"""Runs that take a moment, and say when they begin."""

import pytest

import magicdec.planning.duration
import magicdec.planning.fits
import magicdec.scenarios
from magicdec.config.prediction_settings import Assumed
from magicdec.report import page
from tests import quick_launch
from tests.programs import ROOT


@pytest.fixture
def starts(tmp_path, monkeypatch):
    """The folder that gets a file for each run that is begun."""
    folder = tmp_path / "starts"
    folder.mkdir()
    monkeypatch.setenv("QUICK_STARTS", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder


@pytest.fixture
def quick(starts, monkeypatch):
    """Runs of this process and those forked from it take a moment, and pages have no charts."""
    monkeypatch.setattr(page, "vega", lambda: "")
    monkeypatch.setattr(magicdec.scenarios, "_scenario", lambda config: quick_launch)
    monkeypatch.setattr(Assumed, "reads_store", False)  # as quick_launch has it
    monkeypatch.setattr(magicdec.planning.fits, "num_bytes", quick_launch.num_bytes)
    monkeypatch.setattr(magicdec.planning.duration, "seconds", quick_launch.seconds)
    return starts
