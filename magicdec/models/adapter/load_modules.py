"""Make the modules of a model: without storage, with random weights, or from a checkpoint."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from magicdec.architectures.modules_config import ModulesConfig
from magicdec.attention.base import Attention
from magicdec.models.adapter.interface import NAME
from magicdec.models.adapter.modules_transformer import ModulesTransformer
from magicdec.models.adapter.recorded_pass import storeless
from magicdec.models.adapter.transformers_library import (
    check_version,
    config_from,
    quiet,
    read_causal,
)
from magicdec.models.random_weights import draw_matrices


def without_storage(
    config: ModulesConfig, dtype: torch.dtype, attention: Attention
) -> ModulesTransformer:
    """Return the model on the meta device."""
    quiet()
    whole = config_from(config.config_json)
    return ModulesTransformer.of(config, storeless(whole, dtype, NAME), attention)


def random(
    config: ModulesConfig,
    dtype: torch.dtype,
    device: torch.device,
    attention: Attention,
    longest: int,
) -> ModulesTransformer:
    """Return the model with random weights, made on the device."""
    quiet()
    with device:
        causal = AutoModelForCausalLM.from_config(
            config_from(config.config_json), dtype=dtype, attn_implementation=NAME
        )
    generator = torch.Generator(device).manual_seed(0)
    draw_matrices(causal.parameters(), generator)
    return _ready(config, causal, attention, longest)


def load(
    folder: Path,
    config: ModulesConfig,
    dtype: torch.dtype,
    device: torch.device,
    attention: Attention,
    longest: int,
) -> ModulesTransformer:
    """Return the model with a checkpoint's weights, on the device: see `read_causal`."""
    check_version()
    causal = read_causal(folder, config_from(config.config_json), dtype, NAME)
    return _ready(config, causal.to(device), attention, longest)


def _ready(
    config: ModulesConfig, causal: Any, attention: Attention, longest: int
) -> ModulesTransformer:
    if config.long_rope_from is not None:
        fix_long_rope(causal, longest)
    return ModulesTransformer.of(config, causal, attention)


def fix_long_rope(causal: Any, longest: int) -> None:
    """Let rotary embeddings with a short and a long table take, once and for all, the one for
    sequences of `longest` tokens. Entries of a cache then suit each other at every length.
    """
    for module in causal.modules():
        if getattr(module, "rope_type", None) == "longrope":
            [device] = {buffer.device for buffer in module.buffers()}
            place_11 = torch.tensor([[longest - 1]], device=device)
            module(torch.zeros(1, device=device), place_11)
            module.rope_type = "default"
