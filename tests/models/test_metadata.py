"""Metadata that anyone may have written: whatever it holds, the answer is a model or one line, and
it comes soon.
"""

import json
import os
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from magicdec.data.tokenizer import load_tokenizer
from magicdec.errors import UserError
from magicdec.models import metadata
from magicdec.models.checkpoint import fingerprint, load
from magicdec.models.description import read_config
from magicdec.models.vocabulary import check_vocabularies
from tests.checkpoints import make_checkpoint

TINY = Path(__file__).parents[2] / "magicdec" / "models" / "tiny" / "target"
CONFIG, TOKENIZER, INDEX = "config.json", "tokenizer.json", "model.safetensors.index.json"
GENERATION, NORM = "generation_config.json", "model.norm.weight"
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A small checkpoint in shards, with a tokenizer."""
    folder = make_checkpoint(tmp_path_factory.mktemp("original"), sharded=True, vocab_size=1024)
    (folder / TOKENIZER).write_bytes((TINY / TOKENIZER).read_bytes())
    return folder


@pytest.fixture
def folder(original, tmp_path) -> Path:
    return copytree(original, tmp_path / "model")


def read(folder: Path, tokenizer: bool = False) -> None:
    """Do all that a run does with a checkpoint before its first pass."""
    config = read_config(folder)
    check_vocabularies(config, config, folder, TINY)
    fingerprint(folder)
    load(folder, config, torch.float32, "cpu")
    if tokenizer:
        load_tokenizer(folder).encode("def f(x):")


def refused(reads: Callable[[], Any]) -> str | None:
    """Return the line in which this ends, None where it does not."""
    try:
        reads()
    except UserError as error:
        line = str(error)
    else:
        return None
    assert "\n" not in line
    assert len(line) < 600
    line.encode()  # no lone surrogates: it is stored
    return line


def refusal(folder: Path, tokenizer: bool = False) -> str:
    line = refused(lambda: read(folder, tokenizer))
    assert line is not None
    return line


def rewrite(file: Path, edit: Callable[[Any], None]) -> None:
    """Edit what a JSON file holds, or the JSON in front of tensors."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little") if file.suffix == ".safetensors" else 0
    content = json.loads(raw[8 : 8 + length] if length else raw)
    edit(content)
    text = json.dumps(content).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :] if length else text)


