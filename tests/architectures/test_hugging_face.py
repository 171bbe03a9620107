"""A config.json: what is read, against transformers' own AutoConfig, and what is refused or
reported.
"""

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from magicdec.architectures.generation_config import unread_processors
from magicdec.architectures.hugging_face import from_hugging_face, unread_keys
from magicdec.architectures.model_config import RopeScaling
from magicdec.errors import UserError
from magicdec.models.rope import rope_frequencies
from tests.runs import one_line

# A config.json as older versions of transformers write it.
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
}
LLAMA |= {
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
}
LLAMA3 = {
    "type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
QWEN2 = LLAMA | {
    "model_type": "qwen2",
    "num_key_value_heads": 4,
    "sliding_window": 512,
    "max_window_layers": 3,
}


def test_a_minimal_llama_gets_the_defaults_of_its_family():
    expected = {
        "num_kv_heads": 32,
        "head_dim": 128,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
    }
    expected |= {"tie_word_embeddings": False, "qkv_bias": False, "eos_token_ids": (2,)}
    assert expected.items() <= vars(from_hugging_face(LLAMA)).items()


def test_both_ways_to_write_rope_scaling():
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 8.0}}
    new = LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}}
    for config in map(from_hugging_face, (old, new)):
        assert (config.rope_scaling, config.rope_theta) == (RopeScaling("linear", 8.0), 5e5)
    assert from_hugging_face(old) == from_hugging_face(new)


@pytest.mark.parametrize(
    ("given", "expected"),
    [({"factor": 4.0}, (4.0, 4096)), ({"original_max_position_embeddings": 1024}, (4.0, 1024))],
)
def test_yarn_without_its_original_context_or_factor(given, expected):
    scaling = from_hugging_face(LLAMA | {"rope_scaling": {"type": "yarn"} | given}).rope_scaling
    assert (scaling.factor, scaling.original_max_position_embeddings) == expected


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        # As Qwen2.5 advises.
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"type": "yarn", "factor": 4.0}, 16384),
        # As written by training.
        ({"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}, 4096),
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
        (
            QWEN2
            | {
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (1, 3),
        ),
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
    [
        ("llama", True, True),
        ("mistral", False, False),
        ("qwen2", True, False),
        ("qwen3", True, True),
    ],
)
def test_attention_bias_counts_where_the_family_heeds_it(family, qkv_bias, output_bias):
    config = from_hugging_face(LLAMA | {"model_type": family, "attention_bias": True})
    assert (config.qkv_bias, config.output_bias) == (qkv_bias, output_bias)


@pytest.mark.parametrize("family", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_defaults_of_transformers_are_read(family):
    theirs = family()
    config = from_hugging_face(theirs.to_dict())
    assert config.head_dim == getattr(
        theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads
    )
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.sliding_window == getattr(theirs, "sliding_window", None)
    assert config.rms_norm_eps == theirs.rms_norm_eps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "gpt2"},
            "model_type='gpt2' is not supported; supported: llama, mistral, qwen2, qwen3",
        ),
        ({"model_type": 5}, "model_type=5: must be a text"),
        ({"model_type": None}, "no model_type is given; supported: llama"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "quantized checkpoints (awq) are not supported",
        ),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported: silu"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported; supported: False"),
        ({"is_causal": False}, "is_causal=False is not supported; supported: True"),
        (
            {"per_layer_config": {"0": {"head_dim": 4}}},
            "per_layer_config={'0': {...}} is not supported",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention"] * 3},
            "layer_types names 3 layers, num_hidden_layers=4",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["chunked_attention"] * 4},
            "layer_types='chunked_attention' is not",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 4},
            "needs use_sliding_window=true",
        ),
        ({"num_key_value_heads": 5}, "num_heads=32 is not a multiple of num_kv_heads=5"),
        ({"vocab_size": 0}, "vocab_size=0: must be a whole number, 1 to 16,777,216"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers='4': must be a whole number"),
        ({"hidden_size": "4096"}, "hidden_size='4096': must be a whole number"),
        ({"head_dim": 63}, "head_dim=63 must be even"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope scaling 'dynamic' is not supported",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling linear needs factor"),
        (
            {"rope_scaling": {"type": "linear", "factor": -1.0}},
            "rope_scaling.factor=-1.0: must be a number above 0",
        ),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0}},
            "rope scaling llama3 needs low_freq_factor",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
            "mscale",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_covered_is_one_line_that_names_the_file(change, message):
    with pytest.raises(UserError, match=one_line("somewhere/config.json: ", message)):
        from_hugging_face(LLAMA | change, "somewhere/config.json")


