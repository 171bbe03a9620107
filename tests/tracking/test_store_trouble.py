"""The run store in trouble: a full disk, a folder that cannot be written to, a kill at any
moment.
"""

import errno
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest

from magicdec.commands import clean
from magicdec.errors import UserError
from magicdec.tracking import sweep
from magicdec.tracking.reader import iter_runs, load_run
from magicdec.tracking.store import Run
from magicdec.tracking.trackers import Live
from tests.programs import ROOT
from tests.tracking.sample import CONFIG, GENERATIONS, finished_run, lines, result_of


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_full_disk_is_one_clear_line_and_earlier_results_are_intact(tmp_path, monkeypatch, call):
    before = finished_run(tmp_path)
    again = Run.open(tmp_path, "abc", CONFIG)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, no_space)
        words = rf"^runs_dir={tmp_path}: cannot write: No space left on device; choose .*$"
        with pytest.raises(UserError, match=words) as error:
            again.finish({"speedup": 9.0}, GENERATIONS * 2, [])
        again.fail(str(error.value), "invalid")  # must not raise a second error over the first
    assert result_of(before)["speedup"] == 1.5
    assert lines(before.folder / "generations.jsonl") == GENERATIONS
    assert not list(before.folder.glob(".*"))
    assert again.result["status"] == "failed"


def test_a_disk_that_fills_up_while_writing(tmp_path):
    """A real refusal of the kernel's: files of this process may not grow beyond 64 KiB."""
    before = finished_run(tmp_path)
    script = """
        import resource, signal, sys
        from magicdec.errors import UserError
        from magicdec.tracking.store import Run
        from tests.tracking.sample import CONFIG
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        run = Run.open(sys.argv[1], "abc", CONFIG)
        try:
            run.finish({}, ({"row": i, "speculative": list(range(100))} for i in range(1000)), [])
        except UserError as error:
            print(error)
            run.fail(str(error), "invalid")
    """
    command = [sys.executable, "-c", dedent(script), str(tmp_path)]
    assert (
        b"File too large"
        in subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60).stdout
    )
    assert load_run(tmp_path / "abc-2")["status"] == "failed"
    assert result_of(before)["speedup"] == 1.5
    assert lines(before.folder / "generations.jsonl") == GENERATIONS
    assert not list(tmp_path.glob("*/.*"))


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_store_that_cannot_be_written_to(tmp_path, monkeypatch, code):
    def refuse(path, *_, **__):
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(
        UserError,
        match=rf"^runs_dir={tmp_path}: cannot write {tmp_path}/abc: {os.strerror(code)}; ",
    ):
        Run.open(tmp_path, "abc", CONFIG)


def test_a_store_that_is_no_folder(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UserError, match=r"runs: cannot write .*: Not a directory"):
        Run.open(tmp_path / "runs", "abc", CONFIG)


def test_killed_at_any_moment(tmp_path):
    """Files are whole, whenever the writer dies."""
    script = """
        import sys
        from magicdec.tracking import store
        from tests.tracking.sample import CONFIG
        store.commit = dict  # asking git takes most of the time
        for number in range(10**6):
            run = store.Run.open(sys.argv[1], "abc", CONFIG | {"number": number})
            run.finish({"number": number}, [{"row": i, "number": number} for i in range(500)], [{"round": 0}])
            print(number, flush=True)
    """  # noqa: E501
    for _ in range(4):
        command = [sys.executable, "-c", dedent(script), str(tmp_path)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            process.stdout.readline()
            time.sleep(random.uniform(0, 0.1))
            process.kill()
        runs = sorted(iter_runs(tmp_path), key=lambda run: run["attempt"])
        assert {run.get("kind") for run in runs} <= {None, "interrupted"}
        assert [run["id"] for run in runs] == [
            "abc",
            *(f"abc-{n}" for n in range(2, len(runs) + 1)),
        ]
        assert all(run["status"] == "done" for run in runs[:-1] if run["pid"] == runs[-1]["pid"])
        for run in runs:
            rows = (
                lines(Path(run["folder"], "generations.jsonl")) if run["status"] == "done" else []
            )
            assert [row["number"] for row in rows] == [run.get("number")] * (500 if rows else 0)
            assert run["config"]["number"] == run.get("number", run["config"]["number"])


def test_a_line_that_a_full_disk_has_torn_costs_no_other_job(tmp_path):
    sweep.record(tmp_path, 0, "abc", ["a=1"])
    with (tmp_path / sweep.JOBS).open("a") as file:
        file.write('{"job": 1, "id": "de')
    sweep.record(tmp_path, 2, "fgh", [])
    assert [(line["job"], line["id"]) for line in sweep.jobs(tmp_path)] == [(0, "abc"), (2, "fgh")]


def test_a_run_that_is_deleted_in_part_is_still_known(tmp_path, monkeypatch):
    """Ctrl-C in the middle: the command can be repeated."""
    run = finished_run(tmp_path)
    (run.folder / "result.json").write_text(json.dumps(run.result | FAILED))
    deleted, unlink = [], Path.unlink

    def interrupted(path):
        deleted.append(path.name)
        if path.name == "result.json":
            raise KeyboardInterrupt
        unlink(path)

    monkeypatch.setattr(Path, "unlink", interrupted)
    with pytest.raises(KeyboardInterrupt):
        clean.main([str(tmp_path)])
    monkeypatch.setattr(Path, "unlink", unlink)
    assert "history.jsonl" in deleted
    assert clean.main([str(tmp_path)]) == 0
    assert not run.folder.exists()


FAILED = {"status": "failed", "kind": "invalid", "reason": "mistyped"}


def test_a_live_line_without_a_number_can_be_read(tmp_path):
    """As of a repeat in which every row ended at its first token."""
    live = Live(tmp_path, {"wandb": {"mode": "disabled"}, "tracker": []}, {})
    live({"repeat": 1, "repeat/speedup": float("nan")})
    (line,) = lines(tmp_path / "live.jsonl")
    assert line.items() >= {"repeat": 1, "repeat/speedup": None}.items()
