"""What a processor can do at most."""

import pytest
import torch

from magicdec.measure import ceilings


@pytest.mark.parametrize(("multiplies", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_a_processor_is_measured_in_the_numbers_that_it_multiplies(monkeypatch, multiplies, dtype):
    measured, multiply = [], ceilings.matmul_of_many
    monkeypatch.setattr(ceilings, "multiplies_bfloat16", lambda: multiplies)
    monkeypatch.setattr(
        ceilings, "matmul_of_many", lambda a, b: measured.append(a.dtype) or multiply(a, b)
    )
    assert ceilings.matmul_rate(torch.device("cpu"), torch.bfloat16) > 0
    assert {*measured} == {getattr(torch, dtype)}
