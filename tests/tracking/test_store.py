"""The run store: names, attempts, the log, and readers that meet what they should not."""

import json
import logging
import os
import re
from pathlib import Path

import pytest
import yaml

from magicdec.commands import report, show
from magicdec.errors import UserError
from magicdec.measure.trust import noise, slowness
from magicdec.report.rows import read_rows
from magicdec.tracking import store
from magicdec.tracking.columns import flatten
from magicdec.tracking.lock import locked
from magicdec.tracking.reader import attempts, iter_runs, latest, load_run
from magicdec.tracking.run_files import ROW, read_lines
from magicdec.tracking.run_id import run_id
from magicdec.tracking.store import Run
from tests.tracking.sample import (
    CONFIG,
    GENERATIONS,
    HISTORY,
    METRICS,
    finished_run,
    lines,
    result_of,
    with_changes,
)


def identity(config=CONFIG, fingerprints=None, device="a cpu"):
    return run_id(config, fingerprints or {"target": "f00"}, device)


# Names


def test_id_is_short_and_ignores_order_number_format_and_where_and_in_which_company():
    assert re.fullmatch(r"[0-9a-f]{12}", identity())
    shuffled = {
        key: dict(reversed(v.items())) if isinstance(v, dict) else v
        for key, v in reversed(CONFIG.items())
    }
    assert identity(shuffled) == identity()
    written = [yaml.safe_load(text) for text in ("{rate: 1.0e-1, n: 1}", "{rate: 0.10, n: 1.0}")]
    assert identity(written[0]) == identity(written[1])
    assert identity({"gammas": (1, 2)}) == identity({"gammas": [1, 2]})
    elsewhere = with_changes(wandb={"mode": "disabled"}) | {"runs_dir": "x", "resume": False}
    assert identity(elsewhere | {"hydra": {"a": 1}, "sweep": {"b": 2}}) == identity()


def test_id_differs_where_the_result_may():
    changes = [{"draft": {"gamma": 5}}, {"data": {"seed": 1}}, {"sampling": {"temperature": 1e-9}}]
    ids = [identity(with_changes(**one)) for one in [*changes, {"target": {"name": "a"}}, {}]]
    ids += [identity(fingerprints={"target": "f01"}), identity(device="a gpu")]
    ids += [identity({"a": value}) for value in (1, True, "1", None, 0.5)]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("key", ["target", "draft.model"])
def test_id_ignores_in_which_folder_a_model_lies(key):
    def of(name, path, fingerprint):
        model = {"name": name, "path": path, "weights": "checkpoint"}
        changes = {"target": model} if key == "target" else {"draft": {"model": model}}
        return identity(
            with_changes(**changes), {key: fingerprint} if fingerprint else {"other": "f00"}
        )

    own = of("tiny", "magicdec/models/tiny/target", "f00")
    assert of("tiny", "/elsewhere", "f00") == own != of("tiny", "/elsewhere", "f01")
    assert of("a", "/data/a", "f00") == of("b", "/data/b", "f00") != of("a", "/data/a", "f01")
    # Without weights the name decides: its architecture is in the configuration, its known
    # acceptance follows from it.
    for read in (None, "random"):
        assert of("tiny", "/elsewhere", read) == of("tiny", "magicdec/models/tiny/target", read)
        assert of("a", "/data/a", read) == of("a", "/data/b", read) != of("b", "/data/b", read)


def test_attention_used_to_be_a_group(tmp_path):
    run = Run.open(tmp_path, "abc", CONFIG | {"attention": {"name": "sdpa"}})
    assert load_run(run.folder)["config"] == CONFIG
    assert flatten(load_run(run.folder))["attention"] == "sdpa"


# A run's life


