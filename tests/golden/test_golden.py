"""Records of some forty commands: an intended change is recorded by `python -m
tests.golden.record`.
"""

import pytest

from tests.golden.record import CASES, FAST, case_of, read, recorded

STORED = read()


def test_every_case_is_recorded():
    assert set(map(case_of, STORED)) == set(CASES)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CASES]
)
def test_a_command_does_what_is_recorded(name):
    assert recorded(name) == {key: record for key, record in STORED.items() if case_of(key) == name}
