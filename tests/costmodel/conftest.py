from dataclasses import fields

import pytest

from magicdec.architectures.model_config import ModelConfig
from magicdec.config.groups import Efficiency
from magicdec.config.registry import POLICIES
from magicdec.costmodel.hardware import DEVICES, Hardware, hardware_named
from magicdec.costmodel.round import Setup
from magicdec.costmodel.stacks import STACKS
from magicdec.costmodel.targets import architecture

SMALL = ModelConfig(
    1000,
    64,
    160,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=4096,
)


def changed(setup, policy=None, **changes):
    """A setup with another policy, and with keys of the policy among `changes`."""
    facts = POLICIES[policy or setup.cache.policy].facts
    keys = {"budget": setup.cache.budget}
    keys |= {
        entry.name: changes.pop(entry.name) for entry in fields(facts) if entry.name in changes
    }
    return setup.at(cache=facts(**keys), **changes)


@pytest.fixture(scope="session")
def model():
    """Architectures by name, from conf/target."""
    return architecture


@pytest.fixture
def setup(model):
    """A factory of self-speculation on a machine as it is."""

    def make(target="llama-3.1-8b", hardware="8xA100", batch=64, context=32_000, **changes):
        return changed(
            Setup(model(target), hardware_named(hardware), batch, context, target_name=target),
            **changes,
        )

    return make


PERFECT = dict.fromkeys(
    ("bandwidth_fraction", "matmul_fraction", "allreduce_bandwidth_fraction"), 1.0
)
PERFECT |= dict.fromkeys(
    ("matmul_half_rows", "layer_overhead_us", "round_overhead_us", "allreduce_hop_us"), 0.0
)


@pytest.fixture
def ideal():
    """A factory of machines that achieve their datasheets, with no overhead."""

    def make(count=1, device="H100", stack="magicdec", **efficiency):
        achieved = Efficiency(**(PERFECT | efficiency))
        return Hardware(f"{count}x{device}", DEVICES[device], count, achieved, STACKS[stack])

    return make
