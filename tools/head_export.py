"""The folder of a trained head, in the layout of the speculators library."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from magicdec.architectures.head_config import HeadConfig
from magicdec.models.head import Head


def export(
    head: Head, ids_V: Tensor, target: Path, verifier: str | None, steps: int, out: Path
) -> None:
    """Write the head in the layout of speculators, in bfloat16, each file complete before it takes
    its name.

    config.json says that it was made for the target in this folder, under the name `verifier`, and
    for so many steps.
    """
    c, layer = head.config, head.layer
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    named = dict(zip(("q", "k", "v"), layer.qkv.weight.split((q, kv, kv)), strict=True))
    tensors = {f"layers.0.self_attn.{name}_proj.weight": weight for name, weight in named.items()}
    gate, up = layer.gate_up.weight.chunk(2)
    tensors |= {
        "fc.weight": head.fc.weight,
        "norm.weight": head.norm.weight,
        "lm_head.weight": head.head.weight,
    }
    tensors |= {
        f"layers.0.{name}.weight": weight
        for name, weight in (
            ("input_layernorm", layer.embedding_norm.weight),
            ("hidden_norm", layer.attention_norm.weight),
            ("self_attn.o_proj", layer.output.weight),
            ("post_attention_layernorm", layer.mlp_norm.weight),
            ("mlp.gate_proj", gate),
            ("mlp.up_proj", up),
            ("mlp.down_proj", layer.down.weight),
        )
    }
    tensors = {name: weight.detach().bfloat16().contiguous() for name, weight in tensors.items()}
    tensors["d2t"] = ids_V - torch.arange(len(ids_V))
    tensors["t2d"] = torch.zeros(c.vocab_size, dtype=torch.bool).index_fill_(0, ids_V, True)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors.tmp")
    (out / "model.safetensors.tmp").chmod(0o644)
    os.replace(out / "model.safetensors.tmp", out / "model.safetensors")
    described = config_json(c, target, verifier or str(target), steps)
    (out / "config.json").write_text(json.dumps(described, indent=2) + "\n")


def config_json(c: HeadConfig, target: Path, verifier: str, steps: int) -> dict[str, Any]:
    """Return the config.json of a head in the layout of speculators."""
    theirs = json.loads((target / "config.json").read_text())
    layer = {"model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu"}
    layer |= {"num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads}
    alike = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "head_dim",
        "max_position_embeddings",
    )
    layer |= {name: getattr(c, name) for name in (*alike, "rms_norm_eps", "rope_theta")}
    layer |= dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), False)
    made_for = {"name_or_path": verifier, "architectures": theirs["architectures"]}
    proposals = [{"proposal_type": "greedy", "speculative_tokens": steps}]
    proposed = {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": proposals,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": c.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(c.taps),
        "norm_before_residual": c.norm_before_residual,
        "transformer_layer_config": layer,
        "speculators_config": proposed | {"verifier": made_for},
    }
