"""The doctor: healthy machines pass, and what is broken is found and named, whatever else is on the
machine.
"""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from magicdec.attention import definition
from magicdec.attention.sdpa import SdpaAttention
from magicdec.commands import doctor
from magicdec.commands.doctor import FAILED, NOTE, OK
from magicdec.engine.decoder import Decoder
from magicdec.errors import UserError
from magicdec.measure import ceilings, system
from magicdec.models import parallel
from magicdec.scenarios.ranks import on_ranks
from magicdec.tracking.software import software

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No server, small measurements."""

    def unreachable(*_, **__):
        raise TimeoutError

    monkeypatch.setattr(doctor.urllib.request, "urlopen", unreachable)
    monkeypatch.setattr(ceilings, "MATMUL_ON", {"cpu": 64})
    monkeypatch.setattr(ceilings, "READ_ON", {"cpu": 1 << 16})
    monkeypatch.setattr(definition, "CONTEXT", 600)


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")
def test_a_machine_without_a_gpu_is_healthy(capsys):
    assert doctor.main([]) == 0
    shown = capsys.readouterr().out
    for words in (
        software()["source"],
        "attention=sdpa",
        "is for NVIDIA GPUs",
        "are those without",
        "GFLOP/s",
        "GiB free",
    ):
        assert words in shown
    assert all(words in shown for words in ("cannot be reached", "is ready"))
    assert shown.count("attention=auto") == 1, "the name of the check is not repeated"


def test_a_machine_that_others_use_is_called_busy_next_to_its_speed(monkeypatch):
    """Of 1,000 ticks of all processors 190 were idle, and none were ours: others took 81%."""
    times = iter([(0, 0), (1000, 190)])
    monkeypatch.setattr(system, "_processor_times", lambda: next(times))
    monkeypatch.setattr(system, "_own_ticks", lambda: 0.0)
    found = list(doctor.speed(CPU))
    assert [finding.status for finding in found] == [OK, OK, NOTE]
    assert found[-1].text.startswith("other programs took 81% of the processors")


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


def test_paths_are_left_out_where_there_is_no_home_directory(no_home, here):
    assert doctor.without_places(f"no kernel in {here}/a") == "no kernel in ./a"


def test_wrong_scores_are_found(monkeypatch):
    scored = SdpaAttention.attend_scored

    def doubled(*args):
        out, scores = scored(*args)
        return out, scores * 2

    monkeypatch.setattr(SdpaAttention, "attend_scored", doubled)
    assert definition.max_error(SdpaAttention(), CPU, torch.float32) > 0.1


def broken(*_):
    raise RuntimeError("operation not permitted when stream is capturing\nand more")


@pytest.mark.parametrize(
    ("method", "fault", "said"),
    [
        ("round", broken, "RuntimeError: operation not permitted when stream is capturing"),
        (
            "verify",
            lambda self, *_: torch.ones(2, 3, 4096),
            "the tokens differ from those without a draft",
        ),
    ],
)
def test_a_round_that_does_not_work_is_found(monkeypatch, method, fault, said):
    monkeypatch.setattr(Decoder, method, fault)
    findings = [finding for finding in doctor.examine() if finding.check == "round"]
    assert [(finding.status, said in finding.text) for finding in findings] == [(FAILED, True)]


@pytest.mark.gpu
def test_a_round_on_a_gpu_is_compiled_and_captured():
    """A machine without a C compiler says so with a second line."""
    findings = list(doctor.rounds(CUDA))
    assert all(
        words in findings[0].text for words in ("rounds captured", "are those without a draft")
    )
    assert ("layers compiled" in findings[0].text) == (len(findings) == 1)


def test_a_driver_that_pytorch_cannot_use_fails(monkeypatch, tmp_path):
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC version: 12\n"
    )
    monkeypatch.setattr(system, "DRIVER", version)
    [finding] = doctor.gpus(CPU)
    assert finding.status == FAILED
    assert "driver 550.54.15 is loaded" in finding.text


@pytest.mark.parametrize(
    ("name", "sheet", "bandwidth", "status"),
    [
        ("NVIDIA H100 80GB HBM3", "3,350 in the datasheet of H100", 3.0e12, OK),
        ("NVIDIA H100 80GB HBM3", "3,350 in the datasheet of H100", 1.5e12, NOTE),
        ("NVIDIA H100 PCIe", "2,000 in the datasheet of H100 PCIe", 1.5e12, OK),
    ],
)
def test_measured_figures_are_compared_with_the_datasheet(
    monkeypatch, name, sheet, bandwidth, status
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(ceilings, "read_bandwidth", lambda _: bandwidth)
    monkeypatch.setattr(ceilings, "matmul_rate", lambda *_: 700e12)
    first, second = doctor.speed(CUDA)
    assert first.status == status
    assert (
        f"{bandwidth / float(sheet.split()[0].replace(',', '')) / 1e9:.0%} of the {sheet}"
        in first.text
    )
    assert second.status == OK


def test_gpus_that_do_not_answer_each_other_fail(monkeypatch):
    def ranks(_count, _device, function, *arguments, time_limit_s):
        if arguments[0] == "symmetric":
            raise UserError(
                "hardware.all_reduce=symmetric: symmetric memory is missing; set it to nccl"
            )
        if function is ceilings.captured_sum_s:
            raise TimeoutError(f"the ranks gave no result within {time_limit_s:g} s")
        raise RuntimeError("rank 1 died\nand more")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(doctor, "on_ranks", ranks)
    assert list(doctor.sums(CUDA)) == [
        (FAILED, "NCCL", "RuntimeError: rank 1 died"),
        (
            FAILED,
            "all_reduce=nccl",
            "the ranks gave no result within 120 s; try NCCL_P2P_DISABLE=1",
        ),
        (
            NOTE,
            "all_reduce=symmetric",
            "hardware.all_reduce=symmetric: symmetric memory is missing; set it to nccl",
        ),
    ]
    monkeypatch.setattr(doctor, "on_ranks", lambda *_, **__: 1e-5)
    assert [finding.status for finding in doctor.sums(CUDA)] == [OK] * 3


def summed(rank: int) -> tuple[float, float]:
    return ceilings.all_reduce_rate(rank, 1 << 20), ceilings.captured_sum_s(rank, "nccl", 4096)


@pytest.mark.slow
def test_ranks_sum():
    """They are started as a user's are, each in a new interpreter."""
    assert min(on_ranks(2, "cpu", summed)) > 0


def wrong(rank: int) -> float:
    with patch.object(parallel, "_sum", lambda x, _: x):
        return ceilings.captured_sum_s(rank, "nccl", 16)


@pytest.mark.usefixtures("forked_ranks")
def test_wrong_sums_are_found():
    with pytest.raises(RuntimeError, match="the sum over 2 ranks is wrong"):
        on_ranks(2, "cpu", wrong)
