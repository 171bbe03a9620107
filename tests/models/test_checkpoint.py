import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from magicdec.config.registry import PACKAGE
from magicdec.errors import UserError
from magicdec.models.checkpoint import fingerprint, load, pieces, read_config, stored_in_bfloat16
from tests.checkpoints import load_reference, make_checkpoint

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def read(folder: Path) -> dict[str, torch.Tensor]:
    return load(folder, read_config(folder), torch.float32, "cpu")


def refusal(folder: Path) -> str:
    """The one line that loading the folder ends in."""
    with pytest.raises(UserError) as error:
        read(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def assert_equal_to_transformers(folder: Path) -> None:
    config, state = read_config(folder), read(folder)
    theirs = load_reference(folder).state_dict()
    for piece in pieces(config):
        rows = state[piece.parameter][piece.first_row : piece.first_row + piece.shape[0]]
        assert torch.equal(rows, theirs.pop(piece.source)), piece
    theirs.pop("lm_head.weight", None)  # listed next to the embedding where they are tied
    assert not theirs
    assert sum(tensor.numel() for tensor in state.values()) == config.num_parameters


def test_every_tensor_equals_that_of_transformers(checkpoint):
    assert_equal_to_transformers(checkpoint)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_sharded_checkpoints(tmp_path, family):
    make_checkpoint(tmp_path, family, sharded=True)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert not (tmp_path / SINGLE).exists()
    assert_equal_to_transformers(tmp_path)


def test_queries_keys_and_values_are_fused_in_this_order(tmp_path):
    make_checkpoint(tmp_path, "qwen2")
    state, theirs = read(tmp_path), load_reference(tmp_path).state_dict()
    attention, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp."
    for kind in ("weight", "bias"):
        parts = [theirs[f"{attention}{name}_proj.{kind}"] for name in "qkv"]
        assert torch.equal(state[f"layers.1.qkv.{kind}"], torch.cat(parts))
    parts = [theirs[f"{mlp}{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(state["layers.1.gate_up.weight"], torch.cat(parts))
    assert "head.weight" in state
    assert "head.weight" not in read(make_checkpoint(tmp_path / "tied", "llama-tied"))


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_come_in_the_dtype_asked_for(llama, stored):
    save_file({name: tensor.to(stored) for name, tensor in load_file(llama / SINGLE).items()}, llama / SINGLE)
    state = load(llama, read_config(llama), torch.bfloat16, "cpu")
    expected = load_file(llama / SINGLE)["model.norm.weight"].bfloat16()
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    assert torch.equal(state["norm.weight"], expected)


def test_matrices_that_are_stored_in_bfloat16_can_stay_so(llama):
    """They are the same numbers. A parameter of which one part is stored in another type is none of them."""
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(llama / SINGLE).items()}
    tensors["model.layers.1.self_attn.k_proj.weight"] = tensors["model.layers.1.self_attn.k_proj.weight"].float()
    save_file(tensors, llama / SINGLE)
    config, whole = read_config(llama), read(llama)
    names = stored_in_bfloat16(llama, config)
    assert names == {name for name, tensor in whole.items() if tensor.dim() == 2} - {"layers.1.qkv.weight"}
    state = load(llama, config, torch.float32, "cpu", compact=names)
    assert {name for name, tensor in state.items() if tensor.dtype == torch.bfloat16} == names
    assert all(torch.equal(state[name].float(), tensor) for name, tensor in whole.items())


def test_progress_adds_up_to_the_number_of_parameters(llama):
    config, seen = read_config(llama), []
    load(llama, config, torch.float32, "cpu", progress=seen.append)
    assert len(seen) == len(list(pieces(config)))
    assert sum(seen) == config.num_parameters


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read and reset through Linux's /proc")
def test_peak_memory_is_one_copy_of_the_weights(tmp_path):
    make_checkpoint(tmp_path, hidden_size=512, intermediate_size=2048, num_hidden_layers=6, sharded=False)
    size = (tmp_path / SINGLE).stat().st_size

    def memory(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    config = read_config(tmp_path)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = memory("VmRSS")
    state = load(tmp_path, config, torch.float32, "cpu")
    assert memory("VmHWM") - before < 1.25 * size
    assert sum(tensor.nbytes for tensor in state.values()) > 0.99 * size


def test_computed_and_tied_tensors_in_old_checkpoints_are_skipped(tmp_path):
    make_checkpoint(tmp_path, "llama-tied")
    tensors = load_file(tmp_path / SINGLE)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / SINGLE)
    assert "head.weight" not in read(tmp_path)


# What can be wrong with a checkpoint


def change_config(folder: Path, **keys: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_no_config(llama):
    (llama / "config.json").unlink()
    assert refusal(llama).startswith(f"{llama / 'config.json'} cannot be read (No such file")


@pytest.mark.parametrize("content", ["{", "", "[]", '"text"'])
def test_a_config_that_is_no_json_object(llama, content):
    (llama / "config.json").write_text(content)
    assert str(llama / "config.json") in refusal(llama)


def test_a_missing_tensor(llama):
    tensors = load_file(llama / SINGLE)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, llama / SINGLE)
    assert "the tensor model.layers.2.mlp.up_proj.weight is missing" in refusal(llama)


def test_a_tensor_of_another_shape(llama):
    change_config(llama, vocab_size=100)
    message = refusal(llama)
    assert str(llama / SINGLE) in message
    assert "model.embed_tokens.weight has shape (96, 48), config.json says (100, 48)" in message


def test_tensors_without_a_place(tmp_path):
    make_checkpoint(tmp_path, "llama-bias")
    change_config(tmp_path, attention_bias=False)
    assert "12 tensors have no place" in refusal(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 300, -1])
def test_a_truncated_file(llama, kept):
    content = (llama / SINGLE).read_bytes()
    (llama / SINGLE).write_bytes(content[:kept])
    assert f"{llama / SINGLE} is truncated" in refusal(llama)


def test_a_file_with_bytes_to_spare(llama):
    with (llama / SINGLE).open("ab") as file:
        file.write(b"more")
    assert "truncated or corrupt" in refusal(llama)


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\noid sha256:0", bytes(64)])
def test_a_file_of_another_kind(llama, content):
    (llama / SINGLE).write_bytes(content)
    assert f"{llama / SINGLE} is truncated, corrupt or a Git LFS pointer" in refusal(llama)


def test_a_missing_shard(tmp_path):
    make_checkpoint(tmp_path, sharded=True)
    shard = sorted(tmp_path.glob("*.safetensors"))[2]
    shard.unlink()
    assert f"{shard} cannot be read (No such file or directory)" in refusal(tmp_path)


def test_a_truncated_shard(tmp_path):
    make_checkpoint(tmp_path, sharded=True)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    assert f"{shard} is truncated" in refusal(tmp_path)


def test_a_shard_that_lacks_what_the_index_promises(tmp_path):
    make_checkpoint(tmp_path, sharded=True)
    index = json.loads((tmp_path / INDEX).read_text())
    shard = tmp_path / index["weight_map"]["model.norm.weight"]
    tensors = load_file(shard)
    del tensors["model.norm.weight"]
    save_file(tensors, shard)
    assert f"{shard}: the tensor model.norm.weight is missing" in refusal(tmp_path)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {}}', "nothing"])
