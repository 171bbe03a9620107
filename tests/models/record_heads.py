"""Record what the speculators library computes with random heads, for test_heads.py.

Run once, in an environment of its own (pip install speculators==0.9.0), from the root of the
checkout:

    python tests/models/record_heads.py

Writes into tests/models/heads: small random targets, and a folder for each case with a head in one
of the two layouts and expected.safetensors, which has tokens, the target's hidden states, and the
head's outputs and logits at three steps. Heads in the layout of EAGLE's authors are read by the
library's own converter. Its `forward` returns token ids only, so that outputs and logits are read
by hooks.

S tokens, L layers, E hidden size, V draft vocabulary.
"""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.convert.eagle.eagle3_converter import Eagle3Converter
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

HEADS = Path(__file__).parent / "heads"
TOKENS, STEPS, VOCAB, DRAFT_VOCAB = 14, 3, 37, 23
TAPS = [2, 4, 5]  # of 8 layers, as EAGLE-3 chooses them
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
SIZES |= {"rms_norm_eps": 1e-5, "attention_bias": False}
TARGETS = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen3": (Qwen3ForCausalLM, Qwen3Config)}
CASES = {  # name: family of the target, layout of the head, its switches
    "llama-eagle": ("llama", "eagle", {}),
    "qwen3-eagle": ("qwen3", "eagle", {}),
    "llama-speculators": (
        "llama",
        "speculators",
        {"norm_before_residual": True, "norm_before_fc": True},
    ),
    "qwen3-speculators": ("qwen3", "speculators", {"fc_norm": True, "norm_output": True}),
}


def random_weights(module: torch.nn.Module) -> None:
    """Fill all parameters with numbers that leave no part without an effect."""
    for parameter in module.parameters():
        spread = 0.3 if parameter.dim() > 1 else 0.2
        parameter.data.normal_(0, spread).add_(0.0 if parameter.dim() > 1 else 1.0)


def new_target(family: str, folder: Path) -> torch.nn.Module:
    """Save and return a random target, the same in each case."""
    torch.manual_seed(0)
    model_class, config_class = TARGETS[family]
    model = model_class(
        config_class(**SIZES, num_hidden_layers=8, tie_word_embeddings=False)
    ).eval()
    random_weights(model)
    model.save_pretrained(folder)
    return model


def vocabulary() -> tuple[torch.Tensor, torch.Tensor]:
    """Return t2d and d2t of a random part of the vocabulary."""
    ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    return torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True), ids - torch.arange(
        DRAFT_VOCAB
    )


def new_head(family: str, target: Path, switches: dict) -> Eagle3DraftModel:
    """Return a random head whose layer is of the target's family."""
    layer = TARGETS[family][1](**SIZES, num_hidden_layers=1, tie_word_embeddings=False)
    layer._attn_implementation = "eager"
    methods = [GreedyTokenProposalConfig(speculative_tokens=STEPS)]
    verifier = VerifierConfig.from_pretrained(str(target))
    greedy = {"proposal_methods": methods, "default_proposal_method": "greedy"}
    described = SpeculatorsConfig(algorithm="eagle3", verifier=verifier, **greedy)
    config = {"draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": TAPS, **switches}
    config |= {"transformer_layer_config": layer, "speculators_config": described}
    head = Eagle3DraftModel(Eagle3SpeculatorConfig(**config))
    random_weights(head)
    head.load_vocab_mappings(*vocabulary())
    return head


def as_eagle(head: Eagle3DraftModel, target: Path, folder: Path) -> Eagle3DraftModel:
    """Write a head as EAGLE's authors do, and return it as the library reads it from there."""
    with tempfile.TemporaryDirectory() as name:
        head.save_pretrained(name)
        tensors = load_file(Path(name) / "model.safetensors")
    tensors = {
        key.replace("layers.0.", "midlayer."): value
        for key, value in tensors.items()
        if "embed" not in key
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        **SIZES,
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCAB,
    }
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    with tempfile.TemporaryDirectory() as name:
        Eagle3Converter().convert(
            folder, name, str(target), validate=False, eagle_aux_hidden_state_layer_ids=TAPS
        )
        config = Eagle3SpeculatorConfig.from_pretrained(name)
        config.transformer_layer_config._attn_implementation = "eager"
        read = Eagle3DraftModel(config)
        read.load_state_dict(load_file(Path(name) / "model.safetensors"), strict=False)
    return read


@torch.no_grad()
def record(case: str) -> None:
    family, layout, switches = CASES[case]
    folder, at = HEADS / case, HEADS / f"target-{family}"
    shutil.rmtree(folder, ignore_errors=True)
    target = new_target(family, at)
    head = new_head("llama" if layout == "eagle" else family, at, switches)
    if layout == "eagle":
        head = as_eagle(head, at, folder)
    else:
        head.embed_tokens.weight.fill_(torch.nan)  # which asks for the target's own
    head.load_verifier_weights()
    if layout == "speculators":
        head.save_pretrained(folder)
    head.eval()
    tokens_S = torch.randint(0, VOCAB, (1, TOKENS))
    states = target(tokens_S, output_hidden_states=True).hidden_states
    hidden_SN = torch.cat([states[layer] for layer in TAPS], dim=-1)
    found: dict[str, list[torch.Tensor]] = {"outputs": [], "logits": []}
    head.layers[0].register_forward_hook(lambda *call: found["outputs"].append(call[-1][0]))
    head.lm_head.register_forward_hook(lambda *call: found["logits"].append(call[-1][0]))
    # Each hidden state goes with the token behind it.
    inputs = {"hidden_states": hidden_SN[:, :-1], "input_ids": tokens_S[:, 1:]}
    documents = torch.zeros(1, TOKENS - 1, dtype=torch.long)
    ids = head(**inputs, document_ids=documents, ttt_steps=STEPS)
    stacked = {name: torch.stack(values) for name, values in found.items()}
    stacked |= {"tokens": tokens_S[0], "hidden": hidden_SN[0], "draft_ids": torch.cat(ids)}
    save_file(
        {name: value.contiguous() for name, value in stacked.items()},
        folder / "expected.safetensors",
    )
    tidy(folder)
    tidy(at)


def tidy(folder: Path) -> None:
    """Leave only configuration and tensors, without this machine's paths."""
    for path in folder.iterdir():
        path.chmod(0o644)
        if path.name == "config.json":
            path.write_text(path.read_text().replace(f"{HEADS}/", ""))
        elif path.suffix != ".safetensors":
            path.unlink()


if __name__ == "__main__":
    for case in CASES:
        record(case)
