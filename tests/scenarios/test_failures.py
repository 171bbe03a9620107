"""A run that fails is recorded as failed, with its kind, and running out of memory is reported in a
line.
"""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from magicdec.errors import UserError
from magicdec.planning import build
from magicdec.scenarios import profile
from tests.runs import TINY, lines, one_line, only_run, run_here


def cuda_oom():
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has a total capacity of 80"
    )


def cpu_oom():
    torch.empty(1 << 50)


def crash():
    raise ZeroDivisionError("a bug")


OOM = "batch.size=2 at batch.context_len=128: out of memory"


@pytest.mark.parametrize(
    ("failure", "raised", "kind", "reason"),
    [
        (cuda_oom, UserError, "out_of_memory", OOM),
        (cpu_oom, UserError, "out_of_memory", OOM),
        (crash, ZeroDivisionError, "crashed", "a bug"),
    ],
)
def test_failures_during_the_run(tmp_path, monkeypatch, failure, raised, kind, reason):
    monkeypatch.setattr(build, "engine", lambda *_: failure())
    with pytest.raises(raised, match=one_line(reason)):
        run_here(tmp_path)
    result = only_run(tmp_path)
    assert (result["status"], result["kind"]) == ("failed", kind)
    assert reason in result["reason"]


@pytest.mark.parametrize(
    ("scenario", "keys"),
    [
        ("compare", []),
        ("compare", ["sampling=sample"]),
        ("serve", ["scenario.concurrencies=[1]", "scenario.num_requests=1"]),
        (
            "profile",
            ["scenario.batch_sizes=[1]", "scenario.context_lens=[64]", "scenario.gammas=[1]"],
        ),
    ],
)
def test_a_checkpoint_of_nans_is_a_failed_run_in_every_scenario(tmp_path, scenario, keys):
    folder = shutil.copytree(TINY / "target", tmp_path / "checkpoint")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(math.nan)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="target: its logits are NaN or infinite, first for token "):
        run_here(tmp_path / "runs", f"scenario={scenario}", *keys, f"target.path={folder}")
    result = only_run(tmp_path / "runs")
    assert (result["status"], result["kind"]) == ("failed", "non_finite")


def test_what_a_run_has_measured_before_it_failed_is_kept(tmp_path, monkeypatch):
    measured = iter([{"verify_ms": 1.5}, {"verify_ms": 2.5}])
    monkeypatch.setattr(profile, "profile_round", lambda *_: next(measured, None) or crash())
    points = ["scenario.batch_sizes=[1,2]", "scenario.context_lens=[64]", "scenario.gammas=[1,2]"]
    with pytest.raises(ZeroDivisionError):
        run_here(tmp_path, "scenario=profile", *points)
    history = lines(only_run(tmp_path)["folder"], "history")
    found = [(row["batch_size"], row["gamma"], row["time/verify_ms"]) for row in history]
    assert found == [(1, 1, 1.5), (1, 2, 2.5)]