def test_running_then_done(tmp_path):
    run = Run.open(tmp_path / "deep" / "runs", "abc", CONFIG)
    assert result_of(run) == run.result
    assert run.result["status"] == "running"
    assert run.result["pid"] == os.getpid()
    assert yaml.safe_load((run.folder / "config.yaml").read_text()) == CONFIG

    run.finish(METRICS | {"status": "failed"}, iter(GENERATIONS), iter(HISTORY))
    result = result_of(run)
    assert result == run.result
    assert {key: result[key] for key in METRICS} == METRICS
    assert (result["status"], result["id"], result["attempt"]) == (
        "done",
        "abc",
        1,
    ), "metrics cannot claim a status"
    assert all(result[key] for key in ("python", "torch", "version"))
    assert "OMP_NUM_THREADS=1" in result["openmp"]
    assert result["started"] <= result["finished"]
    assert result["finished"].endswith("+00:00")
    assert 0 <= result["duration_s"] < 60
    assert lines(run.folder / "generations.jsonl") == GENERATIONS
    assert lines(run.folder / "history.jsonl") == HISTORY
    rows = [f"{name}.jsonl" for name in ("generations", "history", "samples", "system")]
    assert {path.name for path in run.folder.iterdir()} == {"config.yaml", "result.json", *rows}


def test_what_json_cannot_hold_becomes_null(tmp_path):
    run = Run.open(tmp_path, "abc", CONFIG | {"path": tmp_path, "sizes": (1, 2)})
    run.finish(
        {"nan": float("nan"), "inf": float("-inf")}, [], [{"round": 0, "accepted": float("nan")}]
    )
    assert (result_of(run)["nan"], result_of(run)["inf"]) == (None, None)
    assert lines(run.folder / "history.jsonl") == [{"round": 0, "accepted": None}]
    assert load_run(run.folder)["config"] == CONFIG | {"path": str(tmp_path), "sizes": [1, 2]}


# Attempts


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_attempt_is_a_run_of_its_own(tmp_path):
    first = finished_run(tmp_path)
    before = content(first.folder)
    failed = Run.open(tmp_path, "abc", CONFIG)
    failed.fail("a bug: too much", "crashed", HISTORY * 2)
    third = Run.open(tmp_path, "abc", with_changes(batch={"size": 9}))
    third.finish({"speedup": 2.5}, GENERATIONS * 2, HISTORY)
    assert content(first.folder) == before, (
        "neither a failure nor a later result touches what was done"
    )
    assert lines(failed.folder / "history.jsonl") == HISTORY * 2
    assert (result_of(failed)["kind"], result_of(failed)["reason"]) == (
        "crashed",
        "a bug: too much",
    )
    runs = list(iter_runs(tmp_path))
    assert [(run["id"], run["attempt"], run["status"], run.get("speedup")) for run in runs] == [
        ("abc", 1, "done", 1.5),
        ("abc-2", 2, "failed", None),
        ("abc-3", 3, "done", 2.5),
    ]
    assert [run["config"]["batch"]["size"] for run in runs] == [8, 8, 9]
    assert all(Path(run["folder"]) == tmp_path / run["id"] for run in runs)


def test_attempts_are_counted_as_numbers_and_by_run(tmp_path):
    for name in ("abc", "abc-2", "abc-10", "abcd-11", "ab"):
        Run(tmp_path, name).folder.mkdir()
        (tmp_path / name / "result.json").write_text('{"status": "done"}')
    (tmp_path / "abc-12").mkdir()
    assert [path.name for path in attempts(tmp_path, "abc")] == ["abc", "abc-2", "abc-10"]
    assert Run.open(tmp_path, "abc", CONFIG).id == "abc-11"


def test_an_attempt_whose_process_died_is_marked_by_the_next(tmp_path):
    dead = Run.open(tmp_path, "abc", CONFIG)
    (dead.folder / "result.json").write_text(json.dumps(dead.result | {"pid": os.getpid() + 1}))
    (dead.folder / ".generations.jsonl.1.tmp").touch()
    shown = load_run(dead.folder)
    with locked(tmp_path / "abc"):
        assert load_run(dead.folder)["status"] == "running"
        assert Run.open(tmp_path, "abc", CONFIG).id == "abc-2"
        assert load_run(tmp_path / "abc-2")["status"] == "running"
    for result in (shown, result_of(dead)):
        assert (result["status"], result["kind"]) == ("failed", "interrupted")
        assert "duration_s" not in result, "nobody knows when it was killed"
        assert f"process {os.getpid() + 1} on" in result["reason"]
    assert not list(dead.folder.glob(".*"))


