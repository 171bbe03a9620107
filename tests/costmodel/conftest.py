from dataclasses import fields

import pytest

from magicdec.architectures import ModelConfig
from magicdec.config.registry import POLICIES
from magicdec.config.schema import Efficiency
from magicdec.costmodel.hardware import DEVICES, STACKS, Hardware
from magicdec.costmodel.targets import architecture

SMALL = ModelConfig(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=160,
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
    keys |= {entry.name: changes.pop(entry.name) for entry in fields(facts) if entry.name in changes}
    return setup.at(cache=facts(**keys), **changes)


@pytest.fixture(scope="session")
def model():
    """Architectures by name, from conf/target."""
    return architecture


@pytest.fixture
def ideal():
    """A factory of machines that achieve their datasheets, with no overhead."""

    def make(count=1, device="H100", stack="magicdec", **efficiency):
        perfect = {
            "bandwidth_fraction": 1.0,
            "matmul_fraction": 1.0,
            "matmul_half_rows": 0.0,
            "layer_overhead_us": 0.0,
            "round_overhead_us": 0.0,
            "allreduce_hop_us": 0.0,
            "allreduce_bandwidth_fraction": 1.0,
        }
        return Hardware(
            f"{count}x{device}", DEVICES[device], count, Efficiency(**(perfect | efficiency)), STACKS[stack]
        )

    return make
