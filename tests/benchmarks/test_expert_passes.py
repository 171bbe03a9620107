"""Published passes with experts: the page has what is predicted of them now."""

import expert_passes
import pytest
from page import RESULTS
from render import read_csv


@pytest.fixture(scope="module")
def measured():
    return read_csv(expert_passes.MEASURED)


@pytest.fixture(scope="module")
def machine(measured):
    return expert_passes.calibrated(measured)


def test_published_rows_are_what_is_predicted_now(measured):
    now = expert_passes.with_predictions(measured)
    then = read_csv(RESULTS / "today-passes.csv")
    assert len(now) == len(then) == 4 * 3 * 6
    for row, published in zip(now, then, strict=True):
        for figure in ("ms", "uniform", "power_law", "exponent"):
            assert row[figure] == pytest.approx(published[figure], rel=1e-3)


def test_the_machine_is_that_of_the_dense_model(measured, machine):
    changed = [
        row if row["target"] == expert_passes.DENSE else row | {"seconds": 9 * row["seconds"]}
        for row in measured
    ]
    assert expert_passes.calibrated(changed) == machine


def test_the_exponent_is_that_of_passes_at_the_shortest_context(measured, machine):
    made = [row | {"seconds": expert_passes.predicted_ms(row, machine, 0.8)} for row in measured]
    longer = [row | {"seconds": 1.0} if row["context"] > 512 else row for row in made]
    assert expert_passes.fitted_exponent(longer, machine) == 0.8
