"""The doctor: healthy machines pass, and what is broken is found and named, whatever else is on the machine."""

from pathlib import Path

import pytest
import torch

from magicdec import doctor
from magicdec.attention.sdpa import SdpaAttention
from magicdec.doctor import FAILED, NOTE, OK
from magicdec.measure import ceilings
from magicdec.scenarios.ranks import on_ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No server, small measurements."""

    def unreachable(*_, **__):
        raise TimeoutError

    monkeypatch.setattr(doctor.urllib.request, "urlopen", unreachable)
    monkeypatch.setattr(ceilings, "MATMUL_ON", {"cpu": 64})
    monkeypatch.setattr(ceilings, "READ_ON", {"cpu": 1 << 16})
    monkeypatch.setattr(doctor, "CONTEXT", 600)


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")
def test_a_machine_without_a_gpu_is_healthy(capsys):
    assert doctor.main([]) == 0
    shown = capsys.readouterr().out
    for words in ("attention=sdpa", "is for NVIDIA GPUs", "GFLOP/s", "GiB free", "cannot be reached", "is ready"):
        assert words in shown


@pytest.mark.parametrize(("broken", "words"), [(0.1, "0.1"), (float("nan"), "nan")])
def test_a_kernel_that_computes_something_else_fails(monkeypatch, capsys, broken, words):
    attend = SdpaAttention.attend
    monkeypatch.setattr(SdpaAttention, "attend", lambda *args: attend(*args) + broken)
    assert doctor.main(["--markdown"]) == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if "attention=sdpa" in line)
    assert line.startswith("| FAILED |")
    assert f"largest error {words}" in line


@pytest.mark.parametrize("method", ["attend", "attend_scored"])
def test_a_kernel_that_raises_fails_in_one_line_without_paths(monkeypatch, capsys, method):
    def fail(*_):
        raise RuntimeError(f"no kernel in {Path.home()}/.cache\nand a second line")

    monkeypatch.setattr(SdpaAttention, method, fail)
    assert doctor.main(["--markdown"]) == 1
    printed = capsys.readouterr().out
    assert "| attention=sdpa | RuntimeError: no kernel in ~/.cache |" in printed
    assert str(Path.home()) not in printed


def test_wrong_scores_are_found(monkeypatch):
    scored = SdpaAttention.attend_scored

    def doubled(*args):
        out, scores = scored(*args)
        return out, scores * 2

    monkeypatch.setattr(SdpaAttention, "attend_scored", doubled)
    assert doctor.max_error(SdpaAttention(), CPU, torch.float32) > 0.1


def test_a_driver_that_pytorch_cannot_use_fails(monkeypatch, tmp_path):
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC version: 12\n")
    monkeypatch.setattr(doctor, "DRIVER", version)
    [finding] = doctor.gpus(CPU)
    assert finding.status == FAILED
    assert "driver 550.54.15 is loaded" in finding.text


@pytest.mark.parametrize(("bandwidth", "status"), [(3.0e12, OK), (1.5e12, NOTE)])
def test_measured_figures_are_compared_with_the_datasheet(monkeypatch, bandwidth, status):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(ceilings, "read_bandwidth", lambda _: bandwidth)
    monkeypatch.setattr(ceilings, "matmul_rate", lambda *_: 700e12)
    first, second = doctor.speed(CUDA)
    assert first.status == status
    assert f"{bandwidth / 3350e9:.0%} of the 3,350 in the datasheet of H100" in first.text
    assert second == (OK, "matmul bfloat16", "700 TFLOP/s, 71% of the 989 in the datasheet of H100")


def test_gpus_that_do_not_answer_each_other_fail(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(doctor, "on_ranks", lambda *_: doctor.threading.Event().wait(5))
    monkeypatch.setattr(doctor, "NCCL_TIMEOUT_S", 0.05)
    [finding] = doctor.nccl(CUDA)
    assert (finding.status, "no answer" in finding.text) == (FAILED, True)


def test_ranks_sum():
    """They are started as a user's are, each in a new interpreter."""
    assert on_ranks(2, "cpu", ceilings.all_reduce_rate, 1 << 20) > 0
