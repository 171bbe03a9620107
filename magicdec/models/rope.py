"""Rotary position embeddings (Su et al. 2021) in the half-split convention of Hugging Face
checkpoints.

Shapes: B rows, T tokens, H heads (query or KV), D head dim, D2 = D / 2. Feature i of the first half
turns together with feature i of the second half by the angle position * frequency_i; Meta's own
checkpoints pair neighbours instead.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from magicdec.architectures.model_config import ModelConfig, RopeScaling


def rope_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Return the angle per position of each pair of features, and the factor of cosines and sines.

    Frequencies are (D2,) in float32 on the CPU, in radians per token. The factor differs from 1
    under YaRN only, where it sharpens attention. Both equal `ROPE_INIT_FUNCTIONS` of transformers
    bit for bit.
    """
    exponents_D2 = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    periods_D2 = config.rope_theta**exponents_D2
    scaling = config.rope_scaling
    if scaling is None:
        return 1.0 / periods_D2, 1.0
    if scaling.kind == "linear":
        return 1.0 / periods_D2 / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(1.0 / periods_D2, scaling), 1.0
    return _yarn(periods_D2, config, scaling)


def angles_table(
    frequencies_D2: Tensor, attention_factor: float, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of every position, the attention factor folded in.

    It takes only tensors, so that it can be compiled. The first two arguments are the results of
    `frequencies_on`. `positions` may have any shape and integer type, such as (B, T) or (B, K, S).
    The results add a last dimension D2, in float32.
    """
    angles = positions.unsqueeze(-1) * frequencies_D2
    cos, sin = angles.cos(), angles.sin()
    if attention_factor != 1.0:
        cos, sin = cos * attention_factor, sin * attention_factor
    return cos, sin


def rotate(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate features by the angles of their token, in float32. Return them in the type of
    `x_BTHD`.

    `x_BTHD` may have any leading dimensions; `cos` and `sin` end in D2 and broadcast against them:
    a table (B, T, D2) goes in as (B, T, 1, D2). Query and key heads that are side by side, as a
    fused projection leaves them, are best turned in one call.
    """
    first, second = x_BTHD.float().chunk(2, dim=-1)
    turned_first = torch.addcmul(first * cos, second, sin, value=-1)
    turned_second = torch.addcmul(second * cos, first, sin)
    return torch.cat((turned_first, turned_second), dim=-1).to(x_BTHD.dtype)


@lru_cache(maxsize=32)
def frequencies_on(config: ModelConfig, device: torch.device) -> tuple[Tensor, float]:
    """Return `rope_frequencies` on a device, cached: a CUDA graph could not capture copying them
    there.
    """
    frequencies_D2, attention_factor = rope_frequencies(config)
    return frequencies_D2.to(device), attention_factor


def _llama3(frequencies_D2: Tensor, scaling: RopeScaling) -> Tensor:
    """Scale as Llama 3.1: stretch long wavelengths by `factor`, keep short ones, blend those
    between linearly.
    """
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    context = scaling.original_max_position_embeddings
    assert low is not None, "RopeScaling has checked"
    assert high is not None, "RopeScaling has checked"
    assert context is not None, "RopeScaling has checked"
    wavelengths = 2 * math.pi / frequencies_D2
    blend = (context / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies_D2 / scaling.factor + blend * frequencies_D2
    scaled = torch.where(wavelengths > context / low, frequencies_D2 / scaling.factor, blended)
    return torch.where(wavelengths < context / high, frequencies_D2, scaled)


def _yarn(periods_D2: Tensor, config: ModelConfig, scaling: RopeScaling) -> tuple[Tensor, float]:
    """Scale as YaRN (Peng et al. 2023, arXiv 2309.00071): a ramp over features from kept to
    stretched.
    """
    context, dim = scaling.original_max_position_embeddings, config.head_dim
    assert context is not None, "RopeScaling has checked"

    def feature_that_turns(rotations: float) -> float:
        """Return the (fractional) index of the features that turn `rotations` times within the
        original context.
        """
        return (
            dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))
        )

    low = feature_that_turns(scaling.beta_fast)
    high = feature_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    frequencies = 1.0 / (scaling.factor * periods_D2) * (1 - kept) + 1.0 / periods_D2 * kept
    factor = scaling.attention_factor
    if factor is None:
        factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return frequencies, factor
