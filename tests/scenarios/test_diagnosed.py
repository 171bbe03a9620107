"""The lines of a profile as the cells that are diagnosed."""

import pytest

from magicdec.config.registry import DRAFTS
from magicdec.costmodel.hardware import hardware_named
from magicdec.costmodel.round import Setup
from magicdec.costmodel.targets import architecture
from magicdec.scenarios.diagnosed import cells_of

STEPS = {"time/target_decode_ms": 8.0, "time/round_ms": 14.0, "time/verify_ms": 9.0}
POINT = {"batch_size": 8, "context_len": 4096, "gamma": 4, "acceptance_length": 3.0}


@pytest.fixture
def setup():
    draft = DRAFTS["ngram"].facts(gamma=4)
    return Setup(architecture("llama-3.1-8b"), hardware_named("h100"), 8, 4096, draft)


def test_what_our_own_profile_calls_overhead_is_not_drafting(setup):
    """14 ms of a round are 9 ms of verification, 4 x 0.5 ms of drafting, and 3 ms of overhead."""
    line = POINT | STEPS | {"time/draft_ms": 0.5, "time/overhead_ms": 3.0}
    [cell] = cells_of([line], setup)
    assert cell.draft_s == pytest.approx(0.5e-3)
    assert cell.overhead_s == pytest.approx(3e-3)


def test_from_outside_all_that_is_no_verification_is_drafting(setup):
    [cell] = cells_of([POINT | STEPS], setup)
    assert cell.draft_s == pytest.approx((14 - 9) * 1e-3 / 4)
    assert cell.overhead_s == 0
