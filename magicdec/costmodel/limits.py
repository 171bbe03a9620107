"""The limits of a round's parts: what bytes and FLOPs take at the full rates of a machine."""

from collections.abc import Sequence
from typing import NamedTuple

from magicdec.costmodel.roofline import Pass, operators
from magicdec.costmodel.round import Setup
from magicdec.costmodel.step_fit import Limit


class Limits(NamedTuple):
    """The limits of a decode step, of a verification, of a draft step, and of the attention of a
    decode step.
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
        limit_of(setup.draft_pass, setup) if setup.draft.is_model else Limit(0.0, 0.0),
        limit_of(setup.target_pass, setup, reads=("kv",)),
    )


def limit_of(
    forward: Pass, setup: Setup, reads: Sequence[str] = ("weights", "kv", "activations")
) -> Limit:
    """Return the limit of a pass, or of its operators that read this."""
    of_pass = [op for op in operators(forward, setup.hardware) if op.reads in reads]
    num_bytes = sum(op.number * op.bytes for op in of_pass)
    num_flops = sum(op.number * op.flops for op in of_pass)
    device = setup.hardware.device
    return Limit(num_bytes / device.bandwidth, num_flops / device.flops)
