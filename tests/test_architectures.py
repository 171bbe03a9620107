import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from magicdec.architectures import RopeScaling, from_hugging_face
from magicdec.config.load import compose
from magicdec.config.options import values_of
from magicdec.costmodel.targets import architecture
from magicdec.errors import UserError
from tests.runs import one_line
from tests.test_plugins import written

TARGETS = Path(__file__).parents[1] / "conf" / "target"

# A config.json as older versions of transformers write it.
LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008}
LLAMA |= {"num_hidden_layers": 4, "num_attention_heads": 32, "max_position_embeddings": 4096, "eos_token_id": 2}
LLAMA3 = {"type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
QWEN2 = LLAMA | {"model_type": "qwen2", "num_key_value_heads": 4, "sliding_window": 512, "max_window_layers": 3}

# Parameters in billions, as the models' own pages state them.
PUBLISHED = {
    "llama-2-7b-32k": 6.74,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.55,
    "llama-3.2-1b": 1.24,
    "tinyllama-1.1b": 1.10,
    "mistral-7b-v0.1": 7.24,
    "mistral-7b-v0.3": 7.25,
    "qwen2.5-7b": 7.62,
    "qwen2.5-14b": 14.77,
    "qwen2.5-32b": 32.76,
    "qwen3-1.7b": 1.72,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.77,
    "yi-1.5-6b": 6.06,
    "yi-1.5-34b": 34.39,
    "smollm2-135m": 0.13,
    "smollm2-135m-q4": 0.13,
}
BUNDLED = ("tiny", "tiny-draft")


@pytest.mark.parametrize("target", PUBLISHED)
def test_targets_have_the_published_number_of_parameters(target):
    assert round(architecture(target).num_parameters / 1e9, 2) == PUBLISHED[target]


@pytest.mark.parametrize("target", [*PUBLISHED, *BUNDLED, "custom"])
def test_targets_say_who_they_are_and_open_with_a_comment(target):
    content = values_of("target", target)
    assert (TARGETS / f"{target}.yaml").read_text().startswith("# ")
    assert list(content) == ["name", "path", "weights", "architecture"]
    assert (content["name"], content["weights"]) == (target, "checkpoint")


def test_every_target_is_checked_here():
    assert {path.stem for path in TARGETS.glob("*.yaml")} == {*PUBLISHED, *BUNDLED, "custom"}


def test_an_option_of_ones_own_names_its_config_json(here):
    option = "name: mine\npath: null\nweights: random\narchitecture: theirs.json\n"
    folder = written(here, {"conf/target/mine.yaml": option}) / "conf" / "target"
    with pytest.raises(UserError, match=r"mine.yaml: architecture=theirs.json: no such file next to it"):
        compose(["target=mine"])
    (folder / "theirs.json").write_text("{")
    with pytest.raises(UserError, match=r"theirs.json is not valid JSON"):
        compose(["target=mine"])
    (folder / "theirs.json").write_text(json.dumps(LLAMA))
    keys = ["target=mine", "draft.synthetic_acceptance=0.5"]
    found = compose([*keys, "target.architecture.num_layers=2"]).target.architecture
    assert found == replace(from_hugging_face(LLAMA), num_layers=2, eos_token_ids=())
    assert compose(keys).target.architecture == architecture("mine")


def test_a_minimal_llama_gets_the_defaults_of_its_family():
    expected = {"num_kv_heads": 32, "head_dim": 128, "rope_theta": 10000.0, "rope_scaling": None, "rms_norm_eps": 1e-6}
    expected |= {"tie_word_embeddings": False, "qkv_bias": False, "eos_token_ids": (2,)}
    assert expected.items() <= vars(from_hugging_face(LLAMA)).items()


def test_both_ways_to_write_rope_scaling():
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 8.0}}
    new = LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}}
    for config in map(from_hugging_face, (old, new)):
        assert (config.rope_scaling, config.rope_theta) == (RopeScaling("linear", 8.0), 5e5)
    assert from_hugging_face(old) == from_hugging_face(new)