def put(content: Any, keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        content = content[key]
    content[keys[-1]] = value


@pytest.mark.parametrize(
    ("file", "keys", "value", "said"),
    [
        (CONFIG, ["rope_scaling"], "yarn", "rope_scaling='yarn': must be a JSON object"),
        (CONFIG, ["rope_parameters"], [], "rope_parameters=[]: must be a JSON object"),
        (
            CONFIG,
            ["rope_parameters"],
            {"rope_type": "yarn", "factor": 2, "beta_fast": -1},
            "beta_fast=-1: must be",
        ),
        (
            CONFIG,
            ["rope_parameters"],
            {"rope_type": [], "factor": 2},
            "rope_type=[]: must be a text",
        ),
        (
            CONFIG,
            ["rope_parameters", "rope_theta"],
            1.0,
            "rope_theta=1.0: must be a number above 1",
        ),
        (CONFIG, ["rms_norm_eps"], None, "rms_norm_eps=None: must have a value"),
        (CONFIG, ["rms_norm_eps"], float("nan"), "rms_norm_eps=nan: must be a number above 0"),
        (CONFIG, ["eos_token_id"], "x", "eos_token_id='x': must be a whole number"),
        (CONFIG, ["eos_token_id"], [1, "x"], "eos_token_id=[1, 'x']: must be a whole number"),
        (
            CONFIG,
            ["num_hidden_layers"],
            10**8,
            "num_hidden_layers=100000000: must be a whole number, 1 to 2,000",
        ),
        (CONFIG, ["num_hidden_layers"], True, "num_hidden_layers=True: must be a whole number"),
        (CONFIG, ["num_attention_heads"], 0, "num_attention_heads=0: must be a whole number"),
        (CONFIG, ["vocab_size"], 10**400, "vocab_size=1000"),
        (CONFIG, ["vocab_size"], "\n" * 9999, "must be a whole number"),
        (CONFIG, ["vocab_size"], "\ud800", "config.json: Invalid JSON: "),
        (CONFIG, ["model_type"], {}, "model_type={}: must be a text"),
        (
            CONFIG,
            ["tie_word_embeddings"],
            "yes",
            "tie_word_embeddings='yes': must be true or false",
        ),
        (
            CONFIG,
            ["max_position_embeddings"],
            2**40,
            "max_position_embeddings=1099511627776: must be",
        ),
        (GENERATION, ["eos_token_id"], {"a": 1}, "eos_token_id={'a': 1}: must be a whole number"),
        (INDEX, ["weight_map", NORM], None, f"weight_map.{NORM}=None: must have a value"),
        (
            INDEX,
            ["weight_map", NORM],
            "../a.safetensors",
            "='../a.safetensors': must be the name of",
        ),
        (INDEX, ["weight_map", NORM], "/a.safetensors", "='/a.safetensors': must be the name of"),
        (
            INDEX,
            ["weight_map", NORM],
            "a.bin",
            "='a.bin': must be the name of a .safetensors file in the same",
        ),
        (INDEX, ["weight_map", NORM], "a\0.safetensors", "must be the name of a .safetensors file"),
        (INDEX, ["weight_map", "\n" * 9999], 5, r"\n\n=5: must be the name of"),
        (TOKENIZER, ["model"], None, "model=None: must be a JSON object"),
        (
            TOKENIZER,
            ["model", "vocab"],
            {"a": "b"},
            "model.vocab={'a': 'b'}: must map tokens to ids",
        ),
        (TOKENIZER, ["model", "vocab"], [1, 2], "model.vocab=[1, 2]: must map tokens to ids"),
    ],
)
def test_a_value_of_the_wrong_kind(folder, file, keys, value, said):
    rewrite(folder / file, lambda content: put(content, keys, value))
    if file == CONFIG:  # whose end of sequence counts only where there is no other
        (folder / GENERATION).unlink()
    line = refusal(folder)
    assert str(folder / file) in line
    assert said in line


MANY = [
    (CONFIG, ["model_type"], [0]),
    (CONFIG, ["eos_token_id"], [-1]),
    (GENERATION, ["eos_token_id"], [-1]),
]
MANY += [
    (INDEX, ["weight_map"], {"": 0}),
    *((TOKENIZER, ["model", "vocab"], value) for value in ({"": -1}, [0])),
]
MISTAKES = 25_000


@pytest.mark.parametrize(("file", "keys", "value"), MANY)
def test_a_file_full_of_mistakes_costs_little(folder, file, keys, value, monkeypatch):
    """One mistake is described, and no more are collected: a description takes a kilobyte."""
    names = [f"k{number}" for number in range(MISTAKES)]
    many = value * MISTAKES if isinstance(value, list) else dict.fromkeys(names, value[""])
    rewrite(folder / file, lambda content: put(content, keys, many))
    if file == CONFIG:
        (folder / GENERATION).unlink()
    # Which are allocated before a file is read.
    monkeypatch.setattr(metadata, "MAX_BYTES", 2_500_000)
    tracemalloc.start()
    try:
        assert str(folder / file) in refusal(folder)
        assert tracemalloc.get_traced_memory()[1] < 15 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("file", [CONFIG, GENERATION, INDEX, TOKENIZER])
@pytest.mark.parametrize(
    "content",
    ["[]", "[" * 100_000, '{"a":' * 100_000, "\xff\xfe", '{"a": 1', "null", "{", "", '"text"'],
)
def test_what_is_no_json_object(folder, file, content):
    (folder / file).write_text(content, encoding="latin-1")
    assert str(folder / file) in refusal(folder)


TENSOR = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
NO_TENSORS = [
    TENSOR | wrong for wrong in ({"dtype": 5}, {"shape": None}, {"data_offsets": [0, "4"]})
]
NO_TENSORS += [None, {}, TENSOR | {"data_offsets": [4]}, {"dtype": "F32", "data_offsets": [0, 4]}]


HEADERS = [(None, {"a": entry}, ": a=") for entry in NO_TENSORS]
# Longer than the file.
HEADERS += [(length, {}, " is truncated, corrupt") for length in (2**63, 10**9, 8)]


@pytest.mark.parametrize(("length", "header", "said"), HEADERS)
def test_a_header_that_is_wrong(folder, length, header, said):
    file, text = sorted(folder.glob("*.safetensors"))[0], json.dumps(header).encode()
    file.write_bytes((length or len(text)).to_bytes(8, "little") + text + bytes(4))
    assert f"{file}{said}" in refusal(folder)


def test_tensors_that_overlap(folder):
    """The sizes agree; only the library that reads the tensors finds out."""
    file = folder / json.loads((folder / INDEX).read_text())["weight_map"][NORM]

    def overlap(header: Any) -> None:
        for entry in header.values():
            if "data_offsets" in entry:
                entry["data_offsets"][0] = 0

    rewrite(file, overlap)
    assert str(file) in refusal(folder)


@pytest.mark.parametrize(
    "file", [CONFIG, GENERATION, INDEX, TOKENIZER, "shard", "tokenizer_config.json"]
)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_files_that_are_none(folder, file, kind):
    """Opening a pipe waits for a writer, a device may never end."""
    path = sorted(folder.glob("*.safetensors"))[0] if file == "shard" else folder / file
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    if (file, kind) != ("tokenizer_config.json", "folder"):  # which the tokenizer does not mind
        assert f"{path} is not a regular file" in refusal(folder, tokenizer=True)


def test_a_link_is_followed(folder, tmp_path):
    """The hub's cache consists of links to files that lie elsewhere."""
    for path in list(folder.iterdir()):
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    read(folder, tokenizer=True)


def test_a_file_without_end(folder):
    with (folder / CONFIG).open("wb") as file:
        file.truncate(1 << 40)
    assert f"{folder / CONFIG} is larger than" in refusal(folder)


@pytest.mark.parametrize(
    "file", [TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]
)
@pytest.mark.parametrize(
    "content", ["[]", "5", '{"model": 5}', "[" * 100_000, '{"tokenizer_class": 5, "a": []}']
)
def test_broken_tokenizers(folder, file, content):
    """Some of these files nobody reads; then it loads."""
    (folder / file).write_text(content)
    line = refused(lambda: load_tokenizer(folder).encode("def f(x):"))
    assert str(folder) in (line or str(folder))


def values() -> st.SearchStrategy:
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    scalars |= st.sampled_from(
        [-1, 0, 1, 2**31, 2**63, 10**30, 0.5, 1e300, "yarn", "llama3", "default", "\ud800"]
    )
    return st.recursive(
        scalars,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
    )


def places(content: Any) -> list[tuple]:
    """Return the path of every value in a JSON object, as keys."""
    if not isinstance(content, dict):
        return [()]
    return [(key, *rest) for key, value in content.items() for rest in {(), *places(value)}]


def test_a_value_of_many_parts_is_shown_in_part(original, tmp_path):
    parts: dict = {}
    for _ in range(6):
        parts = {str(number) * 30: parts for number in range(4)}
    content = json.loads((original / CONFIG).read_text()) | {"hidden_size": parts}
    (tmp_path / CONFIG).write_text(json.dumps(content))
    assert "hidden_size={'000" in (refused(lambda: read_config(tmp_path)) or "")


ROPE = [
    "rope_type",
    "type",
    "factor",
    "rope_theta",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
]
ROPE += [
    "attention_factor",
    "truncate",
    "original_max_position_embeddings",
    "mscale",
    "partial_rotary_factor",
]
EXTRA = [
    "sliding_window",
    "use_sliding_window",
    "layer_types",
    "max_window_layers",
    "attention_bias",
    "head_dim",
]


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(
    family=st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]),
    changes=st.dictionaries(
        st.sampled_from([*EXTRA, "rope_parameters", "rope_scaling"]), values(), max_size=3
    ),
    rope=st.none() | st.dictionaries(st.sampled_from(ROPE), values(), max_size=5),
    data=st.data(),
)
def test_any_values_in_a_config(original, tmp_path_factory, family, changes, rope, data):
    folder = tmp_path_factory.mktemp("config")
    config = json.loads((original / CONFIG).read_text()) | {"model_type": family} | changes
    config |= {} if rope is None else {"rope_parameters": rope}
    key = data.draw(st.sampled_from(sorted(config)))
    config[key] = data.draw(st.just(config[key]) | values())
    (folder / CONFIG).write_text(json.dumps(config))
    refused(lambda: read_config(folder))


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(file=st.sampled_from([INDEX, GENERATION, "header"]), value=values(), data=st.data())
def test_any_values_in_the_other_files(original, tmp_path_factory, file, value, data):
    folder = copytree(original, tmp_path_factory.mktemp("others") / "model")
    path = sorted(folder.glob("*.safetensors"))[0] if file == "header" else folder / file
    rewrite(path, lambda content: put(content, data.draw(st.sampled_from(places(content))), value))
    refused(lambda: read(folder))