def test_a_broken_index(tmp_path, content):
    make_checkpoint(tmp_path, sharded=True)
    (tmp_path / INDEX).write_text(content)
    assert str(tmp_path / INDEX) in refusal(tmp_path)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "pytorch_model-00001-of-00002.bin"]
)
def test_a_pickle_is_refused(llama, name):
    (llama / SINGLE).rename(llama / name)
    message = refusal(llama)
    assert str(llama / name) in message
    assert "is a pickle" in message
    assert "safetensors" in message


def test_a_pickle_beside_safetensors_is_ignored(llama):
    (llama / "training_args.bin").write_bytes(b"anything")
    read(llama)


def test_no_weights_at_all(llama):
    (llama / SINGLE).unlink()
    assert f"{llama} holds no weights" in refusal(llama)


def test_quantized_checkpoints(llama):
    change_config(llama, quantization_config={"quant_method": "awq"})
    assert "quantized checkpoints are not supported" in refusal(llama)


def test_quantized_weights(llama):
    tensors = load_file(llama / SINGLE)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, llama / SINGLE)
    assert f"{name} is stored as F8_E4M3; quantized weights are not supported" in refusal(llama)


# config.json and generation_config.json


@pytest.mark.parametrize(
    ("generation", "expected"),
    [(None, (2,)), ({}, (2,)), ({"eos_token_id": [5, 7]}, (5, 7)), ({"eos_token_id": 0}, (0,))],
)
def test_the_generation_config_names_the_eos_tokens(llama, generation, expected):
    path = llama / "generation_config.json"
    path.unlink()
    if generation is not None:
        path.write_text(json.dumps(generation))
    assert read_config(llama).eos_token_ids == expected


# Which checkpoint it is


@pytest.mark.parametrize("sharded", [False, True])
def test_the_fingerprint_belongs_to_the_content(tmp_path, sharded):
    make_checkpoint(tmp_path / "here", sharded=sharded)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    assert fingerprint(tmp_path / "here") == fingerprint(tmp_path / "there")
    assert len(fingerprint(tmp_path / "here")) == 16
    assert fingerprint(make_checkpoint(tmp_path / "other", seed=1, sharded=sharded)) != fingerprint(tmp_path / "here")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"])
def test_the_fingerprint_sees_every_byte(tmp_path, name):
    """Of a real checkpoint, and of what makes prompts of a text."""
    shutil.copytree(PACKAGE / "models" / "tiny" / "target", tmp_path / "copy")
    (tmp_path / "copy" / "chat_template.jinja").write_text("{{ messages }}" * 10)
    before, content = fingerprint(tmp_path / "copy"), bytearray((tmp_path / "copy" / name).read_bytes())
    content[min(100_000, len(content) - 9)] ^= 1
    (tmp_path / "copy" / name).write_bytes(content)
    assert fingerprint(tmp_path / "copy") != before


def test_the_fingerprint_is_not_that_of_the_readme(llama):
    before = fingerprint(llama)
    (llama / "README.md").write_text("a model")
    assert fingerprint(llama) == before
