import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from magicdec.config.registry import PACKAGE
from magicdec.models.checkpoint import fingerprint, load, pieces, stored_in_bfloat16
from magicdec.models.description import read_config
from magicdec.models.kv_cache import KVCache
from tests.checkpoints import load_model, load_reference, make_checkpoint
from tests.models.test_metadata import refused, rewrite

TINY = PACKAGE / "models" / "tiny" / "target"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def read(folder: Path) -> dict[str, torch.Tensor]:
    return load(folder, read_config(folder), torch.float32, "cpu")


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
    before = fingerprint(tmp_path)
    # In the first and in the last one.
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        change_tensor(tmp_path, name, torch.bfloat16)
        assert fingerprint(tmp_path) != before
        before = fingerprint(tmp_path)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_come_in_the_dtype_asked_for(llama, stored):
    save_file(
        {name: tensor.to(stored) for name, tensor in load_file(llama / SINGLE).items()},
        llama / SINGLE,
    )
    state = load(llama, read_config(llama), torch.bfloat16, "cpu")
    expected = load_file(llama / SINGLE)["model.norm.weight"].bfloat16()
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    assert torch.equal(state["norm.weight"], expected)


def test_matrices_that_are_stored_in_bfloat16_can_stay_so(llama):
    """The numbers stay the same. A parameter with a part that is stored in another type is
    converted.
    """
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(llama / SINGLE).items()}
    tensors["model.layers.1.self_attn.k_proj.weight"] = tensors[
        "model.layers.1.self_attn.k_proj.weight"
    ].float()
    save_file(tensors, llama / SINGLE)
    config, whole = read_config(llama), read(llama)
    names = stored_in_bfloat16(llama, config)
    assert names == {name for name, tensor in whole.items() if tensor.dim() == 2} - {
        "layers.1.qkv.weight"
    }
    state = load(llama, config, torch.float32, "cpu", compact=names)
    assert {name for name, tensor in state.items() if tensor.dtype == torch.bfloat16} == names
    assert all(torch.equal(state[name].float(), tensor) for name, tensor in whole.items())


def test_progress_adds_up_to_the_number_of_parameters(llama):
    config, seen = read_config(llama), []
    load(llama, config, torch.float32, "cpu", progress=seen.append)
    assert len(seen) == len(list(pieces(config)))
    assert sum(seen) == config.num_parameters


@pytest.mark.skipif(
    sys.platform != "linux", reason="peak memory is read and reset through Linux's /proc"
)
def test_peak_memory_is_one_copy_of_the_weights(tmp_path):
    make_checkpoint(
        tmp_path, hidden_size=512, intermediate_size=2048, num_hidden_layers=6, sharded=False
    )
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


def add_tensors(folder: Path, **tensors: torch.Tensor) -> None:
    """Put tensors into a checkpoint of one file, whose names have "__" for a point."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(load_file(folder / SINGLE) | named, folder / SINGLE)


INV_FREQ = "model__layers__0__self_attn__rotary_emb__inv_freq"


def frequencies(folder: Path) -> torch.Tensor:
    return load_reference(folder).model.rotary_emb.inv_freq


def test_computed_and_tied_tensors_in_old_checkpoints_are_skipped(tmp_path, capsys):
    make_checkpoint(tmp_path, "llama-tied")
    embedding = load_file(tmp_path / SINGLE)["model.embed_tokens.weight"]
    add_tensors(
        tmp_path, **{INV_FREQ: frequencies(tmp_path).half(), "lm_head__weight": embedding.clone()}
    )
    assert "head.weight" not in read(tmp_path)
    assert "warning" not in capsys.readouterr().err


def test_frequencies_that_contradict_the_config_are_reported_once(tmp_path, capsys):
    """Transformers computes them, too."""
    make_checkpoint(tmp_path)
    add_tensors(tmp_path, **{INV_FREQ: 2 * frequencies(tmp_path)})
    read(tmp_path)
    read(tmp_path)
    assert (
        capsys.readouterr().err.count(
            "rotary_emb.inv_freq is not read, as in transformers, and differs"
        )
        == 1
    )


STORED = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("stored", STORED)
def test_a_head_of_its_own_counts_although_the_config_ties_it(tmp_path, capsys, sharded, stored):
    """Other numbers, or the embedding's rounded to another type: transformers takes the head of the
    file.
    """
    make_checkpoint(tmp_path, sharded=sharded)
    if stored == torch.bfloat16:
        file = next(
            path for path in tmp_path.glob("*.safetensors") if "lm_head.weight" in load_file(path)
        )
        embedding = load_reference(tmp_path).get_input_embeddings().weight
        save_file(load_file(file) | {"lm_head.weight": embedding.detach().bfloat16()}, file)
        load_reference.cache_clear()
    change_config(tmp_path, tie_word_embeddings=True)
    assert not read_config(tmp_path).tie_word_embeddings
    assert_equal_to_transformers(tmp_path)
    tokens_BS = torch.arange(5, 45)[None]
    model = load_model(tmp_path)
    hidden = model(tokens_BS, KVCache(model.config, 1, 40, torch.float32, "cpu"))
    torch.testing.assert_close(
        model.logits(hidden), load_reference(tmp_path)(tokens_BS).logits, rtol=0, atol=1e-4
    )
    assert (
        "lm_head.weight differs from model.embed_tokens.weight, so it is used"
        in capsys.readouterr().err
    )


def test_a_tied_config_without_its_weights_is_read(tmp_path):
    """As a hub's repository is, of which a prediction needs the json files alone."""
    make_checkpoint(tmp_path, "llama-tied", sharded=True)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert read_config(tmp_path).tie_word_embeddings


