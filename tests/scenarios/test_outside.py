"""scenario=profile of servers: stand-ins with known times, and our own server's settings."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from magicdec.config.load import compose
from magicdec.config.registry import DRAFTS
from magicdec.kernels.library import compiler
from magicdec.peers.steady import Burst
from magicdec.planning.resolve import resolve
from magicdec.scenarios import Job, outside, run
from magicdec.scenarios.diagnosed import possible
from magicdec.scenarios.outside import prepare
from magicdec.scenarios.outside_lines import MeasuredPoint
from magicdec.scenarios.outside_lines import lines as lines_of
from magicdec.scenarios.peer import load
from magicdec.units import FREE
from tests.checkpoints import add_mtp, make_checkpoint
from tests.peers.stand_in import standing_in
from tests.refusals import refusal
from tests.runs import TINY
from tests.tracking.sample import lines

GRID = ["scenario=profile", "scenario.batch_sizes=[1,2]", "scenario.context_lens=[32]"]
GRID += ["batch.generate_len=24", "data=random", "tracker=[]", "engine.retries=0"]
STEP_S, VERIFY_S, ROUND_S = 0.02, 0.03, 0.05
PROPOSES = {"per_chunk": 3, "metrics": "vllm"}  # two a round, and all are accepted


def profiled(tmp_path, *overrides: str) -> tuple[dict, list[dict]]:
    """The result and the history of a profile."""
    config = compose(["engine=openai", *GRID, f"runs_dir={tmp_path}", *overrides])
    result = run(config, Job())
    return result, lines(tmp_path / result["id"] / "history.jsonl")


def test_the_parts_of_a_round_are_those_of_the_servers(tmp_path, capsys):
    """The free draft's round is the verification, and the draft takes the rest."""
    with ExitStack() as stack:
        behaviours = {
            "baseline_url": {"per_chunk": 1, "chunk_s": STEP_S},
            "free_url": {**PROPOSES, "chunk_s": VERIFY_S},
            "url": {**PROPOSES, "chunk_s": ROUND_S},
        }
        servers = {key: stack.enter_context(standing_in(**one)) for key, one in behaviours.items()}
        urls = [f"engine.{key}={url}" for key, (_, url) in servers.items()]
        _, history = profiled(tmp_path, *urls, "scenario.gammas=[2]")
    assert [(line["batch_size"], line["gamma"]) for line in history] == [(1, 2), (2, 2)]
    for line in history:
        step, verify, draft, whole = (
            line[f"time/{name}_ms"] for name in ("target_decode", "verify", "draft", "round")
        )
        assert 1e3 * STEP_S < step < 1.4e3 * STEP_S, "never early, and late on a busy machine"
        assert 1e3 * VERIFY_S < verify < 1.4e3 * VERIFY_S
        assert whole == pytest.approx(verify + 2 * draft)
        assert draft == pytest.approx(1e3 * (ROUND_S - VERIFY_S) / 2, rel=0.4)
        assert (line["acceptance_length"], line["proposed"]) == pytest.approx((3, 2), rel=0.1)
        low, high = line["time/target_decode_ms_ci95"]
        assert low <= step <= high
    assert "in which all requests of a burst decode" in " ".join(capsys.readouterr().out.split())


def test_times_of_the_model_alone_stand_next_to_those_of_a_server(tmp_path, capsys):
    """As `vllm bench forward` measures them: without what a server does around a step."""
    request = {"query_len": 1, "kv_len": 44, "num_draft_tokens": 0, "chunked": False}
    case = {"case": "decode", "requests": [request], "median_us": 12345.0, "ranks": [{}]}
    (tmp_path / "forward.json").write_text(json.dumps([case]))
    with standing_in(per_chunk=1, chunk_s=STEP_S) as (_, url):
        forward = f"scenario.forward={tmp_path / 'forward.json'}"
        _, history = profiled(tmp_path, f"engine.url={url}", "scenario.gammas=[2]", forward)
    assert [line.get("forward/target_decode_ms") for line in history] == [12.345, None]
    assert "12.3" in capsys.readouterr().out


