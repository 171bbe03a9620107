"""The simulated servers of the diagnosis, and the thresholds that follow from them."""

from dataclasses import asdict, replace

import diagnosis
import pytest
from faulty_server import Faults, burst
from page import RESULTS
from render import read_csv

from magicdec.costmodel.diagnosis import ACCEPTANCE, CAUSES, PAYS, Thresholds
from magicdec.costmodel.round import round_times
from magicdec.scenarios.outside_lines import MeasuredPoint
from magicdec.units import FREE, WAYS

STRONG = {"entry_reads": 0.8, "draft": 3.0, "round_waits": 1.0, "lost": 0.4}


@pytest.fixture(scope="module")
def healthy():
    """A healthy server with a model as its draft, on a GPU."""
    found = (case for case in diagnosis.cases("fix") if case.server.setup.draft.name == "model")
    case = next(found)
    return case._replace(contexts=[1024, 8192], batches=[1, 4, 16], gammas=[2, 8])


def test_the_steps_of_a_simulated_server_are_found_from_outside(healthy):
    """T_T, T_V and T_D as the simulation has them, within its noise."""
    batch, context, gamma = 4, 4096, 4
    plain = burst(healthy.server, MeasuredPoint(WAYS[0], 0, batch, context), 64)
    free = burst(healthy.server, MeasuredPoint(FREE, gamma, batch, context), 64)
    draft = burst(healthy.server, MeasuredPoint(WAYS[1], gamma, batch, context), 64)
    at = healthy.server.setup.at(batch=batch, context=round(context + plain.decoded))
    times = round_times(at, gamma)
    assert plain.step_ms == pytest.approx(1e3 * at.target_time.total, rel=0.08)
    verify_s = times.verify.total + times.overhead.total
    assert free.step_ms == pytest.approx(1e3 * verify_s, rel=0.08)
    found = (draft.step_ms - free.step_ms) / gamma
    assert found == pytest.approx(1e3 * times.draft.total, rel=0.3)
    assert free.gamma == pytest.approx(gamma, rel=0.1)


@pytest.mark.parametrize("cause", CAUSES)
def test_a_strong_fault_of_a_simulated_server_is_named(healthy, cause):
    name = diagnosis.RANGES[cause][0]
    faulty = replace(healthy.server, faults=Faults(**{name: STRONG[name]}))
    found = diagnosis.diagnosed(healthy._replace(server=faulty))
    assert (found.cause, found.named) == (cause, (cause,)), found.sentence


def test_a_healthy_simulated_server_is_not_accused(healthy):
    found = diagnosis.diagnosed(healthy)
    assert found.named == ()
    assert found.cause in (PAYS, ACCEPTANCE)


def test_the_thresholds_are_those_of_the_half_that_fixes_them():
    """If this fails, the half that judges has to be another one: these cases are known by now."""
    chosen = diagnosis.best_thresholds(read_csv(RESULTS / "diagnosis-fix.csv"))
    assert chosen == {key: one for key, one in asdict(Thresholds()).items() if key in chosen}
    assert chosen.keys() == asdict(Thresholds()).keys() - {"residuals"}
