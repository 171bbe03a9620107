"""Live results of a run, and the results of one that SIGTERM has ended."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from magicdec.decoding.state import INACTIVE
from magicdec.scenarios import compare, points
from magicdec.tracking.loggers import wandb
from magicdec.tracking.progress import Stage
from tests.programs import Program
from tests.runs import SMALL, lines, only_run, run_here


def test_a_point_counts_the_rounds_since_the_last_one(monkeypatch):
    monkeypatch.setattr(points, "INTERVAL_S", 0.0)
    monkeypatch.setattr(points, "EVERY", 2)
    accepted = torch.tensor(
        [[2, 0], [1, INACTIVE], [2, INACTIVE], [0, INACTIVE]], dtype=torch.int32
    )
    state = SimpleNamespace(accepted_RB=accepted, committed_RB=(accepted + 1).clamp(min=0))
    heard, stage = [], Stage("speculative", 4)
    count = points.Points(state, "speculative", stage, SimpleNamespace(report=heard.append))
    for _ in range(4):
        count(1)
    assert stage.done == 4
    assert [line["live/speculative/round"] for line in heard] == [2, 4]
    assert [line["live/accepted"] for line in heard] == pytest.approx([3 / 3, 2 / 2])
    assert all(line["live/speculative/tokens_per_second"] > 0 for line in heard)


def test_the_lines_of_a_run_are_on_disk_and_agree_with_its_result(tmp_path, monkeypatch):
    monkeypatch.setattr(points, "INTERVAL_S", 0.0)
    run = run_here(tmp_path, "scenario.repeats=3", "batch.generate_len=40")
    live = lines(run.folder, "live")
    seconds = [line["live/seconds"] for line in live]
    assert seconds == sorted(seconds)
    repeats = [line for line in live if "repeat" in line]
    assert [line["repeat"] for line in repeats] == [1, 2, 3]
    speedups = sorted(line["repeat/speedup"] for line in repeats)
    assert speedups == pytest.approx(
        [run.metrics[key] for key in ("speedup_min", "speedup", "speedup_max")]
    )
    assert "live/prefill_s" in live[0], "before anything is measured"
    assert any("live/accepted" in line for line in live)


def test_a_tracker_that_fails_does_not_fail_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(wandb, "follow", lambda run: lambda line: 1 / 0)
    run = run_here(tmp_path, "tracker=[wandb]", "wandb.mode=disabled")
    assert run.metrics["status"] == "done"
    assert "ZeroDivisionError" in (run.folder / "log.txt").read_text()


def test_sigterm_keeps_the_repeats_that_are_complete(tmp_path, monkeypatch):
    generate, passes = compare._generate, []

    def stopped_in_the_third_repeat(*arguments):
        passes.append(arguments)
        if len(passes) == 6:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        return generate(*arguments)

    monkeypatch.setattr(compare, "_generate", stopped_in_the_third_repeat)
    with pytest.raises(KeyboardInterrupt):
        run_here(tmp_path, "scenario.repeats=4")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    result = only_run(tmp_path)
    assert (result["status"], result["kind"], result["reason"]) == (
        "failed",
        "stopped",
        "stopped by SIGTERM",
    )
    assert result["repeats"] == 2
    assert result["acceptance_rate"] > 0
    assert {
        len(row["decode_s"]["speculative"]) for row in lines(result["folder"], "generations")
    } == {2}
    assert lines(result["folder"], "history")


def test_the_command_ends_as_a_shell_expects(tmp_path):
    program = Program("launch.py", *SMALL, "scenario.repeats=1000", f"runs_dir={tmp_path}")
    while not any('"repeat"' in path.read_text() for path in tmp_path.glob("*/live.jsonl")):
        time.sleep(0.1)
    os.kill(program.pid, signal.SIGTERM)
    assert program.finish().returncode == 143
    assert only_run(tmp_path)["kind"] == "stopped"