def test_times_that_were_rewritten_make_another_run(tmp_path):
    """The path is the same; a file without times is refused before anything is measured."""
    file, found = tmp_path / "forward.json", []
    keys = ["engine=openai", "engine.url=http://127.0.0.1/v1", *GRID, f"scenario.forward={file}"]
    request = {"query_len": 1, "kv_len": 44, "num_draft_tokens": 0}
    for us in (1000.0, 2000.0):
        file.write_text(json.dumps([{"requests": [request], "median_us": us, "ranks": [{}]}]))
        found.append(prepare(compose(keys)).fingerprints)
    assert found[0]["scenario.forward"] != found[1]["scenario.forward"]
    file.unlink()
    with refusal(f"scenario.forward={file}: No such file or directory"):
        prepare(compose(keys))


@pytest.mark.parametrize(
    ("behaviour", "known"),
    [({"per_chunk": 1}, "time/target_decode_ms"), (PROPOSES, "time/round_ms")],
)
def test_a_server_alone_is_what_it_reports(tmp_path, behaviour, known, capsys):
    """Its gamma is the one that it counts; without a free draft, a round stays whole."""
    with standing_in(**behaviour, chunk_s=0.01) as (_, url):
        _, history = profiled(tmp_path, f"engine.url={url}")
    times = {key for line in history for key in line if key.startswith("time/")}
    assert times - {f"{known}_ci95"} == {known}
    gammas = [line.get("gamma") for line in history]
    speculates = known == "time/round_ms"
    assert gammas == ([2, 2] if speculates else [None, None])
    assert ("cannot be told apart" in capsys.readouterr().out) == speculates


def test_a_free_draft_that_proposes_too_little_is_no_verification():
    for proposed, is_known in ((2.0, False), (3.9, True), (None, False)):
        free = Burst(1.0, (50.0, 50.0), 8.0, 1.5, proposed)
        (line,) = lines_of({MeasuredPoint(FREE, 4, 1, 32): free})
        assert line["free/proposed"] == (proposed or 0)
        assert ("time/verify_ms" in line) == is_known


def test_an_address_may_name_a_server_for_each_gamma(tmp_path):
    overrides = [*GRID, "scenario.gammas=[2,4]"]
    address = 'engine.free_url="http://127.0.0.1:800{gamma}/v1"'
    config = compose(["engine=openai", "engine.url=http://127.0.0.1:8000/v1", address, *overrides])
    engine = load(prepare(config), gamma=4)
    assert engine.has_any_gamma
    assert engine.profiled_ways == ("", FREE)


def test_requests_that_never_decode_together_are_refused(tmp_path):
    with standing_in() as (_, url), refusal("ask for longer answers"):
        profiled(tmp_path, f"engine.url={url}", "batch.generate_len=2")


@pytest.mark.parametrize(
    "overrides",
    [
        ["draft=self", "cache=snapkv", "cache.budget=48", "draft.gamma=3"],
        ["draft=model", "cache.budget=32", "cache.num_sink=8"],
        ["draft=ngram", "draft.max_ngram=5", "batch.prefill_chunk=64"],
        ["draft=ngram", "target.implementation=transformers"],
        ["draft=model", "cache.budget=32", "draft.model.implementation=transformers"],
        ["draft=eagle3", "cache.budget=32"],
        ["draft=dflash", f"draft.model.path={TINY / 'dflash'}", "draft.gamma=3"],
        ["draft=mtp", f"draft.model.path={TINY / 'mtp'}"],
    ],
)
def test_our_server_is_started_with_the_settings_of_the_run(overrides):
    """The command line of the server composes to the same draft and cache."""
    plan = resolve(compose(["engine=magicdec", "hardware=cpu", "batch.size=2", *overrides]))
    server = load(plan)
    config = compose(["scenario=serve", *server.overrides(speculative=True)])
    theirs, ours = config.draft, plan.config.draft
    for key in ("name", "gamma", "quantization", "synthetic_acceptance"):
        assert getattr(theirs, key) == getattr(ours, key), key
    if ours.is_model:
        assert config.cache == plan.config.cache
    for key, model in config.models.items():
        if key == "target" or not theirs.listens:
            assert model.implementation == plan.config.models[key].implementation
    if theirs.listens:
        assert Path(theirs.model.path).samefile(plan.draft.folder)
    assert (config.batch.size, config.batch.generate_len) == (2, 2)
    assert config.batch.context_len + 2 == server.spec.max_len
    assert config.batch.prefill_chunk == plan.config.batch.prefill_chunk
    assert not compose(["scenario=serve", *server.overrides(speculative=False)]).speculates


