"""How skill is judged: the halves of the published measurements."""

from math import exp

import backtest
import pytest
import skill

from magicdec.costmodel.confidence import shipped
from tests.programs import ROOT

# The sources by which the model may be changed; all others judge it.
SEEN = {
    "GPUStack",
    "Hugging Face, LayerSkip",
    "ROCm, SSD",
    "vLLM, FR-Spec",
    "EAGLE-3 paper",
    "InventiveHQ",
    "PocketLLM",
    "SpecBundle",
    "Swiss AI, Apertus",
    "llama.cpp threads",
    "spec-decode-advisor",
}


def test_sources_are_split_by_their_names():
    publishers = {
        row["publisher"]
        for name in ("backtest", "refutation")
        for row in backtest.read_csv(ROOT / f"docs/results/{name}.csv")
    }
    assert {name for name in publishers if not skill.is_held_back(name)} == SEEN


def test_parts_of_a_source_are_in_one_half():
    assert skill.is_held_back("A source (vLLM)") == skill.is_held_back("A source")


def row_of(source, measured, predicted, batch=64):
    return {
        "publisher": source,
        "source": f"https://{source}",
        "measured": measured,
        "predicted": predicted,
        "before": 2.0,
        "roofline": predicted,
        "batch": batch,
        "context": 100,
        "draft": "eagle3",
    }


def test_sources_weigh_equally_whatever_their_rows():
    many = [row_of("many", 1.5, 1.5) for _ in range(9)]
    single = [row_of("single", 0.5, 1.0001)]
    scored = skill.skill(many + single)
    assert scored["predicted_right"] == pytest.approx(0.5)
    assert scored["constant"] == pytest.approx(0.5)
    assert scored["small_batches_right"] == pytest.approx(0.5)
    assert scored["before_balanced"] == 0.5, "it always says that it pays"


def test_a_constant_has_no_skill_and_a_seer_has_all():
    rows = [row_of(str(n), measured, measured) for n, measured in enumerate((0.7, 0.8, 1.2, 1.4))]
    scored = skill.skill(rows)
    assert (scored["predicted_balanced"], scored["before_balanced"]) == (1.0, 0.5)
    assert scored["predicted_error"] == 0.0
    assert (scored["balanced_low"], scored["balanced_high"]) == (1.0, 1.0)


def test_published_skill_follows_from_the_predictions():
    """If this fails, run python benchmarks/backtest.py."""
    stored = backtest.read_csv(ROOT / "docs/results/skill.csv")
    judging = list(backtest.judging_rows())
    assert all(skill.is_held_back(row["publisher"]) for row in judging)
    everything = skill.skill(judging)
    assert stored[0]["stratum"] == "all"
    for key, value in everything.items():
        assert stored[0][key] == pytest.approx(value, rel=1e-4), key
    confidence = skill.judged_confidence(judging)
    assert 0.8 <= confidence["coverage"] <= 0.97
    assert confidence["brier"] < confidence["base_brier"]


def test_shipped_errors_are_those_of_the_held_back_rows():
    """If this fails, run python benchmarks/backtest.py."""
    served = [error for error in shipped() if not error.case.is_calibrated]
    judging = list(backtest.judging_rows())
    assert len(served) == len(judging)
    for error, row in list(zip(served, judging, strict=True))[::20]:
        assert exp(error.log_ratio) == pytest.approx(row["measured"] / row["predicted"], rel=1e-4)
