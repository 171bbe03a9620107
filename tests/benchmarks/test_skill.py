"""How skill is judged: the halves of the published measurements."""

import backtest
import skill

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
