"""The acceptance study decodes what a run decodes, and its page says what its lines hold."""

from dataclasses import replace

import pytest

import magicdec
from magicdec.costmodel.acceptance import published
from tests.programs import ROOT

TARGET = "smollm2-135m-q4"


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import acceptance_study

    return acceptance_study


@pytest.mark.slow
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


def test_intervals_are_those_of_the_documents(study):
    import acceptance_results

    def found(*rounds, gamma=1):
        line = {"rounds": rounds, "repeated": 0.0, "accuracy": None, "accuracy_autoregressive": None}
        return acceptance_results.found(study.Cell(gamma=gamma), [line])

    assert found([10, 30], [10, 30])[1:6] == (2, 80, 0.75, pytest.approx(0.75), pytest.approx(0.75))
    apart = found([40, 0], [0, 40])  # both documents drawn from one of them: a quarter of the resamples each
    assert (apart.alpha, apart.low, apart.high) == (pytest.approx(0.5), 0.0, 1.0)
    assert found([0, 1, 0, 1], gamma=3).alpha == pytest.approx(0.8105, abs=1e-4)  # 1 + a + a^2 + a^3 = 3


def test_shipped_acceptances_are_those_of_the_page(study):
    import acceptance_results

    lines = study.known(study.LINES)
    assert lines, "docs/results/smollm2.jsonl"
    cells = acceptance_results.pooled(lines)
    shipped = {(p.draft, p.policy, p.budget, p.context_len, p.task): p for p in published() if p.target == TARGET}
    for context, temperature, task in ((4096, 0.0, "text"), (1024, 0.0, "text")):
        for policy in study.MAIN:
            cell = study.Cell(context=context, temperature=temperature, policy=policy)
            point = shipped["self", policy, 256, context, task]
            assert point.alpha == pytest.approx(cells[cell].alpha, abs=5e-4)


def test_a_prediction_from_a_shipped_acceptance_says_so(tmp_path, capsys):
    overrides = [
        f"target={TARGET}",
        "hardware=h100",
        "cache=snapkv",
        "wandb.mode=disabled",
    ]
    found = magicdec.run(["scenario=predict", *overrides, f"runs_dir={tmp_path}"])
    assert found.metrics["predicted/alpha"] == pytest.approx(
        next(p.alpha for p in published() if p[:6] == (TARGET, "self", "snapkv", 256, 4096, "stdlib")), abs=0.02
    )
    assert "docs/results/smollm2.md" in found.metrics["predicted/acceptance_source"]
    assert "measured acceptance, predicted times" in " ".join(capsys.readouterr().out.split())