def test_our_server_names_the_drafts_that_it_serves(monkeypatch):
    monkeypatch.setattr(DRAFTS["ngram"].facts, "serves", False)
    with refusal("draft.name=ngram cannot be served; one of: none, dflash, eagle3, "):
        resolve(compose(["engine=magicdec", "hardware=cpu", "draft=ngram"]))


def test_our_server_finds_modules_in_the_targets_own_checkpoint(tmp_path):
    folder = make_checkpoint(tmp_path / "glm", "glm4-moe")
    add_mtp(folder, make_checkpoint(tmp_path / "other", "glm4-moe", seed=1), 1)
    keys = ["engine=magicdec", "scenario=serve", "hardware=cpu", "batch.context_len=64"]
    keys += ["target=custom", f"target.path={folder}", "draft=mtp", "cache.budget=32"]
    plan = resolve(compose(keys))
    config = compose(["scenario=serve", *load(plan).overrides(speculative=True)])
    assert (config.draft.name, config.draft.model.path) == ("mtp", None)


@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
def test_our_server_keeps_weights_in_as_many_bytes_as_our_engine(monkeypatch):
    stored = "magicdec.planning.resolved.checkpoint.stored_in_bfloat16"
    monkeypatch.setattr(stored, lambda *_: {"layers.0.qkv.weight"})
    for engine in ("native", "magicdec"):
        keys = [f"engine={engine}", "scenario=profile", "hardware=cpu", "batch.size=2"]
        assert resolve(compose([*keys, "hardware.dtype=float32"])).weight_bytes == 2


def test_our_free_draft_accepts_as_told():
    plan = resolve(compose(["engine=magicdec", "hardware=cpu", "batch.size=2"]))
    server = load(plan, gamma=4, free_acceptance=0.6)
    free = type(server)(server._with_free_draft()).overrides(speculative=True)
    draft = compose(["scenario=serve", *free]).draft
    assert (draft.name, draft.gamma, draft.synthetic_acceptance) == ("ngram", 4, 0.6)


@pytest.mark.soak
def test_our_own_server_from_outside(tmp_path):
    """All parts of a round are found, at every batch with as many slots as rows."""
    grid = ["scenario.batch_sizes=[1,2]", "scenario.context_lens=[64]", "scenario.gammas=[2]"]
    keys = ["hardware=cpu", "cache.budget=32", "batch.generate_len=24", "tracker=[]"]
    result = run(compose(["engine=magicdec", *grid, *keys, f"runs_dir={tmp_path}"]), Job())
    history = lines(tmp_path / result["id"] / "history.jsonl")
    assert [(line["batch_size"], line["gamma"]) for line in history] == [(1, 2), (2, 2)]
    for line in history:
        assert min(line[f"time/{name}_ms"] for name in ("target_decode", "verify", "round")) > 0
        assert line["proposed"] == pytest.approx(2, rel=0.2)