def test_the_latest_attempt_is_the_last_that_is_done():
    def run(name, status, **facts):
        return {"id": name, "status": status} | facts

    a = [run("a", "done"), run("a-2", "done"), run("a-3", "failed"), run("a-4", "running")]
    b = [run("b-2", "failed"), run("b-10", "failed", kind="crashed")]
    c = [run("c", "failed", kind="invalid"), run("c-2", "failed", kind="invalid")]
    d = [run("d", "failed", kind="crashed"), run("d-2", "failed", kind="invalid")]
    assert sorted(run["id"] for run in latest(a + b + c + d)) == ["a-2", "b-10", "d"]


@pytest.mark.parametrize(
    ("time", "earlier", "step", "predicted", "factors", "words"),
    [
        (
            14.5,
            [5.6, 9.0],
            14,
            13,
            (14.5 / 5.6, 14 / 13),
            "2.6 times as long as in the fastest earlier attempt",
        ),
        (5.6, [14.5, None], 5.0, 9.0, (1.0, 1.0), ""),
        (5.6, [], 5.0, 2.0, (None, 2.5), "2.5 times as long as predicted"),
        (5.6, [5.0], None, 2.0, (5.6 / 5.0, None), ""),
        (None, [5.0], None, None, (None, None), ""),
    ],
)
def test_a_run_that_is_slow_throughout_is_noisy(time, earlier, step, predicted, factors, words):
    baseline = "autoregressive/time_per_output_token_ms"
    result = {
        baseline: time,
        "time/target_decode_ms": step,
        "predicted/target_decode_ms": predicted,
    }
    before = [{"status": "done", baseline: one} for one in earlier] + [
        {"status": "failed", baseline: 0.1}
    ]
    found = slowness(result, before)
    assert tuple(found.get(f"agreement/{name}") for name in ("earlier", "prediction")) == factors
    assert ", ".join(noise(result | found)).removeprefix("an autoregressive step took ") == words


# Log


def test_log_file_takes_details_that_the_terminal_does_not(tmp_path):
    def fail():
        with run.log_to_file():
            package.info("a detail")
            package.warning("a warning")
            raise ZeroDivisionError

    root, package = logging.getLogger(), logging.getLogger("magicdec.somewhere")
    shown = []
    console = logging.Handler()
    console.emit = shown.append
    root.addHandler(console)
    run = Run.open(tmp_path, "abc", CONFIG)
    before = (list(root.handlers), logging.getLogger("magicdec").level, console.level)
    try:
        with pytest.raises(ZeroDivisionError):
            fail()
        assert (list(root.handlers), logging.getLogger("magicdec").level, console.level) == before
        with Run.open(tmp_path, "abc", CONFIG).log_to_file():
            package.info("another attempt")
        package.warning("after the run")
    finally:
        root.removeHandler(console)
    text = (run.folder / "log.txt").read_text()
    for expected in ("INFO magicdec.somewhere: a detail", "a warning", "ZeroDivisionError"):
        assert expected in text
    assert "run abc-2\n" in (tmp_path / "abc-2" / "log.txt").read_text()
    assert "after the run" not in text
    assert [record.getMessage() for record in shown] == ["a warning", "after the run"]


# Readers


