"""Which backend is taken, and what is said about it."""

from contextlib import suppress

import pytest
import torch

from magicdec.attention import backends
from magicdec.errors import UserError
from magicdec.kernels import library

CPU = torch.device("cpu")


@pytest.mark.skipif(library.compiler() is None, reason="needs a C++ compiler")
def test_auto_takes_the_kernel_that_is_built(monkeypatch):
    assert library.obstacle() is None
    monkeypatch.setattr(library, "compiler", lambda: None)
    name, why = backends.choose("auto", CPU, torch.float32, [64])
    assert (name, why) == ("cpp", "attention=auto: cpp is the fastest at hand")


@pytest.mark.parametrize(
    ("device", "dtype", "dims", "said"),
    [
        ("cpu", torch.float16, [64], "float32 and bfloat16, not in float16"),
        ("cpu", torch.float32, [64, 12], "multiple of 8, not 12"),
        ("cuda", torch.bfloat16, [64], "for CPUs, not for cuda"),
    ],
)
def test_what_does_not_fit_is_refused_when_asked_for_and_passed_over_by_auto(device, dtype, dims, said):
    with pytest.raises(UserError, match=said):
        backends.choose("cpp", torch.device(device), dtype, dims)
    if device == "cpu":
        name, why = backends.choose("auto", CPU, dtype, dims)
        assert name == "sdpa"
        assert said in why


def test_no_compiler_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "path", lambda: tmp_path / "kernel.so")
    monkeypatch.setattr(library, "compiler", lambda: None)
    with pytest.raises(UserError, match=r"attention=cpp needs a C\+\+ compiler.*; use attention=auto"):
        backends.choose("cpp", CPU, torch.float32, [64])
    name, why = backends.choose("auto", CPU, torch.float32, [64])
    assert name == "sdpa"
    assert library.NEEDS_COMPILER in why


def test_what_is_usable_is_what_can_be_chosen():
    chosen = []
    for name in backends.BACKENDS:
        with suppress(UserError):
            chosen.append(backends.choose(name, CPU, torch.float32, [64])[0])
    assert backends.usable(CPU, torch.float32, [64]) == chosen
    assert "sdpa" in chosen
    assert "triton" not in chosen
