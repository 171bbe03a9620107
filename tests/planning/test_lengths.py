"""Lengths are checked by the key that a scenario reads."""

import pytest

from magicdec.config.load import compose
from magicdec.errors import UserError
from magicdec.planning.resolve import resolve

SHORT = ["target=tinyllama-1.1b", "target.weights=random", "data=random"]  # 2,048 tokens


def plan(*overrides):
    return resolve(compose([*overrides, "hardware=cpu"]))


def test_a_target_of_short_contexts_is_profiled_at_short_ones():
    """batch.context_len is 4,096 by default, and no key of this scenario."""
    assert plan("scenario=profile", *SHORT, "scenario.context_lens=[1024]").longest == 1024 + 64


@pytest.mark.parametrize("scenario", ["profile", "verify"])
def test_a_grid_beyond_the_targets_context_is_refused_by_its_key(scenario):
    said = (
        r"scenario\.context_lens=9000 .* maximum of 8448 tokens; scenario\.context_lens=8\d+ would"
    )
    with pytest.raises(UserError, match=said):
        plan(f"scenario={scenario}", "scenario.context_lens=[1024,9000]")
