"""The limits of a round's parts, next to the times of a machine that reaches all its rates."""

from dataclasses import replace

import pytest

from magicdec.architectures.mtp_config import MtpConfig
from magicdec.config.choices import ModelChoice
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.costmodel.comparison import PERFECT
from magicdec.costmodel.hardware import hardware_named
from magicdec.costmodel.kernel_costs import KernelCosts
from magicdec.costmodel.limits import draft_depth, limits
from magicdec.costmodel.round import Setup, round_times

GAMMA = 8


@pytest.fixture
def setup_with(model):
    """A machine without overheads or a slow kernel, and a draft over the target's states."""
    machine = replace(hardware_named("h100"), efficiency=PERFECT, kernels=KernelCosts())
    target = model("qwen3-8b")

    def setup(kind: str, architecture=None) -> Setup:
        facts = DRAFTS[kind].facts
        own = architecture or facts().assumed_model(target)
        draft = facts(model=ModelChoice(kind, architecture=own), gamma=GAMMA)
        return Setup(target, machine, 1, 4096, draft, POLICIES["full"].facts())

    return setup


@pytest.mark.parametrize("kind", ["dflash", "eagle3", "mtp"])
def test_a_perfect_machine_takes_the_limit_of_a_draft_step(setup_with, kind):
    """The bytes of one row take longer than its FLOPs in every operator, so that the limits add
    up. A draft that fills a block in one pass has a step of a pass over gamma.
    """
    setup = setup_with(kind)
    step_s = round_times(setup, GAMMA).draft.total
    assert limits(setup, GAMMA).draft.seconds == pytest.approx(step_s, rel=0.05)


def test_the_depth_of_a_draft_is_that_of_the_pass_which_a_step_stands_for(setup_with):
    """A step of multi-token prediction runs one of its modules; a block's pass is gamma steps."""
    target = setup_with("mtp").target
    layers = target.num_layers
    modules = replace(MtpConfig.like(target), num_layers=2)
    assert draft_depth(setup_with("mtp", modules), GAMMA) == 1 / layers
    block = setup_with("dflash")
    assert draft_depth(block, GAMMA) == block.draft_model.num_layers / layers / GAMMA
    assert draft_depth(setup_with("eagle3"), GAMMA) == 1 / layers