def test_what_is_not_read_is_reported(llama, capsys):
    change_config(
        llama,
        rope_scaling={"type": "linear", "factor": 2.0},
        dual_chunk_attention_config={"size": 8},
    )
    rewrite(
        llama / "generation_config.json", lambda content: content.update(repetition_penalty=1.05)
    )
    read_config(llama)
    keys, processors = capsys.readouterr().err.splitlines()
    assert keys.startswith(
        f"warning: {llama}/config.json: keys that are not read:"
        " dual_chunk_attention_config={'size'"
    )
    assert "rope_parameters={" in keys
    assert processors.endswith(
        "applies these keys, and no engine does here: repetition_penalty=1.05"
    )


# What can be wrong with a checkpoint


def change_config(folder: Path, **keys: object) -> None:
    rewrite(folder / "config.json", lambda content: content.update(keys))


def change_tensor(folder: Path, name: str, dtype: torch.dtype | None = None) -> None:
    """Store a tensor in another type, or leave it out of its file."""
    file = next(path for path in folder.glob("*.safetensors") if name in load_file(path))
    tensors = load_file(file)
    tensor = tensors.pop(name)
    save_file(tensors if dtype is None else tensors | {name: tensor.to(dtype)}, file)


def cut(file: Path, kept: int) -> None:
    file.write_bytes(file.read_bytes()[:kept])


UP = "model.layers.2.mlp.up_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
NORM = "model.norm.weight"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0"
NO_TENSORS = "{0}/model.safetensors is truncated, corrupt or a Git LFS pointer"
SHAPES = (
    "{0}/model.safetensors: model.embed_tokens.weight has shape (96, 48), config.json says"
    " (100, 48)"
)
PICKLE = "{0}/%s is a pickle, which can run code when it is loaded; only safetensors are read"
PICKLES = [
    "pytorch_model.bin",
    "consolidated.00.pth",
    "model.pt",
    "pytorch_model-00001-of-00002.bin",
]
# What is done to a checkpoint, and what is said about it.
MISTAKES = [
    (lambda at: (at / "config.json").unlink(), "{0}/config.json cannot be read (No such file"),
    (
        lambda at: change_config(at, quantization_config={"quant_method": "awq"}),
        "quantized checkpoints (awq) are not supp",
    ),
    (lambda at: change_config(at, vocab_size=100), SHAPES),
    (lambda at: change_config(at, num_hidden_layers=2), "9 tensors have no place"),
    (lambda at: change_tensor(at, UP), f"the tensor {UP} is missing"),
    (
        lambda at: change_tensor(at, DOWN, torch.float8_e4m3fn),
        f"{DOWN} is stored as F8_E4M3; quantized weights are",
    ),
    (lambda at: (at / SINGLE).unlink(), "{0} holds no weights"),
    (
        lambda at: (at / SINGLE).write_bytes((at / SINGLE).read_bytes() + b"more"),
        "truncated or corrupt",
    ),
    *(
        (lambda at, content=content: (at / SINGLE).write_bytes(content), NO_TENSORS)
        for content in (POINTER, bytes(64))
    ),
    *(
        (lambda at, kept=kept: cut(at / SINGLE, kept), "{0}/model.safetensors is truncated")
        for kept in (0, 5, 300, -1)
    ),
    *((lambda at, name=name: (at / SINGLE).rename(at / name), PICKLE % name) for name in PICKLES),
]
MISTAKES_OF_SHARDS = [
    (
        lambda at: next(at.glob("model-00003-*")).unlink(),
        ".safetensors cannot be read (No such file or directory)",
    ),
    (lambda at: cut(next(at.glob("model-00002-*")), -100), ".safetensors is truncated"),
    (lambda at: change_tensor(at, NORM), f".safetensors: the tensor {NORM} is missing"),
]
for content in ("{}", '{"weight_map": []}', '{"weight_map": {}}', "nothing"):
    MISTAKES_OF_SHARDS.append(
        (lambda at, content=content: (at / INDEX).write_text(content), "{0}/" + INDEX)
    )


@pytest.mark.parametrize(
    ("sharded", "spoil", "said"),
    [*((False, *one) for one in MISTAKES), *((True, *one) for one in MISTAKES_OF_SHARDS)],
)
def test_a_mistake_is_one_line(tmp_path, sharded, spoil, said):
    make_checkpoint(tmp_path, sharded=sharded)
    spoil(tmp_path)
    assert said.format(tmp_path) in (refused(lambda: read(tmp_path)) or "")


def test_a_pickle_beside_safetensors_is_ignored(llama):
    (llama / "training_args.bin").write_bytes(b"anything")
    read(llama)


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


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"]
)
def test_the_fingerprint_sees_every_byte(tmp_path, name):
    """Weights, configuration and tokenizer of a real checkpoint count; a README does not."""
    folder = shutil.copytree(TINY, tmp_path / "copy")
    assert fingerprint(folder) == fingerprint(TINY)
    assert len(fingerprint(folder)) == 16
    (folder / "chat_template.jinja").write_text("{{ messages }}" * 10)
    before, content = fingerprint(folder), bytearray((folder / name).read_bytes())
    (folder / "README.md").write_text("a model")
    assert fingerprint(folder) == before
    content[min(100_000, len(content) - 9)] ^= 1
    (folder / name).write_bytes(content)
    assert fingerprint(folder) != before
