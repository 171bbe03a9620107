from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from magicdec.architectures.hugging_face import from_hugging_face
from magicdec.architectures.model_config import ModelConfig, RopeScaling
from magicdec.models.rope import angles_table, frequencies_on, rope_frequencies, rotate

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
SCALINGS = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3.1": {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
    "llama3.2": {"rope_type": "llama3", "factor": 32.0, **LLAMA3},
    "yarn": {"rope_type": "yarn", **YARN},
    "yarn-untruncated": {"rope_type": "yarn", **YARN, "truncate": False},
    "yarn-betas": {"rope_type": "yarn", **YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-narrow-ramp": {"rope_type": "yarn", **YARN, "beta_fast": 1e-6, "beta_slow": 1e-7},
    "yarn-attention": {"rope_type": "yarn", **YARN, "attention_factor": 1.25},
    "yarn-factor-1": {"rope_type": "yarn", **YARN, "factor": 1.0},
}


def hugging_face(scaling: dict | None, head_dim: int, theta: float) -> LlamaConfig:
    sizes = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "head_dim": head_dim}
    rope = {
        "max_position_embeddings": 131072,
        "rope_theta": theta,
        "rope_scaling": scaling and dict(scaling),
    }
    return LlamaConfig(**sizes, **rope)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1000000.0])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_frequencies_equal_those_of_transformers(scaling, theta, head_dim):
    theirs = hugging_face(scaling, head_dim, theta)
    if scaling is None:
        expected, factor = LlamaRotaryEmbedding(theirs).inv_freq, 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"))
    frequencies, attention_factor = rope_frequencies(from_hugging_face(theirs.to_dict()))
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, expected)
    assert attention_factor == factor


def rope_table(config: ModelConfig, positions):
    return angles_table(*frequencies_on(config, positions.device), positions)


@pytest.mark.parametrize("scaling", ["none", "llama3.1", "yarn"])
def test_rotation_equals_that_of_transformers(scaling):
    theirs = hugging_face(SCALINGS[scaling], 64, 500000.0)
    ours = from_hugging_face(theirs.to_dict())
    x_BTHD = torch.randn(2, 7, 6, 64)
    positions_BT = torch.stack([torch.arange(7), torch.arange(100_000, 100_007)])
    cos, sin = LlamaRotaryEmbedding(theirs)(x_BTHD, positions_BT)
    expected, _ = apply_rotary_pos_emb(x_BTHD, x_BTHD, cos, sin, unsqueeze_dim=2)
    cos, sin = rope_table(ours, positions_BT)
    assert cos.shape == sin.shape == (2, 7, 32)
    torch.testing.assert_close(
        rotate(x_BTHD, cos[:, :, None], sin[:, :, None]), expected, rtol=0, atol=1e-5
    )


PLAIN = ModelConfig(32, 64, 96, 2, 4, 2, 16, 256)
YARNED = replace(PLAIN, rope_scaling=RopeScaling("yarn", 4.0, original_max_position_embeddings=64))


def test_positions_of_any_shape_and_integer_type():
    wide = torch.randint(0, 1000, (2, 3, 5))
    cos, _ = rope_table(YARNED, wide)
    assert cos.shape == (2, 3, 5, 8)
    assert torch.equal(cos, rope_table(YARNED, wide.int())[0])


def test_halves_are_computed_in_float32_and_returned_in_the_input_type():
    x_NHD = torch.randn(9, 3, 16).bfloat16()
    cos, sin = rope_table(YARNED, torch.arange(9))
    turned = rotate(x_NHD, cos[:, None], sin[:, None])
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate(x_NHD.float(), cos[:, None], sin[:, None]).bfloat16())
