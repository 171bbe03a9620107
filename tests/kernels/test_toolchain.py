"""Triton compiles on the host before its first launch. A machine where it cannot is found before a
run.
"""

import sys

import pytest
import torch

from magicdec.attention.backends import choose
from magicdec.config.load import compose
from magicdec.errors import UserError
from magicdec.kernels import toolchain
from magicdec.planning import build
from magicdec.planning.resolve import resolve
from magicdec.tracking.progress import progress
from magicdec.verification import sampling

CUDA = torch.device("cuda")
QUICK = ["batch.size=2", "batch.context_len=64", "batch.generate_len=4"]


@pytest.fixture(autouse=True)
def forgotten():
    for cached in (toolchain.triton_obstacle, sampling._kernels):
        cached.cache_clear()
    yield
    for cached in (toolchain.triton_obstacle, sampling._kernels):
        cached.cache_clear()


def no_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)


def no_headers(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda *_, **__: "/no/headers")


def another(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("CC", "/no/such/cc")


def no_triton(monkeypatch):
    monkeypatch.setattr(toolchain, "find_spec", lambda _: None)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is not there, for plans."""
    for name, answer in {
        "is_available": True,
        "device_count": 1,
        "get_device_name": "H100",
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


def test_nothing_is_in_the_way_here():
    pytest.importorskip("triton")
    assert toolchain.triton_obstacle() is None
    assert sampling._kernels() is not None


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            no_compiler,
            "needs a C compiler and Python's headers, and neither gcc nor clang is installed",
        ),
        (no_headers, r"needs a C compiler and Python's headers, and \S*gcc failed: .*Python.h"),
        (another, "needs a C compiler and Python's headers, and /no/such/cc failed: No such file"),
        (no_triton, "is not installed; install it: pip install -e"),
    ],
)
def test_what_triton_needs_is_looked_for_before_it_is_chosen(fault, said, gpu, monkeypatch):
    """Attention, torch.compile, sampling and quantized drafts fall back or are refused, each with
    one line.
    """
    fault(monkeypatch)
    with pytest.raises(UserError, match=f"attention=triton {said}"):
        choose("triton", CUDA, torch.bfloat16, [128])
    plan = resolve(compose(QUICK))
    assert (plan.config.attention, plan.config.hardware.compile) == ("sdpa", False)
    assert sampling._kernels() is None
    for override in ("hardware.compile=true", "draft.quantization=int8"):
        with pytest.raises(UserError, match=f"{override}.* Triton {said}"):
            resolve(compose([*QUICK, override]))


def test_one_line_says_what_is_slower(gpu, monkeypatch, capsys):
    no_compiler(monkeypatch)
    plan = resolve(compose(QUICK))
    monkeypatch.setattr(build, "assembled", lambda *_: None)
    with progress() as bars:
        build.engine(plan, bars)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert "sdpa is the fastest at hand" in line
    assert "hardware.compile=false" in line
    assert "gcc" in line


def test_a_machine_that_only_lacks_a_gpu_says_nothing(capsys):
    assert "Triton" not in resolve(compose([*QUICK, "attention=sdpa", "hardware=cpu"])).reasons
    assert sys.platform
