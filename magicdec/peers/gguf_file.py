"""Write a checkpoint of Llama's architecture as a GGUF file, in the environment of llama.cpp's
worker.

    python gguf_file.py FOLDER FILE DTYPE

Matrices get the dtype (float32, float16 or bfloat16), norms float32. The vocabulary names each
token by its id, as "[17]", and none of them is special: prompts are token ids, and the run decides
what ends a sequence.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf.utility import SafetensorsLocal

TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def write(folder: Path, path: Path, dtype: str) -> None:
    """Write the file."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    add_architecture(writer, config)
    kind = gguf.GGMLQuantizationType[TYPES[dtype]]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for file in files_of(folder):
        for name, tensor in SafetensorsLocal(file).tensors.items():
            if name.endswith("rotary_emb.inv_freq"):  # some checkpoints store what follows from it
                continue
            raw = tensor.mmap_bytes()
            weight = gguf.dequantize(raw, gguf.GGMLQuantizationType[tensor.dtype]).reshape(
                tensor.shape
            )
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                is_query = name.endswith("q_proj.weight")
                weight = interleaved(
                    weight, config["num_attention_heads"] if is_query else num_kv_heads(config)
                )
            stored_kind = kind if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
            gguf_name = names.get_name(name, [".weight"])
            assert gguf_name, f"{name} is not a weight of a Llama"
            writer.add_tensor(
                gguf_name, gguf.quants.quantize(weight, stored_kind), raw_dtype=stored_kind
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def files_of(folder: Path) -> list[Path]:
    """Return the files of the weights: the only one, or those of the index."""
    single = folder / "model.safetensors"
    if single.exists():
        return [single]
    places = json.loads((folder / f"{single.name}.index.json").read_text())["weight_map"]
    return sorted({folder / name for name in places.values()})


def num_kv_heads(config: dict) -> int:
    """Return the number of KV heads; without a number of their own, as many as query heads."""
    return config.get("num_key_value_heads") or config["num_attention_heads"]


def add_architecture(writer: gguf.GGUFWriter, config: dict) -> None:
    """Add sizes and the vocabulary."""
    heads, vocab = config["num_attention_heads"], config["vocab_size"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(num_kv_heads(config))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    # As in magicdec/architectures/hugging_face.py.
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_vocab_size(vocab)
    # Of llama.cpp's kinds of vocabulary, the one that has no end by default.
    writer.add_tokenizer_model("bert")
    writer.add_token_list([f"[{token}]" for token in range(vocab)])
    writer.add_token_types([gguf.TokenType.NORMAL] * vocab)


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of each head in the order of llama.cpp, whose rotary pairs are neighbours."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