def test_a_missing_key_is_named():
    with pytest.raises(UserError, match=r"config\.json: vocab_size is missing a value"):
        from_hugging_face({key: value for key, value in LLAMA.items() if key != "vocab_size"})


# The same setting, written in several ways. Each row is read as transformers reads it: (changes of
# LLAMA, the keys that are then reported because another one was taken).
SMALL = LLAMA | {"num_key_value_heads": 32, "hidden_size": 512, "max_position_embeddings": 2048}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
DEFAULT = {"rope_type": "default", "rope_theta": 1e6}
LINEAR = {"rope_type": "linear", "factor": 2.0}
SPELLINGS: list[tuple[dict[str, Any], set[str]]] = [
    ({}, set()),
    ({"rope_theta": 5e5}, set()),
    ({"rope_parameters": DEFAULT}, set()),
    ({"rope_parameters": DEFAULT, "rope_theta": 1e6}, set()),
    ({"rope_parameters": DEFAULT, "rope_theta": 5e5}, {"rope_theta"}),
    ({"rope_parameters": LINEAR, "rope_theta": 5e5}, set()),
    ({"rope_scaling": LINEAR, "rope_theta": 5e5}, set()),
    ({"rope_scaling": LINEAR | {"rope_theta": 1e6}, "rope_theta": 5e5}, {"rope_theta"}),
    ({"rope_parameters": DEFAULT, "rope_scaling": YARN}, {"rope_parameters"}),
    ({"rope_parameters": DEFAULT, "rope_scaling": YARN, "rope_theta": 5e5}, {"rope_parameters"}),
    ({"rope_parameters": YARN, "rope_scaling": DEFAULT}, {"rope_parameters"}),
    ({"rope_parameters": YARN, "rope_scaling": YARN}, set()),
    ({"rope_parameters": LINEAR | {"rope_theta": 1e6}, "rope_scaling": {}}, set()),
    ({"rope_parameters": LINEAR | {"rope_theta": 1e6}, "rope_scaling": None}, set()),
    ({"rope_parameters": None, "rope_scaling": YARN}, set()),
    ({"rope_parameters": {}, "rope_theta": 5e5}, set()),
    ({"rope_scaling": {"type": "linear", "factor": 4.0}}, set()),
    ({"rope_scaling": YARN | {"type": "linear"}}, set()),
    ({"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 4.0}}, set()),
    ({"rope_scaling": YARN, "original_max_position_embeddings": 512}, set()),
    (
        {
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            "original_max_position_embeddings": 512,
        },
        set(),
    ),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, set()),
    ({"rope_scaling": LLAMA3 | {"factor": 8.0}}, set()),
    (
        {"rope_scaling": LINEAR, "original_max_position_embeddings": 512},
        {"original_max_position_embeddings"},
    ),
    (
        {"rope_scaling": LINEAR | {"beta_fast": 8.0, "finetuned": True}},
        {"rope_scaling.beta_fast", "rope_scaling.finetuned"},
    ),
    ({"rope_parameters": DEFAULT | {"factor": 8.0}}, {"rope_parameters.factor"}),
    ({"head_dim": 32}, set()),
    ({"num_key_value_heads": None}, set()),
    ({"attention_bias": True}, set()),
    ({"sliding_window": 512, "use_sliding_window": True}, {"sliding_window", "use_sliding_window"}),
    ({"dtype": "bfloat16", "torch_dtype": "float16"}, set()),
    ({"architectures": ["LlamaForCausalLM"], "use_cache": False, "bos_token_id": 7}, set()),
    ({"model_type": "mistral"}, set()),
    ({"model_type": "mistral", "sliding_window": None}, set()),
    (
        {"model_type": "mistral", "sliding_window": 64, "layer_types": ["full_attention"] * 4},
        {"layer_types"},
    ),
    ({"model_type": "mistral", "attention_bias": True, "mlp_bias": False}, {"attention_bias"}),
    ({"model_type": "qwen2", "attention_bias": True}, {"attention_bias"}),
    ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}, set()),
    ({"model_type": "qwen3", "use_sliding_window": True}, set()),
    (
        {"model_type": "qwen3", "head_dim": 64, "use_sliding_window": False, "sliding_window": 64},
        set(),
    ),
    (
        {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 1}
        | {"layer_types": ["sliding_attention"] + ["full_attention"] * 3},
        set(),
    ),
]
# Keys whose default differs between families: (family, the key that is left out).
LEFT_OUT = [
    ("mistral", "num_key_value_heads"),
    ("qwen2", "num_key_value_heads"),
    ("qwen3", "num_key_value_heads"),
]
LEFT_OUT += [
    (family, key)
    for family in ("llama", "mistral", "qwen2", "qwen3")
    for key in ("head_dim", "rms_norm_eps")
]


