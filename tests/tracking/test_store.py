"""The run store: names, attempts, the log, and readers that meet what they should not."""

import logging
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from magicdec.tracking import store
from magicdec.tracking.reader import iter_runs, load_run
from magicdec.tracking.store import Run, run_id
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


def test_id_is_short_and_filename_safe():
    assert re.fullmatch(r"[0-9a-f]{12}", identity())


def test_id_ignores_order_and_number_format():
    shuffled = {key: dict(reversed(v.items())) if isinstance(v, dict) else v for key, v in reversed(CONFIG.items())}
    assert identity(shuffled) == identity()
    written = [yaml.safe_load(text) for text in ("{rate: 1.0e-1, n: 1}", "{rate: 0.10, n: 1.0}")]
    assert identity(written[0]) == identity(written[1])
    assert identity({"gammas": (1, 2)}) == identity({"gammas": [1, 2]})


def test_id_ignores_where_and_in_which_company():
    elsewhere = with_changes(wandb={"mode": "disabled"}) | {"runs_dir": "x", "resume": False}
    assert identity(elsewhere | {"hydra": {"a": 1}, "sweep": {"b": 2}}) == identity()


@pytest.mark.parametrize(
    "changes",
    [{"draft": {"gamma": 5}}, {"data": {"seed": 1}}, {"sampling": {"temperature": 1e-9}}, {"target": {"path": None}}],
)
def test_id_differs_where_the_result_may(changes):
    assert identity(with_changes(**changes)) != identity()


def test_id_differs_by_checkpoint_device_and_type():
    ids = [identity(), identity(fingerprints={"target": "f01"}), identity(device="a gpu")]
    ids += [identity({"a": value}) for value in (1, True, "1", None, 0.5)]
    assert len(set(ids)) == len(ids)


# A run's life


def test_running_then_done(tmp_path):
    run = Run.open(tmp_path / "deep" / "runs", "abc", CONFIG)
    assert result_of(run) == run.result
    assert run.result["status"] == "running"
    assert run.result["pid"] == os.getpid()
    assert yaml.safe_load((run.folder / "config.yaml").read_text()) == CONFIG

    run.finish(METRICS, iter(GENERATIONS), iter(HISTORY))
    result = result_of(run)
    assert result == run.result
    assert {key: result[key] for key in METRICS} == METRICS
    assert (result["status"], result["id"], result["attempt"]) == ("done", "abc", 1)
    assert result["python"]
    assert result["torch"]
    assert result["version"]
    assert result["started"] <= result["finished"]
    assert result["finished"].endswith("+00:00")
    assert lines(run.folder / "generations.jsonl") == GENERATIONS
    assert lines(run.folder / "history.jsonl") == HISTORY
    assert sorted(path.name for path in run.folder.iterdir()) == [
        "config.yaml",
        "generations.jsonl",
        "history.jsonl",
        "result.json",
        "samples.jsonl",
        "system.jsonl",
    ]


def test_what_json_cannot_hold_becomes_null(tmp_path):
    run = Run.open(tmp_path, "abc", {"path": tmp_path, "sizes": (1, 2)})
    run.finish({"nan": float("nan"), "inf": float("-inf")}, [], [{"round": 0, "accepted": float("nan")}])
    assert (result_of(run)["nan"], result_of(run)["inf"]) == (None, None)
    assert lines(run.folder / "history.jsonl") == [{"round": 0, "accepted": None}]
    assert load_run(run.folder)["config"] == {"path": str(tmp_path), "sizes": [1, 2]}


def test_metrics_cannot_claim_a_status(tmp_path):
    run = Run.open(tmp_path, "abc", CONFIG)
    run.finish({"status": "failed", "speedup": 1.5}, [], [])
    assert (result_of(run)["status"], result_of(run)["speedup"]) == ("done", 1.5)


def test_failure_keeps_the_folder_and_the_reason(tmp_path):
    run = Run.open(tmp_path, "abc", CONFIG)
    run.fail("batch.size=8: too much", "out_of_memory")
    result = result_of(run)
    assert (result["status"], result["kind"], result["reason"]) == (
        "failed",
        "out_of_memory",
        "batch.size=8: too much",
    )
    assert Run.open(tmp_path, "abc", CONFIG).attempt == 2


def test_measuring_anew_replaces_the_earlier_result_only_at_the_end(tmp_path):
    Run.open(tmp_path, "abc", CONFIG).finish({"speedup": 1.5}, GENERATIONS, HISTORY)
    second = Run.open(tmp_path, "abc", CONFIG)
    assert (result_of(second)["speedup"], result_of(second)["rerun"]["status"]) == (1.5, "running")

    second.fail("interrupted", "interrupted")
    result = result_of(second)
    assert (result["status"], result["speedup"], result["attempt"]) == ("done", 1.5, 1)
    assert (result["rerun"]["status"], result["rerun"]["attempt"]) == ("failed", 2)

    third = Run.open(tmp_path, "abc", CONFIG)
    third.finish({"speedup": 2.5}, [], [])
    result = result_of(third)
    assert (result["speedup"], result["attempt"], "rerun" in result) == (2.5, 3, False)
    assert lines(third.folder / "generations.jsonl") == []


def test_commit_is_that_of_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "CHECKOUT", tmp_path)
    assert store._commit() == {"commit": None, "commit_dirty": None}
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run(git + command, check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert store._commit() == {"commit": head, "commit_dirty": False}
    (tmp_path / "new.py").touch()
    subprocess.run([*git, "add", "new.py"], check=True)
    assert store._commit() == {"commit": head, "commit_dirty": True}


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
    for expected in ("INFO magicdec.somewhere: a detail", "a warning", "ZeroDivisionError", "attempt 2", "another"):
        assert expected in text
    assert "after the run" not in text
    assert [record.getMessage() for record in shown] == ["a warning", "after the run"]


# Readers


def test_readers_pass_over_what_is_torn_or_foreign(tmp_path):
    finished_run(tmp_path)
    contents = {
        "torn": '{"status": "do',
        "foreign": '{"a": 1}',
        "list": "[1]",
        "empty": "",
    }
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(content)
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "result.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "no result").mkdir()
    (tmp_path / "a file").touch()
    assert [run["id"] for run in iter_runs(tmp_path)] == ["abc"]
    assert load_run(tmp_path / "torn") == {}
    assert list(iter_runs(tmp_path / "nowhere")) == []
    assert list(iter_runs(tmp_path / "a file")) == []
    assert Run.open(tmp_path, "foreign", CONFIG).attempt == 1


def test_a_run_without_its_configuration_is_still_a_run(tmp_path):
    run = finished_run(tmp_path)
    (run.folder / "config.yaml").write_text("a: [")
    loaded = load_run(run.folder)
    assert (loaded["speedup"], loaded["config"], loaded["folder"]) == (1.5, {}, str(run.folder))


def test_paths_are_shown_as_one_would_type_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert store.shown(tmp_path / "runs" / "abc") == "runs/abc"
    assert store.shown(Path("runs")) == "runs"
    assert store.shown(Path("/elsewhere/runs")) == "/elsewhere/runs"