@pytest.mark.parametrize(
    ("given", "expected"), [({"factor": 4.0}, (4.0, 4096)), ({"original_max_position_embeddings": 1024}, (4.0, 1024))]
)
def test_yarn_without_its_original_context_or_factor(given, expected):
    scaling = from_hugging_face(LLAMA | {"rope_scaling": {"type": "yarn"} | given}).rope_scaling
    assert (scaling.factor, scaling.original_max_position_embeddings) == expected


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),  # as Qwen2.5 advises
        ({"type": "yarn", "factor": 4.0}, 16384),
        ({"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}, 4096),  # as written by training
        ({"type": "yarn", "factor": 2.5, "original_max_position_embeddings": 2000}, 5000),
        ({"type": "yarn", "original_max_position_embeddings": 1024}, 4096),
        ({"type": "linear", "factor": 8.0}, 4096),  # Llama-2-7B-32K has the extended length
        (LLAMA3 | {"factor": 32.0}, 4096),  # Llama 3.2 was trained for half of factor * original
    ],
)
def test_the_longest_sequence_follows_from_the_rope_scaling(scaling, longest):
    assert from_hugging_face(LLAMA | {"rope_scaling": scaling}).max_position_embeddings == longest


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (QWEN2, ()),  # named, and not switched on
        (QWEN2 | {"use_sliding_window": False}, ()),
        (QWEN2 | {"use_sliding_window": True}, (3,)),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 4}, ()),
        (QWEN2 | {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 2}, (1, 3)),
        (QWEN2 | {"model_type": "qwen3", "use_sliding_window": True}, (3,)),
        (LLAMA | {"model_type": "mistral", "sliding_window": 512}, (0, 1, 2, 3)),
        (LLAMA | {"model_type": "mistral", "sliding_window": None}, ()),
        (LLAMA | {"sliding_window": 512}, ()),
    ],
)
def test_a_sliding_window_counts_only_where_it_is_used(config, layers):
    ours = from_hugging_face(config)
    assert ours.sliding_layers == layers
    assert [ours.window_of(i) for i in range(4)] == [512 if i in layers else None for i in range(4)]


@pytest.mark.parametrize(
    ("family", "qkv_bias", "output_bias"),
    [("llama", True, True), ("mistral", False, False), ("qwen2", True, False), ("qwen3", True, True)],
)
def test_attention_bias_counts_where_the_family_heeds_it(family, qkv_bias, output_bias):
    config = from_hugging_face(LLAMA | {"model_type": family, "attention_bias": True})
    assert (config.qkv_bias, config.output_bias) == (qkv_bias, output_bias)


@pytest.mark.parametrize("family", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_defaults_of_transformers_are_read(family):
    theirs = family()
    config = from_hugging_face(theirs.to_dict())
    assert config.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.sliding_window == getattr(theirs, "sliding_window", None)
    assert config.rms_norm_eps == theirs.rms_norm_eps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' is not supported; supported: llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"num_key_value_heads": 5}, "num_heads=32 is not a multiple of num_kv_heads=5"),
        ({"vocab_size": 0}, "vocab_size=0: must be a whole number, 1 to 16,777,216"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers='4': must be a whole number"),
        ({"hidden_size": "4096"}, "hidden_size='4096': must be a whole number"),
        ({"head_dim": 63}, "head_dim=63 must be even"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling linear needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": -1.0}}, "rope_scaling.factor=-1.0: must be a number above 0"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope scaling llama3 needs low_freq_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0}}, "mscale"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_covered_is_one_line_that_names_the_file(change, message):
    with pytest.raises(UserError, match=one_line("somewhere/config.json: ", message)):
        from_hugging_face(LLAMA | change, "somewhere/config.json")


def test_a_missing_key_is_named():
    with pytest.raises(UserError, match=r"config\.json: vocab_size is missing a value"):
        from_hugging_face({key: value for key, value in LLAMA.items() if key != "vocab_size"})
