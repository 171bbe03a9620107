"""The scenarios predict and plan, what stands beside a run, and calibration from a run."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from magicdec.costmodel.acceptance import Curves, published
from magicdec.costmodel.beside import beside, warning
from magicdec.costmodel.hardware import hardware_named
from magicdec.costmodel.round import Setup, round_times
from magicdec.scenarios import plan as plan_scenario
from magicdec.scenarios import predict as predict_scenario

ROOT = Path(__file__).parents[2]


@pytest.fixture
def setup(model):
    def make(hardware="8xA100", batch=64, context=32_000, **changes):
        return Setup(model("llama-3.1-8b"), hardware_named(hardware), batch, context, target_name="llama-3.1-8b").at(
            **changes
        )

    return make


def shown(renderable):
    console = Console(file=io.StringIO(), width=200)
    console.print(renderable)
    return console.file.getvalue()


def test_predict_shows_gammas_bounds_and_the_verdict(setup):
    text = shown(predict_scenario.render(predict_scenario.predict(setup())))
    for words in ("pays from alpha", "what bounds the steps", "of 80 GiB", "calibrated on 8xA100", "S* is"):
        assert words in text


def test_predict_takes_acceptance_from_the_run_store_first(setup, tmp_path):
    run = tmp_path / "abc"
    run.mkdir()
    (run / "result.json").write_text(json.dumps({"status": "done", "acceptance/source": "measured", "alpha": 0.95}))
    config = {
        "target": {"name": "llama-3.1-8b"},
        "draft": {"name": "self", "model": None},
        "cache": {"policy": "streaming", "budget": 512},
        "batch": {"context_len": 32_000},
        "data": {"name": "pg19"},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert predict_scenario.predict(setup(), runs_dir=tmp_path).estimate.alpha == 0.95
    assert predict_scenario.predict(setup(), runs_dir=tmp_path / "empty").estimate.alpha == 0.81


def test_plan_shows_a_ranking_and_writes_the_best(setup, tmp_path):
    path = tmp_path / "conf" / "best.yaml"
    plans = plan_scenario.plan(setup("8xH100"), batches=(16, 64), latency_ms=20.0, experiment=path, command="plan")
    text = shown(plan_scenario.render(plans))
    for words in ("tokens/s", "no acceptance is known for", "left out"):
        assert words in text
    assert yaml.safe_load(path.read_text())["batch"]["size"] == plans.ranked[0].setup.batch


def test_a_run_that_cannot_pay_is_warned_about(setup):
    assert "0.8" in warning(setup(context=4000), 2, published())
    assert "never to pay" in warning(setup(context=1000, batch=1), 2, Curves([]))
    assert warning(setup(), 3, published()) is None
    assert warning(setup(budget=777), 3, published()) is None  # unknown, but it could


def test_beside_a_run_stand_predictions_and_their_errors(setup):
    times = round_times(setup(), 3)
    measured = {
        "alpha": 0.8,
        "speedup": 1.0,
        "time/target_decode_ms": 2e3 * times.target.total,
        "time/draft_ms": 1e3 * times.draft.total,
        "time/verify_ms": None,
    }
    result = beside(setup(), 3, measured)
    assert result["predicted/gamma"] == 3
    assert result["predicted/target_decode_error"] == pytest.approx(-0.5)
    assert result["predicted/draft_error"] == pytest.approx(0.0)
    assert result["predicted/speedup_error"] == pytest.approx(result["predicted/speedup"] - 1)
    assert "predicted/verify_error" not in result
    unknown = beside(setup(), 3, measured | {"alpha": None})  # nothing was proposed, or nothing measured
    assert unknown["predicted/speedup"] is None
    assert "predicted/speedup_error" not in unknown


def profile_run(folder, setup, grid):
    """A folder as scenario=profile leaves it, with the times that the cost model itself predicts."""
    architecture = yaml.safe_load((ROOT / "conf" / "target" / "llama-3.1-8b.yaml").read_text())["architecture"]
    figures = {"bandwidth_gbs": 4800, "tflops": 989, "memory_gib": 141, "tensor_parallel": 1}
    config = {
        "scenario": {"name": "profile"},
        "target": {"name": "llama-3.1-8b", "architecture": architecture},
        "draft": {"name": "self", "model": None},
        "cache": {"policy": "streaming", "budget": 512},
        "hardware": {"name": "h200"} | figures,
    }
    lines = []
    for batch, context, gamma in grid:
        times = round_times(setup("h200", batch, context), gamma)
        point = {"batch_size": batch, "context_len": context, "gamma": gamma}
        for name, time in (("target_decode", times.target), ("draft", times.draft), ("verify", times.verify)):
            point[f"time/{name}_ms"] = 1e3 * time.total
        lines.append(json.dumps(point | {"time/round_ms": 1e3 * times.round_s}))
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "history.jsonl").write_text("\n".join(lines) + "\n")


def calibrate(*arguments):
    command = [sys.executable, str(ROOT / "tools" / "calibrate.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_machine_is_calibrated_from_a_profile_run(setup, tmp_path):
    pytest.importorskip("scipy")
    truth = setup("h200").hardware.efficiency
    profile_run(tmp_path / "run", setup, [(b, s, 3) for b in (4, 32) for s in (4000, 32_000)])
    done = calibrate(tmp_path / "run")
    assert done.returncode == 0, done.stderr
    content = yaml.safe_load(done.stdout)
    assert (content["hardware"], content["stack"]) == ("h200", "magicdec")
    assert content["efficiency"]["bandwidth_fraction"] == pytest.approx(truth.bandwidth_fraction, rel=0.05)
    assert content["efficiency"]["layer_overhead_us"] == pytest.approx(truth.layer_overhead_us, rel=0.25)


def test_a_folder_that_is_no_profile_run_is_refused_in_one_line(tmp_path):
    done = calibrate(tmp_path / "nowhere")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "not a finished run of scenario=profile" in done.stderr


def test_an_ideal_card_gives_what_bytes_alone_allow(ideal, setup):
    # 24 x 32k on one H200: 2.15 at alpha 0.80 and budget 512, 2.38 at 0.89 and 2,049, by reading KV and weights alone.
    for alpha, budget, expected in ((0.80, 512, 2.15), (0.89, 2049, 2.38)):
        at = setup(batch=24, budget=budget, hardware="h200").at(hardware=ideal(device="H200"))
        assert predict_scenario.predict(at, alpha=alpha).best.speedup == pytest.approx(expected, rel=0.02)