def test_readers_pass_over_what_is_torn_or_foreign(tmp_path, caplog):
    finished_run(tmp_path)
    contents = {
        "torn": b'{"status": "do',
        "foreign": b'{"a": 1}',
        "list": b"[1]",
        "empty": b"",
        "binary": b"\xff\xfe\x00",
        "deep": b'{"status": "done", "speedup": %s}' % (b"[" * 5000 + b"]" * 5000),
        "surrogate": b'{"status": "done", "device": "\\ud800"}',
        "nan": b'{"status": "done", "speedup": NaN}',
        "huge": b'{"status": "done", "speedup": 1%s}' % (b"0" * 400),
        "a status": b'{"status": ["done"]}',
        "overrides": b'{"status": "done", "overrides": [1]}',
    }
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_bytes(content)
    (tmp_path / "no result").mkdir()
    (tmp_path / "a file").touch()
    assert [run["id"] for run in iter_runs(tmp_path)] == ["abc"]
    warned = [record.getMessage() for record in caplog.records]
    assert sorted(Path(line.partition("/result.json: ")[0]).name for line in warned) == sorted(
        contents
    )
    assert all(line.endswith("; the run is left out") for line in warned)
    assert load_run(tmp_path / "no result") == {}
    assert list(iter_runs(tmp_path / "nowhere")) == []
    assert list(iter_runs(tmp_path / "a file")) == []
    assert Run.open(tmp_path, "foreign", CONFIG).id == "foreign-2", (
        "an existing folder is not written over"
    )


NESTED = "[" * 200_000
SOUND = yaml.safe_dump(CONFIG)
NO_JSON = "holds what JSON has no type for"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("", "target: Field required"),
        ("a: [", "while parsing a flow node"),
        (
            yaml.safe_dump(with_changes(draft={"gamma": "many"})),
            r"draft\.gamma.*: Input should be ",
        ),
        (f"{SOUND}a: {NESTED}", "(nested too deeply|.*nesting depth)"),  # ours, and PyYAML's own
        (f"{SOUND}a: {{}}\nb: &b [*b, *b]", "an anchor or alias, b"),
        (f"{SOUND}a: .nan", f"a: {NO_JSON}"),
        (f"{SOUND}batch: {{size: 2026-01-01}}", f"batch: {NO_JSON}"),
        (
            f"{SOUND}target: {{name: .nan}}\nbatch: {{size: [1], context_len: {{a: x}}}}\n1: 2",
            f"target: {NO_JSON}",
        ),
        (f"{SOUND}batch: 5\nscenario: serve", "scenario: Input should be a valid dictionary"),
        (
            f"{SOUND}batch: !!python/object:os.system x",
            "could not determine a constructor for the tag",
        ),
    ],
)
def test_a_damaged_configuration_is_named(tmp_path, config, why):
    run = finished_run(tmp_path)
    (run.folder / "config.yaml").write_text(config)
    with pytest.raises(UserError, match=f"^{run.folder}/config.yaml: {why}.*$"):
        load_run(run.folder)


def test_lines_end_where_json_lines_do(tmp_path, caplog):
    """Not at the separators that text may hold, such as U+2028."""
    run = finished_run(tmp_path)
    rows = [{"text": "one\u2028two\x85\x0bthree"}, {"text": ""}]
    run.finish({}, [], rows)
    path = run.folder / "history.jsonl"
    assert read_lines(path, ROW) == rows
    path.write_text(f'{path.read_text()}{{"text": NaN}}\n{{"te')
    assert read_lines(path, ROW) == rows
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}, line 3: text: holds what JSON has no type for, or is nested too deeply; 2 of 4"
        " lines are left out"
    ]


def test_paths_are_shown_as_one_would_type_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert store.shown(tmp_path / "runs" / "abc") == "runs/abc"
    assert store.shown(Path("runs")) == "runs"
    assert store.shown(Path("/elsewhere/runs")) == "/elsewhere/runs"


def test_a_store_from_before_units_is_read(capsys):
    """Its runs have no folder of units, and ids that are made differently."""
    store_dir = Path(__file__).with_name("before_units")
    (row,) = read_rows(store_dir)
    assert (row["id"], row["status"], row["lossless/passed"]) == ("07d3b06a44bf", "done", True)
    assert row["speedup"] == pytest.approx(0.503, abs=0.01)
    assert report.main([str(store_dir)]) == 0
    assert show.main(["07d3", "--runs-dir", str(store_dir)]) == 0
    printed = capsys.readouterr().out
    assert "07d3b06a44bf" in printed
    assert "continuation, speculative" in printed
