"""Repeats are added to a run on another engine: after a kill, and by a sweep that asks for more."""

import pytest

from magicdec.measure.metrics import RowTimes
from magicdec.peers.base import AcceptanceCounts, PeerGeneration
from magicdec.peers.transformers import TransformersPeer
from magicdec.scenarios.peer_units import PeerUnit, PeerUnits
from magicdec.tracking.store import Run
from tests.runs import only_run
from tests.scenarios.sessions import Killed, session
from tests.tracking.sample import CONFIG

KEYS = ("engine=transformers", "draft=ngram", "batch.size=1", "batch.num_batches=2")
PASSES = 2 * 2 * 3  # ways, batches, repeats


class Engine:
    """Passes of the engine: (prompts before these, speculative); the warm-ups do not count."""

    def __init__(self, monkeypatch):
        self.passes, self.dies_at = [], None
        monkeypatch.setattr(TransformersPeer, "__init__", lambda peer, spec: self.load(peer, spec))
        monkeypatch.setattr(TransformersPeer, "generate", lambda peer, *given: self.decode(*given))
        monkeypatch.setattr(TransformersPeer, "peak_bytes", 1 << 30)
        self.loads = 0

    def load(self, peer, spec):
        peer.spec = spec
        self.loads += 1

    def decode(self, prompts, generate_len, speculative, first=None):
        if first is not None:
            if len(self.passes) == self.dies_at:
                raise Killed
            self.passes.append((first, speculative))
        seconds = 1.0 if speculative else 2.0
        times = [RowTimes(0.5, seconds * len(self.passes), generate_len - 1) for _ in prompts]
        tokens = [list(range(generate_len)) for _ in prompts]
        counts = AcceptanceCounts(4, 12, (3, 2, 1)) if speculative else AcceptanceCounts()
        return PeerGeneration(tokens, times, counts)


@pytest.fixture
def engine(monkeypatch):
    return Engine(monkeypatch)


@pytest.fixture
def measure(tmp_path):
    """Measure three repeats in a sweep of its own each time."""
    return lambda *keys: session(tmp_path, *KEYS, "scenario.repeats=3", *keys).metrics


@pytest.mark.parametrize("dies_at", [0, 1, 5, 6, 9, PASSES - 1])
def test_a_run_that_was_killed_measures_only_what_it_lacks(engine, measure, tmp_path, dies_at):
    engine.dies_at = dies_at
    with pytest.raises(Killed):
        measure()
    before, engine.passes, engine.dies_at = engine.passes, [], None
    result = measure()
    assert before + engine.passes == [(n, fast) for fast in (False, True) for n in [0, 1] * 3]
    assert (result["status"], result["repeats"]) == ("done", 3)
    assert only_run(tmp_path / "runs")["id"] == result["id"], "in the same folder"


def test_the_figures_are_those_of_all_units(engine, measure, tmp_path):
    """Every pass takes longer than the one before, so that each can be told from the others."""
    engine.dies_at = 7
    with pytest.raises(Killed):
        measure()
    engine.dies_at = None
    result = measure()
    seconds = {"autoregressive": [2 * (1 + 2), 2 * (3 + 4), 2 * (5 + 6)]}
    seconds["speculative"] = [7 + 8, 9 + 10, 11 + 12]
    assert result["autoregressive/decode_s"] == seconds["autoregressive"][1]
    assert result["speculative/decode_s"] == seconds["speculative"][1]
    ratios = [a / b for a, b in zip(*seconds.values(), strict=True)]
    assert (result["speedup_wall_min"], result["speedup_wall_max"]) == (min(ratios), max(ratios))
    assert (result["acceptance_rounds"], result["memory/peak_gib"]) == (6 * 4, 1.0)


def test_a_sweep_that_asks_for_more_repeats_adds_them(engine, measure):
    first = measure()
    engine.passes = []
    second = measure("scenario.repeats=4")
    assert engine.passes == [(0, False), (1, False), (0, True), (1, True)]
    assert (second["id"], second["repeats"]) == (first["id"], 4)
    loads = engine.loads
    assert measure("scenario.repeats=2")["repeats"] == 4, "four are enough for two"
    assert engine.loads == loads


def test_a_run_that_failed_has_the_figures_of_its_complete_repeats(engine, measure, tmp_path):
    engine.dies_at = 2 * 3 + 1  # all of one way, half a repeat of the other
    with pytest.raises(Killed):
        measure()
    failed = only_run(tmp_path / "runs")
    assert (failed["status"], failed["repeats"]) == ("failed", 3)
    assert "autoregressive/decode_s" in failed
    assert "speedup" not in failed


def test_a_unit_is_read_back_as_it_was(tmp_path):
    stored = PeerUnits(Run.open(tmp_path, "abc", CONFIG), 2)
    times = [RowTimes(0.25, 1.5, 2), RowTimes(0.5, 0.0, 0)]
    generation = PeerGeneration([[1, 2, 3], [4]], times, AcceptanceCounts(1, 3, (1, 1, 0), 2))
    stored.add(PeerUnit(1, "speculative", generation, "vllm 1", 3 << 40), 1)
    assert PeerUnits(stored.run, 2).units == stored.units
