"""Kernels that are compiled for a rehearsal, and found again by the next process."""

import pytest

triton = pytest.importorskip("triton", reason="needs Triton (Linux only)")

from magicdec.kernels import split_kv  # noqa: E402
from tests.gpu_rehearsal.compile import build  # noqa: E402


class Refused(Exception):
    """Nothing is compiled here."""


def test_a_kernel_has_one_name_in_whatever_order_its_arguments_are_given(monkeypatch):
    """Sets of arguments, as `compiled` makes them, have another order in each process."""
    names = set()

    def refuse(source, **_):
        names.add(source.hash())
        raise Refused

    monkeypatch.setattr(triton, "compile", refuse)
    first, second = split_kv.attend_split.arg_names[:2]
    types = {first: "*bf16", second: "*bf16"}
    for aligned in ([first, second], [second, first]):
        with pytest.raises(Refused):
            build(split_kv.attend_split, 90, types, {}, {}, aligned)
    assert len(names) == 1