def assert_read_as_by_transformers(folder, plain: dict[str, Any]) -> None:
    """Sizes, rotary frequencies and windows are those of the config that transformers makes of the
    file.
    """
    (folder / "config.json").write_text(json.dumps(plain))
    theirs, ours = AutoConfig.from_pretrained(folder), from_hugging_face(plain)
    heads = theirs.num_attention_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // heads)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    rotary = LlamaRotaryEmbedding(theirs)
    frequencies, factor = rope_frequencies(ours)
    torch.testing.assert_close(frequencies, rotary.inv_freq, rtol=1e-6, atol=0)
    assert factor == rotary.attention_scaling
    window = getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", None)
    if plain["model_type"] == "mistral":  # whose code has one mask for all layers
        kinds = ["sliding_attention"] * 4
    elif plain["model_type"] == "llama":  # whose code has no window
        kinds = None
    expected = [
        window if kinds and kind == "sliding_attention" else None for kind in kinds or [""] * 4
    ]
    assert [ours.window_of(layer) for layer in range(4)] == expected


@pytest.mark.parametrize(
    ("changes", "reported"),
    SPELLINGS,
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_every_spelling_is_read_as_transformers_reads_it(tmp_path, changes, reported):
    assert_read_as_by_transformers(tmp_path, SMALL | changes)
    assert set(unread_keys(SMALL | changes)) == reported


@pytest.mark.parametrize(("family", "key"), LEFT_OUT)
def test_a_key_that_is_left_out_has_the_default_of_transformers(tmp_path, family, key):
    plain = SMALL | {"model_type": family, "head_dim": 16}
    plain.pop(key, None)
    assert_read_as_by_transformers(tmp_path, plain)


@pytest.mark.parametrize("family", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_what_transformers_writes_has_no_key_that_is_reported(family):
    assert unread_keys(family().to_dict()) == {}
    assert unread_keys(family().to_diff_dict() | {"vocab_size": 32}) == {}


def test_a_key_that_nobody_knows_is_reported_with_its_value():
    unknown = {
        "dual_chunk_attention_config": {"chunk_size": 8},
        "use_rope": False,
        "left_out": None,
    }
    assert unread_keys(LLAMA | unknown) == {
        "dual_chunk_attention_config": {"chunk_size": 8},
        "use_rope": False,
    }


def test_what_changes_the_tokens_of_generate_is_found():
    plain = {
        "repetition_penalty": 1.05,
        "min_length": 0,
        "top_p": 0.8,
        "suppress_tokens": [7],
        "bad_words_ids": None,
    }
    assert unread_processors(plain) == {"repetition_penalty": 1.05, "suppress_tokens": [7]}


NESTED = {
    "model_type": "gemma3",
    "text_config": {"vocab_size": 32},
    "quantization_config": {"quant_method": "fp8"},
}


@pytest.mark.parametrize(
    "plain",
    [NESTED, LLAMA | {"model_type": "deepseek_v3", "quantization_config": {"quant_method": "fp8"}}],
)
def test_a_refusal_names_the_family_first(plain):
    refused = (
        f"config.json: model_type='{plain['model_type']}' is not supported; supported: llama,"
        " mistral, qwen2, qwen3"
    )
    with pytest.raises(UserError, match=f"^{refused}$"):
        from_hugging_face(plain)
