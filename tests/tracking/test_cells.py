"""Numbers as tables show them."""

import pytest

from magicdec.tracking.cells import three_digits


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.12345, "0.123"), (1.0, "1.00"), (99.94, "99.9"), (99.96, "100"), (1234.5, "1,234")],
)
def test_a_measured_number_has_three_digits(value, shown):
    assert three_digits(value) == shown


@pytest.mark.parametrize("value", [None, True, "1.0"])
def test_what_is_no_number_is_left_empty(value):
    assert three_digits(value) == ""