def test_times_that_no_step_can_take_are_left_out():
    """Below 0, or a hundredth of the limit: of a client that was late for the chunks before."""
    line = {"batch_size": 1, "context_len": 512, "gamma": 2, "time/round_ms": 12.0}
    line |= {"time/target_decode_ms": 0.0137, "limit/target_decode_ms": 2.0}
    line |= {"time/verify_ms": 11.0, "limit/verify_ms": 2.2, "time/verify_ms_ci95": [10.0, 12.0]}
    negative = {"time/draft_ms": -4.47, "limit/draft_ms": 0.4, "time/draft_ms_ci95": [-5.0, -4.0]}
    (kept,) = possible([line | negative])
    assert kept.keys() == line.keys() - {"time/target_decode_ms", "limit/target_decode_ms"}
    (cached,) = possible([line | {"time/target_decode_ms": 0.7}])
    assert cached["time/target_decode_ms"] == 0.7, "from a cache that is faster than the memory"
    (impossible,) = possible([line | {"time/round_ms": 0.02}])
    assert "time/round_ms" not in impossible, "shorter than its verification"


@pytest.mark.parametrize(("name", "time_ms"), [("verify", 0.02), ("round", 0.02), ("round", -1.0)])
def test_a_draft_is_not_timed_by_a_time_that_no_step_can_take(name, time_ms):
    """Its time is the difference of the two, over gamma."""
    line = {"gamma": 2, "time/verify_ms": 11.0, "limit/verify_ms": 2.2, "time/round_ms": 12.0}
    line |= {"time/draft_ms": 0.5, "time/draft_ms_ci95": [0.4, 0.6], "limit/draft_ms": 0.4}
    (kept,) = possible([line | {f"time/{name}_ms": time_ms}])
    others = {"verify": {"time/round_ms"}, "round": {"time/verify_ms", "limit/verify_ms"}}
    assert kept.keys() == {"gamma"} | others[name]


def test_of_an_unknown_machine_no_time_is_below_0(tmp_path, monkeypatch):
    """The free draft's round takes 20 ms, which is longer than the 18 ms of the draft's own."""
    steps_ms = iter([15.0, 18.0, 20.0])  # without a draft, with it, and with the free one

    async def timed(endpoint, rows, params):
        return Burst(1.0, (next(steps_ms),) * 3, 8.0, 2.0, 2.0)

    monkeypatch.setattr(outside, "steady", timed)
    monkeypatch.setattr(outside, "setup_of_profile", lambda *given: None)
    with standing_in(**PROPOSES) as (_, url), standing_in(per_chunk=1) as (_, baseline):
        urls = [f"engine.url={url}", f"engine.free_url={url}", f"engine.baseline_url={baseline}"]
        grid = ["scenario.batch_sizes=[1]", "scenario.gammas=[2]"]
        _, (line,) = profiled(tmp_path, *urls, *grid)
    assert (line["time/round_ms"], line["time/verify_ms"]) == (18.0, 20.0)
    assert "time/draft_ms" not in line, "it would be -1 ms"


@pytest.mark.parametrize(
    ("sizes", "remedy"),
    [
        ("[1,2]", "the machine is too busy for these times: stop other work"),
        ("[2,3]", "it, or its machine, is too busy; send less load"),
    ],
)
def test_of_a_late_client_nothing_is_diagnosed(tmp_path, capsys, monkeypatch, sizes, remedy):
    """That is said once, with the number of points; each server's end is told meanwhile."""

    async def late(endpoint, rows, params):
        return Burst(1.0, (20.0, 20.0), 8.0, 2.0, 2.0, late_ms=7.0)

    monkeypatch.setattr(outside, "steady", late)
    monkeypatch.setattr("magicdec.tracking.progress.DELAY_S", 0.0)
    with standing_in(**PROPOSES) as (_, url), standing_in(per_chunk=1) as (_, baseline):
        result, _ = profiled(
            tmp_path,
            f"engine.url={url}",
            f"engine.baseline_url={baseline}",
            f"scenario.batch_sizes={sizes}",
            "hardware=h100",
        )
    told = capsys.readouterr()
    assert result["diagnosis/sentence"] == "cannot be judged: the client was late"
    assert "diagnosis/cause" not in result
    assert "diagnosis: cannot be judged: the client was late" in told.out
    said = " ".join(told.err.split())
    assert said.count("late by") == 1
    assert "warning: at 4 of 4 points this client was late by 7.0 ms on average, and" in said
    assert remedy in said
    assert "profiling autoregressive, batch" in said
    assert "server 2 of 2: " in said
