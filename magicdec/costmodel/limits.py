"""The limits of a round's parts: what bytes and FLOPs take at the full rates of a machine."""

from collections.abc import Sequence
from typing import NamedTuple

from magicdec.costmodel.roofline import Pass, operators
from magicdec.costmodel.round import Setup
from magicdec.costmodel.step_fit import Limit


class Limits(NamedTuple):
    """The limits of a decode step, of a verification, of a draft step, and of the attention of a
    decode step. A draft step is a proposal over gamma.
    """

    target: Limit
    verify: Limit
    draft: Limit
    entries: Limit


def limits(setup: Setup, gamma: int) -> Limits:
    """Return the limits of a round that proposes `gamma` tokens."""
    verify = setup.target_pass._replace(query_tokens=gamma + 1)
    return Limits(
        limit_of(setup.target_pass, setup),
        limit_of(verify, setup),
        _draft_limit(setup, gamma),
        limit_of(setup.target_pass, setup, reads=("kv",)),
    )


def _draft_limit(setup: Setup, gamma: int) -> Limit:
    if not setup.draft.is_model:
        return Limit(0.0, 0.0)
    step = setup.draft_pass
    if not setup.draft.proposes_blocks:
        return limit_of(step, setup)
    rows = setup.batch * (gamma + 1)
    block = step._replace(query_tokens=gamma + 1, weight_bytes=setup.moved_weight_bytes(rows))
    whole = limit_of(block, setup)
    return Limit(whole.bytes_s / gamma, whole.flops_s / gamma)


def draft_depth(setup: Setup, gamma: int) -> float:
    """Return the layers of a draft step over those of the target: as many times an overhead of a
    pass belongs to a step. A pass over a block is gamma steps.
    """
    layers = setup.draft.step_model(setup.draft_model).num_layers
    steps = gamma if setup.draft.proposes_blocks else 1
    return layers / setup.target.num_layers / steps


def limit_of(
    forward: Pass, setup: Setup, reads: Sequence[str] = ("weights", "kv", "activations")
) -> Limit:
    """Return the limit of a pass, or of its operators that read this."""
    of_pass = [op for op in operators(forward, setup.hardware) if op.reads in reads]
    num_bytes = sum(op.number * op.bytes for op in of_pass)
    num_flops = sum(op.number * op.flops for op in of_pass)
    device = setup.hardware.device
    return Limit(num_bytes / device.bandwidth, num_flops / device.flops)
