"""A run under load that was killed measures only the levels that it lacks, on our engine and on a
server.
"""

from contextlib import ExitStack

import pytest

from magicdec.peers.answer import Choice, EndpointRequest, Event
from magicdec.peers.base import AcceptanceCounts
from magicdec.scenarios import serve, serve_endpoint
from magicdec.scenarios.level_units import LevelUnit, LevelUnits, ServedRequest
from magicdec.serving.load_generator import Load
from magicdec.serving.request import Params, Request
from magicdec.tracking.store import Run
from magicdec.units import WAYS
from tests.peers.stand_in import standing_in
from tests.programs import ROOT
from tests.runs import only_run
from tests.scenarios.sessions import Killed, session
from tests.tracking.sample import CONFIG

KEYS = ["scenario=serve", "scenario.concurrencies=[1,2]", "scenario.num_requests=2"]
KEYS += ["batch.size=2", "batch.context_len=40", "batch.generate_len=4"]
KEYS += ["data=text", f"data.path={ROOT}/LICENSE"]
SEARCH = ["scenario.slo=concurrency", "scenario.slo_most=2", "scenario.first_token_ms=1e9"]
LISTED = [(1, WAYS[0]), (1, WAYS[1]), (2, WAYS[0]), (2, WAYS[1])]
SEARCHED = [(1, WAYS[0]), (2, WAYS[0]), (1, WAYS[1]), (2, WAYS[1])]


class Passes:
    """Passes over all requests: (users, way). Each takes a second longer than the one before."""

    def __init__(self):
        self.done, self.seconds, self.dies_at = [], 0, None

    def send(self, request_class, jobs, load, way):
        if len(self.done) == self.dies_at:
            raise Killed
        self.done.append((load.value, way))
        self.seconds += 1
        return [self._answered(request_class, job) for job in jobs], float(self.seconds)

    def _answered(self, request_class, job):
        request = request_class(job.prompt, job.params)
        request.arrived = 0.0
        tokens = list(range(job.params.max_tokens))
        if isinstance(request, EndpointRequest):
            request.take(Event([Choice(token_ids=tokens)]))
            request.counts = AcceptanceCounts(1, 3, (1, 1, 0))
        else:
            request.receive(tokens)
            request.rounds[3, 2] += 1
        request.chunk_times = [float(self.seconds), 2.0 * self.seconds]
        return request


@pytest.fixture(params=["native", "openai"])
def engine(request, monkeypatch):
    """Passes on an engine, and the keys that choose it."""
    passes = Passes()

    def on_slots(slots, way, load, jobs, plan, progress):
        return passes.send(Request, jobs, load, way)

    async def on_server(endpoint, jobs, load, seed, advance):
        way = WAYS["baseline" not in endpoint.address.name]
        return passes.send(EndpointRequest, jobs, load, way)

    monkeypatch.setattr(serve, "_send", on_slots)
    monkeypatch.setattr(serve_endpoint, "under_load", on_server)
    if request.param == "native":
        yield passes, ["cache.budget=32", "draft.gamma=3"]
        return
    with ExitStack() as servers:
        urls = [servers.enter_context(standing_in())[1] for _ in WAYS]
        yield passes, ["engine=openai", f"engine.url={urls[0]}", f"engine.baseline_url={urls[1]}"]


@pytest.mark.parametrize("dies_at", [0, 3, 7])
def test_a_run_that_was_killed_measures_only_what_it_lacks(engine, tmp_path, dies_at):
    passes, keys = engine
    passes.dies_at = dies_at
    with pytest.raises(Killed):
        session(tmp_path, *KEYS, *SEARCH, *keys)
    before, passes.done, passes.dies_at = passes.done, [], None
    result = session(tmp_path, *KEYS, *SEARCH, *keys).metrics
    assert before + passes.done == LISTED + SEARCHED
    assert [result[f"{way}/slo_concurrency"] for way in WAYS] == [2, 2]
    assert only_run(tmp_path / "runs")["id"] == result["id"], "in the same folder"


def test_the_figures_are_those_of_both_sessions(engine, tmp_path):
    passes, keys = engine
    passes.dies_at = 3
    with pytest.raises(Killed):
        session(tmp_path, *KEYS, *keys)
    passes.dies_at = None
    run = session(tmp_path, *KEYS, *keys)
    assert [row["speedup_duration"] for row in run.history] == [1 / 2, 3 / 4]
    assert [row["acceptance_length"] for row in run.history] == [3, 3]
    assert run.metrics["speculative/wall_s"] == 4
    assert run.metrics["lossless/identical"] is True
    assert [row["speculative"] for row in run.generations] == [[0, 1, 2, 3]] * 2


def test_a_run_that_is_done_is_skipped(engine, tmp_path):
    passes, keys = engine
    first = session(tmp_path, *KEYS, *keys).metrics
    passes.done = []
    assert session(tmp_path, *KEYS, *keys).metrics == first
    assert passes.done == []


def test_a_server_that_may_be_another_one_by_now_is_a_warning(engine, tmp_path, capsys):
    passes, keys = engine
    passes.dies_at = 3
    with pytest.raises(Killed):
        session(tmp_path, *KEYS, *keys)
    passes.dies_at = None
    said = []
    for _ in ("to go on", "to skip"):
        session(tmp_path, *KEYS, *keys)
        shown = " ".join(capsys.readouterr().err.split())
        said.append("nothing tells whether the server is still the same; resume=false" in shown)
    assert said == ["engine=openai" in keys] * 2


def test_a_unit_is_read_back_as_it_was_and_taken_once(tmp_path):
    units = LevelUnits(Run.open(tmp_path, "abc", CONFIG))
    request = Request([1, 2, 3], Params(8))
    request.receive([4, 5])
    request.rounds[3, 1] += 2
    kept = ServedRequest.of(request)
    unanswered = ServedRequest(Request([1], Params()).stats, [], [], AcceptanceCounts(), "gone", 1)
    load = Load("rate", 0.5)
    unit = LevelUnit(
        load, WAYS[1], 1.5, [kept, unanswered], {"memory": 1.0}, AcceptanceCounts(1, 2, (1,))
    )
    units.add(unit, "level")
    again = LevelUnits(units.run)
    assert again.units == [unit]
    assert again.units[0].requests[0].rounds == {(3, 1): 2}
    assert again.take(Load("rate", 1.0), WAYS[1]) is None
    assert again.take(load, WAYS[1]) == unit
    assert again.take(load, WAYS[1]) is None
