"""Tiny random checkpoints, made and saved by transformers: for every family and switch that our
transformer covers, and for families that run as transformers' modules.
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from magicdec.architectures.modules_config import ModulesConfig
from magicdec.attention.base import Attention
from magicdec.attention.sdpa import SdpaAttention
from magicdec.models.adapter import load_modules as adapter
from magicdec.models.adapter.modules_transformer import ModulesTransformer
from magicdec.models.checkpoint import load
from magicdec.models.description import read_config
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

EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
SHARED_EXPERTS = EXPERTS | {"n_routed_experts": 8, "n_shared_experts": 1}
LATENTS = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
# Two tables of rotary frequencies, of which tests cross the bound.
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 45}
LONG_ROPE |= {"long_factor": [4.0] * 8, "short_factor": [1.0] * 8}
# A window that prompts of tests outgrow, in every other layer or as layer_types says.
ALTERNATING = {"head_dim": 16, "sliding_window": 12}
# The same for families that run as transformers' modules.
MODULES: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen3-moe": (Qwen3MoeConfig, EXPERTS | {"head_dim": 16, "num_experts": 8}),
    "mixtral": (MixtralConfig, {"head_dim": 16, "num_local_experts": 4, "sliding_window": 12}),
    "phi3": (Phi3Config, {"head_dim": 16, "hidden_size": 64}),
    "phi3-long": (
        Phi3Config,
        {
            "head_dim": 16,
            "hidden_size": 64,
            "original_max_position_embeddings": 45,
            "rope_parameters": LONG_ROPE,
        },
    ),
    "olmo2": (Olmo2Config, {"hidden_size": 64}),
    "gemma2": (Gemma2Config, ALTERNATING | {"query_pre_attn_scalar": 24}),
    "gemma3": (
        Gemma3TextConfig,
        ALTERNATING
        | {
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "glm4-moe": (Glm4MoeConfig, SHARED_EXPERTS | {"head_dim": 16, "first_k_dense_replace": 1}),
    "gpt-oss": (
        GptOssConfig,
        ALTERNATING
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek-v3": (
        DeepseekV3Config,
        SHARED_EXPERTS
        | LATENTS
        | {
            "v_head_dim": 16,
            "num_key_value_heads": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "llama-modules": (LlamaConfig, {"head_dim": 16}),
}

LINEAR, ATTENTION = "linear_attention", "full_attention"
DELTA_RULE = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 16}
DELTA_RULE |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12, "num_hidden_layers": 4}
ROUTED = EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32}
# Families with recurrent layers, in different orders.
HYBRIDS: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen3-next": (
        Qwen3NextConfig,
        DELTA_RULE | ROUTED | {"layer_types": [LINEAR, LINEAR, ATTENTION, LINEAR]},
    ),
    "qwen3.5": (
        Qwen3_5TextConfig,
        DELTA_RULE | {"layer_types": [LINEAR, ATTENTION, LINEAR, ATTENTION]},
    ),
    "qwen3.5-moe": (
        Qwen3_5MoeTextConfig,
        DELTA_RULE | ROUTED | {"layer_types": [ATTENTION, LINEAR, ATTENTION, LINEAR]},
    ),
}


def make_checkpoint(
    folder: Path, family: str = "llama", sharded: bool = False, seed: int = 0, **overrides: Any
) -> Path:
    """Save a random checkpoint of `family` (a key of FAMILIES, MODULES or HYBRIDS) in `folder`,
    which is returned.

    `overrides` are keys of the Hugging Face config. Every weight is random, norms and biases
    included, and large enough that logits differ clearly; `sharded` splits it over several files
    and an index.
    """
    config_class, settings = (FAMILIES | MODULES | HYBRIDS)[family]
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


def add_mtp(folder: Path, source: Path, count: int) -> Path:
    """Add modules that predict further tokens to a checkpoint, as DeepSeek and GLM name them: the
    last layer of another one each, in front of which are random weights. Return the folder.
    """
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(7)
    tensors, others = load_file(file), load_file(source / "model.safetensors")
    last = SIZES["num_hidden_layers"] - 1
    E = tensors["model.norm.weight"].shape[0]
    for module in range(count):
        prefix = f"model.layers.{last + 1 + module}."
        for name, tensor in others.items():
            if name.startswith(f"model.layers.{last}."):
                tensors[prefix + name.split(".", 3)[3]] = tensor.clone()
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{prefix}{name}.weight"] = 1 + 0.2 * torch.randn(E, generator=generator)
        joined = torch.randn(E, 2 * E, generator=generator) * (2 * E) ** -0.5
        tensors[f"{prefix}eh_proj.weight"] = joined
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("num_mtp_layers", None)
    config["num_nextn_predict_layers"] = count
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@lru_cache(maxsize=32)
def load_reference(folder: Path) -> PreTrainedModel:
    """The same checkpoint as transformers loads it, in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    """The checkpoint in our transformer, with reference attention, on the CPU."""
    config = read_config(folder, "native")
    with torch.device("meta"):
        model = Transformer(config, SdpaAttention())
    model.load_state_dict(load(folder, config, dtype, "cpu"), assign=True)
    return model.eval().requires_grad_(False)


def load_modules(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    attention: Attention | None = None,
    longest: int = 256,
) -> ModulesTransformer:
    """The checkpoint as transformers' modules over our caches, on the CPU."""
    config = read_config(folder, "transformers")
    assert isinstance(config, ModulesConfig)
    where = (dtype, torch.device("cpu"), attention or SdpaAttention(), longest)
    return adapter.load(folder, config, *where)


def written(
    reference: Any, prompts: list[list[int]], num_new: int, **options: Any
) -> list[list[int]]:
    """What transformers' own `generate` writes behind each prompt by itself, greedily."""
    settings = {"max_new_tokens": num_new, "do_sample": False, "pad_token_id": 0} | options
    rows = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        # With a mask of its own: generate would take tokens that equal the padding's for padding.
        row = reference.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0]
        rows.append(row[len(prompt) :].tolist())
    return rows
