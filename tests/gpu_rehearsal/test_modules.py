"""Rounds of transformers' modules as a CUDA graph would capture them."""

from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import AutoModelForCausalLM

from magicdec.architectures.modules_config import ModulesConfig
from magicdec.attention.cuda.triton import TritonAttention
from magicdec.models.adapter.interface import NAME
from magicdec.models.adapter.modules_transformer import ModulesTransformer
from magicdec.models.adapter.transformers_library import config_from
from magicdec.models.description import describe
from tests.checkpoints import MODULES, SIZES
from tests.gpu_rehearsal.fake import fake_cuda, prefilled, rounds
from tests.small import new_engine

WIDE = {"head_dim": 64, "hidden_size": 128, "max_position_embeddings": 4096}


def fake_modules(family: str) -> ModulesTransformer:
    """Return a family's modules with weights on the fake device."""
    kind, settings = MODULES[family]
    with unset_fake_temporarily():
        config = describe(kind(**(SIZES | settings | WIDE)).to_dict(), family, "transformers")
    assert isinstance(config, ModulesConfig)
    with torch.device("cuda"):
        causal = AutoModelForCausalLM.from_config(
            config_from(config.config_json), dtype=torch.bfloat16, attn_implementation=NAME
        )
    return ModulesTransformer.of(config, causal, TritonAttention())


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("qwen3-moe", "streaming"),
        ("gpt-oss", "verify_guided"),
        ("gemma2", "quest"),
        ("gemma3", "window"),
    ],
)
def test_a_round_can_be_captured(family, policy):
    with fake_cuda() as recording, patch("torch.cuda.get_device_capability", lambda *_: (9, 0)):
        keys = {"gamma": 4, "budget": 512, "num_sink": 4, "generate_len": 96, "ignore_eos": False}
        batch = prefilled(new_engine(fake_modules(family), "self", policy=policy, **keys))
        seen = rounds(batch, recording)
    assert not seen.faults
    assert {launch.name for launch in seen.launches} & {"attend_split"}
