"""Weights and what a cache keeps, counted without storage, against real tensors of small models."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from magicdec.costmodel.growth import growth
from magicdec.costmodel.hardware import hardware_named
from magicdec.costmodel.roofline import BF16, Pass, operators
from magicdec.errors import UserError
from magicdec.models.adapter import facts
from magicdec.models.adapter.facts import describe
from magicdec.models.adapter.interface import layers_of
from tests.checkpoints import MODULES, SIZES

TOKENS = 20  # longer than the windows
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "num_experts": 8}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
LINEAR |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 16}
MIXED = {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
OTHERS: dict[str, dict[str, Any]] = {
    "qwen3_next": EXPERTS | LINEAR | MIXED | {"shared_expert_intermediate_size": 32},
    "qwen3_5_text": LINEAR | MIXED,
    "granitemoehybrid": MAMBA
    | {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4}
    | {"num_experts_per_tok": 2, "shared_intermediate_size": 32},
    "olmo3": {"sliding_window": 12},
    "cohere2": {"sliding_window": 12},
    "starcoder2": {},
    "nemotron": {},
}
FAMILIES = [
    *((config.model_type, settings) for config, settings in MODULES.values()),
    *OTHERS.items(),
]


def plain_of(model_type: str, settings: dict[str, Any]) -> dict[str, Any]:
    return SIZES | settings | {"model_type": model_type}


def bytes_of(cache: Any) -> int:
    """The bytes of all tensors of a cache that depend on the sequence."""
    kept = [value for layer in cache.layers for value in vars(layer).values()]
    nested = [value for each in kept if isinstance(each, dict) for value in each.values()]
    tensors = [tensor for tensor in kept + nested if isinstance(tensor, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors if tensor.dim() > 1)


def test_jobs_that_ask_for_the_same_model_record_one_pass(monkeypatch):
    passes = []
    record = facts.record
    monkeypatch.setattr(facts, "record", lambda *given: passes.append(given) or record(*given))
    facts._described.cache_clear()
    for width in (48, 48, 64, 48):
        plain = plain_of("olmo2", {"hidden_size": width})
        assert describe(plain, "config.json").hidden_size == width
    assert len(passes) == 2


@pytest.mark.parametrize(("model_type", "settings"), FAMILIES)
def test_bytes_are_those_of_real_tensors(model_type, settings):
    plain = plain_of(model_type, settings)
    config = describe(plain, "config.json").as_predicted()
    whole = CONFIG_MAPPING[model_type].from_dict(plain)
    model = AutoModelForCausalLM.from_config(whole, dtype=torch.bfloat16)
    held = sum(weight.nbytes for weight in model.parameters())
    assert config.stored_weight_bytes(BF16) == pytest.approx(held, rel=0.01)
    with torch.no_grad():
        tokens_BT = torch.ones(1, TOKENS, dtype=torch.int64)
        cache = model(tokens_BT, use_cache=True).past_key_values
    # transformers keeps a window less the token that comes next.
    last = sum(
        memory.layers * memory.entry * BF16
        for memory in config.memories
        if memory.window is not None and memory.window <= TOKENS
    )
    assert config.kept_bytes(TOKENS, BF16) - last == pytest.approx(bytes_of(cache), rel=0.01)


def test_enough_families_are_counted():
    assert len({model_type for model_type, _ in FAMILIES}) >= 15


def quantized(method: str, **settings: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **settings}}


WHOLE_ROWS = {"group_0": {"weights": {"num_bits": 8, "group_size": -1}}}


@pytest.mark.parametrize(
    ("settings", "num_bytes"),
    [
        (quantized("gptq", bits=4, group_size=128), 0.5 + 2.5 / 128),
        (quantized("gptq", bits=4, group_size=-1), 0.5),  # a scale for a whole row
        (quantized("awq", w_bit=4, group_size=0), 0.5),
        (quantized("compressed-tensors", config_groups=WHOLE_ROWS), 1.0),
        ({"compression_config": {"quant_method": "gptq", "bits": 8, "group_size": -1}}, 1.0),
    ],
)
def test_bytes_of_a_weight_include_its_share_of_a_scale(settings, num_bytes):
    config = describe(plain_of("llama", settings), "config.json")
    assert {matrix.stored_bytes for matrix in config.matrices} == {num_bytes}


def test_one_name_may_stand_for_a_list_of_modules_that_are_not_quantized():
    settings = quantized("gptq", bits=4, group_size=-1, modules_to_not_convert="up_proj")
    config = describe(plain_of("llama", settings), "config.json")
    whole = [matrix for matrix in config.matrices if matrix.stored_bytes is None]
    assert [(matrix.inputs, matrix.outputs) for matrix in whole] == [(48, 80)]


@pytest.mark.parametrize(
    ("model_type", "settings", "said"),
    [
        ("minimax", {"num_local_experts": 4, "num_experts_per_tok": 2}, "also keeps linear_cache"),
        ("llama4_text", {"num_local_experts": 4}, "interface of experts"),
        ("no_such_model", {}, "is not known to transformers"),
        ("llama", {"quantization_config": {"quant_method": "magic"}}, "quant_method=magic"),
        ("llama", {"compression_config": [1]}, r"compression_config=\[1\]: must hold keys"),
        ("llama", quantized("gptq", bits="4"), "its weights is not known from these settings"),
        ("llama", quantized("gptq", bits=-4), "stored_bytes=-0.48[0-9]*: must be above 0"),
        ("llama", quantized("gptq", modules_to_not_convert=["*up"]), "from these settings"),
        ("llama", quantized("compressed-tensors", config_groups=[1]), "from these settings"),
    ],
)
def test_what_cannot_be_counted_is_refused_in_one_line(model_type, settings, said):
    with pytest.raises(UserError, match=said) as refusal:
        describe(plain_of(model_type, settings), "config.json")
    assert "\n" not in str(refusal.value)


def test_an_index_is_read_whole_and_entries_as_it_selects():
    sizes = {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "v_head_dim": 16}
    sizes |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "n_routed_experts": 8}
    sizes |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1}
    sizes |= {
        "first_k_dense_replace": 1,
        "index_topk": 32,
        "index_head_dim": 16,
        "index_n_heads": 2,
    }
    config = describe(plain_of("deepseek_v32", sizes), "config.json").as_predicted()
    [memory] = config.memories
    assert (memory.entry, memory.index_entry, memory.selected) == (24, 16, 32)
    forward = Pass(config, 2, 1, 1000)
    read = {op.name: op.bytes for op in operators(forward, hardware_named("h100"))}
    assert read["attention"] == 2 * 32 * 24 * BF16
    assert read["index"] == 2 * 1000 * 16 * BF16
    assert "read at most 32 entries, chosen by an index" in growth(config)


@pytest.mark.parametrize(("model_type", "settings"), FAMILIES)
def test_a_layer_alone_has_the_weights_and_the_memory_of_its_modules(model_type, settings):
    """Of draft=layer_skip, whose layers may be the dense ones, or those with states."""
    plain = plain_of(model_type, settings)
    config = describe(plain, "config.json")
    whole = CONFIG_MAPPING[model_type].from_dict(plain)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(whole, dtype=torch.bfloat16)
    kept = 0.0
    for index, layer in enumerate(layers_of(model.get_decoder())):
        part = config.layers(index, index + 1)
        held = sum(weight.numel() for weight in layer.parameters() if weight.dim() > 1)
        counted = sum(matrix.elements for matrix in part.matrices)
        assert counted == pytest.approx(held, rel=0.05)
        kept += sum(memory.stored_bytes(TOKENS, BF16) for memory in part.memories)
    assert kept == sum(memory.stored_bytes(TOKENS, BF16) for memory in config.memories)
