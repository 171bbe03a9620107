"""Tiny random checkpoints, made and saved by transformers, for every family and switch that the
transformer covers.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from magicdec.attention.sdpa import SdpaAttention
from magicdec.models.checkpoint import load, read_config
from magicdec.models.transformer import Transformer

SIZES = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
SIZES |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SLIDING = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}

# Name -> the class of its config and what it sets in addition to SIZES.
FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama-mha": (LlamaConfig, {"num_key_value_heads": 4, "head_dim": 12}),
    "llama-mqa": (LlamaConfig, {"num_key_value_heads": 1, "head_dim": 20}),
    "llama-tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama-bias": (LlamaConfig, {"attention_bias": True}),
    "llama-linear": (LlamaConfig, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "llama-llama3": (LlamaConfig, {"rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    "llama-yarn": (LlamaConfig, {"rope_scaling": YARN}),
    "mistral": (MistralConfig, {"sliding_window": None, "head_dim": 16}),
    "mistral-sliding": (MistralConfig, {"sliding_window": 12}),
    "qwen2": (
        Qwen2Config,
        {"use_sliding_window": False, "sliding_window": 12, "max_window_layers": 0},
    ),
    "qwen2-sliding": (Qwen2Config, SLIDING),
    "qwen2-yarn": (
        Qwen2Config,
        {"rope_theta": 1000000.0, "rope_scaling": YARN | {"truncate": False}},
    ),
    "qwen3": (Qwen3Config, {"head_dim": 16, "rope_theta": 1000000.0}),
    "qwen3-tied": (Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-sliding": (Qwen3Config, SLIDING | {"head_dim": 16, "attention_bias": True}),
}


def make_checkpoint(
    folder: Path, family: str = "llama", sharded: bool = False, seed: int = 0, **overrides: Any
) -> Path:
    """Save a random checkpoint of `family` (a key of FAMILIES) in `folder`, which is returned.

    `overrides` are keys of the Hugging Face config. Every weight is random, norms and biases
    included, and large enough that logits differ clearly; `sharded` splits it over several files
    and an index.
    """
    config_class, settings = FAMILIES[family]
    config = config_class(**(SIZES | settings | overrides))
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder, **({"max_shard_size": "40KB"} if sharded else {}))
    return folder


@lru_cache(maxsize=32)
def load_reference(folder: Path) -> PreTrainedModel:
    """The same checkpoint as transformers loads it, in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    """The checkpoint in our transformer, with reference attention, on the CPU."""
    config = read_config(folder)
    with torch.device("meta"):
        model = Transformer(config, SdpaAttention())
    model.load_state_dict(load(folder, config, dtype, "cpu"), assign=True)
    return model.eval().requires_grad_(False)
