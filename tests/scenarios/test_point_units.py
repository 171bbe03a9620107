"""A profile that was killed times only the points that it lacks, in our engine and from outside."""

from contextlib import ExitStack
from itertools import product

import pytest

from magicdec.peers.steady import Burst
from magicdec.scenarios import outside, profile
from magicdec.units import WAYS
from tests.peers.stand_in import standing_in
from tests.runs import only_run
from tests.scenarios.sessions import Killed, session

GRID = ["scenario=profile", "scenario.batch_sizes=[1,2]", "scenario.context_lens=[16,32]"]
GRID += ["scenario.gammas=[2]", "batch.generate_len=24"]
CELLS = [*product([1, 2], [16, 32])]


class Clock:
    """What is timed: each point takes a millisecond longer than the one before."""

    def __init__(self, monkeypatch):
        self.times, self.dies_at = 0, None
        monkeypatch.setattr(outside, "steady", self._steady)
        monkeypatch.setattr(profile, "profile_round", self._round)
        for scenario in (outside, profile):  # which would measure this machine
            monkeypatch.setattr(scenario, "setup_of_profile", lambda *_: None)

    def read_ms(self):
        if self.times == self.dies_at:
            raise Killed
        self.times += 1
        return float(self.times)

    async def _steady(self, endpoint, rows, params):
        return Burst(1.0, (self.read_ms(),) * 2, 8.0, 2.0, 2.0)

    def _round(self, batch, repeats):
        return {"target_decode_ms": self.read_ms()}


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.mark.parametrize("dies_at", [0, 1, 3])
def test_our_engine(clock, tmp_path, dies_at):
    keys = [*GRID, "cache.budget=16"]
    clock.dies_at = dies_at
    with pytest.raises(Killed):
        session(tmp_path, *keys)
    assert only_run(tmp_path / "runs")["status"] == "failed"
    clock.dies_at = None
    run = session(tmp_path, *keys)
    times = [
        (line["batch_size"], line["context_len"], line["time/target_decode_ms"])
        for line in run.history
    ]
    assert times == [(*cell, 1 + number) for number, cell in enumerate(CELLS)]
    assert only_run(tmp_path / "runs")["id"] == run.metrics["id"], "in the same folder"
    assert session(tmp_path, *keys).metrics == run.metrics
    assert clock.times == len(CELLS), "nothing is timed twice"


@pytest.mark.parametrize("dies_at", [0, 3, 4, 6])
def test_servers_from_outside(clock, tmp_path, dies_at):
    """Those of the baseline and of the draft; one that lacks no point is not asked."""
    with ExitStack() as stack:
        servers = {
            key: stack.enter_context(standing_in(per_chunk=2, metrics="vllm"))
            for key in ("baseline_url", "url")
        }
        urls = [f"engine.{key}={url}" for key, (_, url) in servers.items()]
        clock.dies_at = dies_at
        with pytest.raises(Killed):
            session(tmp_path, "engine=openai", "data=random", *GRID, *urls)
        clock.dies_at, baseline = None, servers["baseline_url"][0]
        asked = len(baseline.asked)
        run = session(tmp_path, "engine=openai", "data=random", *GRID, *urls)
    assert (len(baseline.asked) > asked) == (dies_at < len(CELLS))
    steps = [(line["time/target_decode_ms"], line["time/round_ms"]) for line in run.history]
    assert steps == [(1 + number, 1 + number + len(CELLS)) for number in range(len(CELLS))]
    assert only_run(tmp_path / "runs")["id"] == run.metrics["id"], "in the same folder"
    assert clock.times == len(WAYS) * len(CELLS)
