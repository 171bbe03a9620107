"""A run that fails is recorded as failed, with its kind, and running out of memory is reported in a line."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from magicdec.config.load import compose
from magicdec.errors import UserError
from magicdec.planning import build
from magicdec.scenarios import Job, profile, run
from tests.test_run import SMALL, TINY


def cuda_oom():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has a total capacity of 80")


def cpu_oom():
    torch.empty(1 << 50)


def crash():
    raise ZeroDivisionError("a bug")


@pytest.mark.parametrize(
    ("failure", "raised", "kind"),
    [
        (cuda_oom, UserError, "out_of_memory"),
        (cpu_oom, UserError, "out_of_memory"),
        (crash, ZeroDivisionError, "crashed"),
    ],
)
def test_failures_during_the_run(tmp_path, monkeypatch, failure, raised, kind):
    config = compose([*SMALL, f"runs_dir={tmp_path}"])
    monkeypatch.setattr(build, "engine", lambda *_: failure())
    with pytest.raises(raised) as caught:
        run(config, Job())
    (path,) = tmp_path.glob("*/result.json")
    result = json.loads(path.read_text())
    assert (result["status"], result["kind"]) == ("failed", kind)
    if kind == "out_of_memory":
        assert "\n" not in str(caught.value)
        assert "batch.size=2 at batch.context_len=256: out of memory" in result["reason"]


@pytest.mark.parametrize("scenario", ["compare", "serve", "profile"])
def test_a_checkpoint_of_nans_is_a_failed_run_in_every_scenario(tmp_path, scenario):
    folder = shutil.copytree(TINY / "target", tmp_path / "checkpoint")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(math.nan)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    sizes = ["scenario.batch_sizes=[1]", "scenario.context_lens=[64]", "scenario.gammas=[1]"]
    load = ["scenario.concurrencies=[1]", "scenario.num_requests=1"]
    keys = {"compare": [], "serve": load, "profile": sizes}[scenario]
    config = compose([*SMALL, f"scenario={scenario}", *keys, f"target.path={folder}", f"runs_dir={tmp_path / 'runs'}"])
    with pytest.raises(UserError, match="target: its logits are NaN or infinite, first for token "):
        run(config, Job())
    (path,) = tmp_path.glob("runs/*/result.json")
    result = json.loads(path.read_text())
    assert (result["status"], result["kind"]) == ("failed", "non_finite")


def test_what_a_run_has_measured_before_it_failed_is_kept(tmp_path, monkeypatch):
    measured = iter([{"verify_ms": 1.5}, {"verify_ms": 2.5}])
    monkeypatch.setattr(profile, "profile_round", lambda *_: next(measured, None) or crash())
    points = ["scenario.batch_sizes=[1,2]", "scenario.context_lens=[64]", "scenario.gammas=[1,2]"]
    config = compose([*SMALL, "scenario=profile", *points, f"runs_dir={tmp_path}"])
    with pytest.raises(ZeroDivisionError):
        run(config, Job())
    (path,) = tmp_path.glob("*/history.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["batch_size"], row["gamma"], row["time/verify_ms"]) for row in rows] == [(1, 1, 1.5), (1, 2, 2.5)]
