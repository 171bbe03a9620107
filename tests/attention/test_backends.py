"""The backend that is chosen, and the line about it."""

import subprocess
import sys
from contextlib import suppress

import pytest
import torch

from magicdec.attention import backends
from magicdec.attention.sdpa import SdpaAttention
from magicdec.config.choices import Backend
from magicdec.config.registry import BACKENDS
from magicdec.errors import UserError
from magicdec.kernels import library, toolchain

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.skipif(library.compiler() is None, reason="needs a C++ compiler")
def test_auto_takes_the_kernel_that_is_built(monkeypatch):
    assert library.obstacle() is None
    monkeypatch.setattr(library, "compiler", lambda: None)
    name, why = backends.choose("auto", CPU, torch.float32, [64])
    assert (name, why) == ("cpp", "attention=auto: cpp is the fastest at hand")


@pytest.mark.parametrize(
    ("device", "dtype", "dims", "said"),
    [
        ("cpu", torch.float16, [64], "float32, bfloat16, not in float16"),
        ("cpu", torch.float32, [64, 12], "multiple of 8, not 12"),
        ("cuda", torch.bfloat16, [64], "for CPUs, not for cuda"),
    ],
)
def test_what_does_not_fit_is_refused_when_asked_for_and_passed_over_by_auto(
    device, dtype, dims, said
):
    with pytest.raises(UserError, match=said):
        backends.choose("cpp", torch.device(device), dtype, dims)
    if device == "cpu":
        name, why = backends.choose("auto", CPU, dtype, dims)
        assert name == "sdpa"
        assert said in why


def test_what_is_usable_is_what_can_be_chosen():
    chosen = []
    for name in BACKENDS:
        with suppress(UserError):
            chosen.append(backends.choose(name, CPU, torch.float32, [64])[0])
    assert backends.usable(CPU, torch.float32, [64]) == chosen
    assert "sdpa" in chosen
    assert "triton" not in chosen


def test_every_backend_is_listed_although_its_library_is_missing(monkeypatch):
    for package in ("flash_attn", "flash_attn_interface", "flash_attn_3", "flashinfer"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(toolchain, "find_spec", lambda _: None)
    toolchain.triton_obstacle.cache_clear()
    assert list(BACKENDS) == ["cpp", "flash", "flashinfer", "sdpa", "triton", "varlen"]
    for name in ("flash", "flashinfer", "triton"):
        assert backends.obstacle(name, CUDA, torch.bfloat16, [64]).startswith("is not installed")
    name, why = backends.choose("auto", CUDA, torch.bfloat16, [64])
    assert name == "sdpa"
    assert why.index("triton is not installed") < why.index("flash is not installed")
    monkeypatch.undo()
    toolchain.triton_obstacle.cache_clear()


def test_triton_is_not_imported_to_list_the_backends():
    program = (
        "import sys; from magicdec.config.registry import BACKENDS as b; list(b); assert 'triton'"
        " not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_backend_from_outside_is_chosen_by_its_priority(monkeypatch):
    monkeypatch.setattr(BACKENDS, "_entries", dict(BACKENDS._entries))
    monkeypatch.setattr("magicdec.config.registry.PLUGINS", {})

    @BACKENDS.register(Backend("mine", "cpu", priority=9))
    class Mine(SdpaAttention):
        @classmethod
        def obstacle(cls, dtype, head_dim):
            return "is for small heads" if head_dim > 64 else None

    assert backends.choose("auto", CPU, torch.float32, [64]) == (
        "mine",
        "attention=auto: mine is the fastest at hand",
    )
    assert backends.choose("auto", CPU, torch.float32, [128])[1].endswith(
        "; mine is for small heads"
    )
    assert "mine" in backends.usable(CPU, torch.float32, [64])
    assert backends.obstacle("mine", CUDA, torch.float32, [64]) == "is for CPUs, not for cuda"


@pytest.mark.skipif(library.compiler() is None, reason="needs a C++ compiler")
def test_a_backend_without_sinks_is_refused_and_passed_over(monkeypatch):
    needs = ("a soft cap of scores", "attention sinks")
    name, why = backends.choose("auto", CPU, torch.float32, [64], needs)
    assert (name, why) == ("cpp", "attention=auto: cpp is the fastest at hand")
    monkeypatch.setattr(BACKENDS["cpp"].work, "takes_weighting", False)
    name, why = backends.choose("auto", CPU, torch.float32, [64], needs)
    assert name == "sdpa"
    assert "cpp does not have a soft cap of scores and attention sinks" in why
    with pytest.raises(UserError, match="attention=cpp does not have"):
        backends.choose("cpp", CPU, torch.float32, [64], needs)
