"""The facts of a model, read from its modules and from a recorded pass of them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from pydantic import ValidationError

from magicdec.architectures.generation_config import GenerationConfig, eos_ids
from magicdec.architectures.layer_facts import Matrices, TokenMemory
from magicdec.architectures.modules_config import ModulesConfig, MtpFacts
from magicdec.architectures.quantized_checkpoints import QUANTIZED
from magicdec.errors import UserError
from magicdec.inputs.rules import parse, refusal
from magicdec.models.adapter.counts import (
    EXPERTS_PER_TOKEN,
    WeightSizes,
    kept_by_a_pass,
    matrices_of,
    memories_of,
    recurrence_of,
)
from magicdec.models.adapter.interface import layers_of
from magicdec.models.adapter.recorded_pass import RECORDING, LayerFacts, record, storeless
from magicdec.models.adapter.recurrent import FAMILIES as RECURRENT_FAMILIES
from magicdec.models.adapter.recurrent import LAYER_TYPE as RECURRENT_LAYER
from magicdec.models.adapter.recurrent import is_recurrent
from magicdec.models.adapter.transformers_library import check_version, config_of, quiet

ATTENTION_LAYERS = ("full_attention", "sliding_attention")  # of layer_types
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Sizes in a configuration, of which few families lack any.
NEEDED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
COUNTED = "sdpa"  # attention of models that are counted and cannot run here


def describe(plain: Mapping[str, Any], name: str) -> ModulesConfig:
    """Return the architecture of a config.json as transformers' modules show it: what is needed to
    run it, or, with the reason as its `refusal`, what is needed to predict it.

    `name` is what errors call the file. Raise UserError for a model that cannot be counted either.
    """
    quiet()
    check_version()
    try:
        return _described(json.dumps(plain, sort_keys=True))
    except ValidationError as error:
        raise refusal(error, where=name) from None
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


@lru_cache(maxsize=64)
def _described(config_json: str) -> ModulesConfig:
    """Return the architecture of a config.json. A recorded pass takes up to seconds, and each job
    of a sweep asks.
    """
    plain = json.loads(config_json)
    whole = config_of(plain)
    key = next((key for key in QUANTIZED if plain.get(key)), None)
    stored = WeightSizes(parse(dict[str, Any], plain[key], key) if key else None)
    try:
        described = _runnable(whole, stored)
    except UserError as error:
        described = _counted(whole, stored, str(error))
    return replace(described, config_json=config_json)


def _runnable(whole: Any, stored: WeightSizes) -> ModulesConfig:
    """Return what is needed to run a model. Raise UserError where it cannot run, with the
    reason.
    """
    config = whole.get_text_config()
    refuse(config)
    longest = config.max_position_embeddings
    model = storeless(whole, torch.bfloat16, RECORDING)
    recording = record(model, longest)
    with_entries = sorted(recording.layers)
    layers = [recording.layers[index] for index in with_entries]
    recurrence = recurrence_of(recording.cache, config)
    with_states = recurrence.layers if recurrence else ()
    if len(layers) + len(with_states) != config.num_hidden_layers:
        raise UserError(
            f"{len(layers)} of {config.num_hidden_layers} layers have attention; models with other"
            " layers, such as recurrent ones, are not supported"
        )
    window, sliding = _windows(recording.layers)
    [num_heads] = _one_of("query heads", [layer.num_heads for layer in layers])
    described = _of_modules(whole, model, recording.cache, stored)
    return replace(
        described,
        num_heads=num_heads,
        num_kv_heads=max(layer.num_kv_heads for layer in layers),
        head_dim=max(max(layer.key_dim, layer.value_dim) for layer in layers),
        sliding_window=window,
        sliding_layers=sliding,
        recurrence=recurrence,
        entry_layers=tuple(with_entries) if recurrence else (),
        weightings=tuple(sorted({need for layer in layers for need in layer.needs})),
        long_rope_from=_long_rope(config),
        remarks=tuple(_remarks(layers, described.memories)),
    )


def _counted(whole: Any, stored: WeightSizes, reason: str) -> ModulesConfig:
    """Return what is needed to predict a model that cannot run here. Raise UserError, with the
    reason why it cannot run, where it cannot be counted either.
    """
    if getattr(whole, "is_encoder_decoder", False) or _missing_sizes(whole.get_text_config()):
        raise UserError(reason)
    try:
        model = storeless(whole, torch.bfloat16, COUNTED)
        counted = _of_modules(whole, model, kept_by_a_pass(model), stored)
    except UserError as error:
        raise UserError(f"{reason}; nor can it be predicted: {error}") from None
    return replace(counted, refusal=reason)


def _of_modules(whole: Any, model: Any, cache: Any, stored: WeightSizes) -> ModulesConfig:
    """Return what modules and the cache of a pass show, with the sizes of attention as the
    config.json has them.
    """
    config = whole.get_text_config()
    experts = _experts(model)
    if not experts.count and any((getattr(config, key, 0) or 0) > 1 for key in EXPERT_COUNTS):
        raise UserError(
            f"model_type={config.model_type}: its experts take no part in transformers' interface"
            " of experts"
        )
    memories = memories_of(cache, config)
    heads = max((memory.heads for memory in memories), default=0) or 1
    widths = [memory.entry // (2 * memory.heads) for memory in memories if memory.heads]
    widest = max(widths, default=2)
    return ModulesConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=heads,
        head_dim=widest + widest % 2,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=bool(getattr(whole, "tie_word_embeddings", False)),
        eos_token_ids=eos_ids(parse(GenerationConfig, {"eos_token_id": config.eos_token_id})),
        model_type=whole.model_type,
        parameters=sum(weight.numel() for weight in model.parameters()),
        expert_parameters=experts.parameters,
        num_experts=experts.count,
        experts_per_token=experts.per_token,
        mtp=_mtp_facts(config, model, experts, memories_of(cache, config, last=True)),
        counted_matrices=matrices_of(model, stored, layers_of(model.get_decoder())),
        counted_memories=memories,
    )


def refuse(config: Any) -> None:
    """Raise UserError for a model that keeps more than keys and values, for a rotary embedding
    whose angles change with the length, and for a configuration without a size that is needed.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{config.model_type} is not a decoder alone, and not supported")
    supported = {*ATTENTION_LAYERS, *([RECURRENT_LAYER] if is_recurrent(config) else [])}
    others = sorted({*(getattr(config, "layer_types", None) or ())} - supported)
    if others:
        raise UserError(
            f"layer_types={others[0]!r:.60} of model_type={config.model_type!r:.60} is not"
            f" supported: a cache here keeps keys and values; supported:"
            f" {', '.join(ATTENTION_LAYERS)}, and {RECURRENT_LAYER} of"
            f" {', '.join(RECURRENT_FAMILIES)}"
        )
    if "dynamic" in _rope_types(config):
        raise UserError(
            "rope_type=dynamic is not supported: its angles change with the length, so that entries"
            " of a cache would not suit each other"
        )
    if missing := _missing_sizes(config):
        raise UserError(
            f"model_type={config.model_type!r:.60}: its configuration has no {missing[0]}, which"
            " running and predicting a model need"
        )


def _missing_sizes(config: Any) -> list[str]:
    return [name for name in NEEDED if getattr(config, name, None) is None]


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """Return the rotary embeddings of a model: one, or one for each type of layer."""
    ropes = getattr(config, "rope_parameters", None) or {}
    nested = [rope for rope in ropes.values() if isinstance(rope, Mapping)]
    return nested or [ropes]


def _rope_types(config: Any) -> set[str]:
    return {rope.get("rope_type") or "default" for rope in _ropes(config)}


def _long_rope(config: Any) -> int | None:
    if "longrope" not in _rope_types(config):
        return None
    return int(_ropes(config)[0]["original_max_position_embeddings"])


@dataclass
class ExpertFacts:
    """The routed experts of a model: how many a layer has, how many a token takes, all weights."""

    count: int = 0
    per_token: int = 0
    parameters: int = 0
    layers: int = 0  # that have any


def _experts(model: Any) -> ExpertFacts:
    """Return the experts that the recorded pass went through."""
    facts = ExpertFacts()
    for module in model.modules():
        if hasattr(module, EXPERTS_PER_TOKEN):
            facts.layers += 1
            facts.count = module.num_experts
            facts.per_token = int(getattr(module, EXPERTS_PER_TOKEN))
            facts.parameters += sum(weight.numel() for weight in module.parameters())
    return facts


def _mtp_facts(
    config: Any, model: Any, experts: ExpertFacts, memories: tuple[TokenMemory, ...]
) -> MtpFacts | None:
    """Return what is known of the modules behind a model's layers that predict further tokens; None
    where config.json names none, or some with other layers than attention.

    Each is a layer like the model's last one, behind a matrix of two hidden sizes and three norms.
    """
    count = getattr(config, "num_mtp_layers", None) or 0
    kinds = getattr(config, "mtp_layer_types", None) or ["full_attention"] * count
    if not count or {*kinds} - {*ATTENTION_LAYERS}:
        return None
    last = layers_of(model.get_decoder())[-1]
    joined = 2 * config.hidden_size**2 + 3 * config.hidden_size
    each = sum(weight.numel() for weight in last.parameters()) + joined
    of_experts = experts.parameters // experts.layers if experts.layers else 0
    sliding = tuple(index for index, kind in enumerate(kinds) if kind == "sliding_attention")
    join = Matrices("join", 1, 2 * config.hidden_size, config.hidden_size)
    matrices = (join, *matrices_of(last, WeightSizes(None)))
    return MtpFacts(count, count * each, count * of_experts, sliding, matrices, memories)


def _windows(layers: dict[int, LayerFacts]) -> tuple[int | None, tuple[int, ...]]:
    """Return the sliding window and the layers that have it."""
    sliding = tuple(index for index in sorted(layers) if layers[index].window)
    if not sliding:
        return None, ()
    [window] = _one_of("sizes of windows", [layers[index].window for index in sliding])
    return window, sliding


def _one_of(what: str, given: list[Any]) -> set[Any]:
    """Return the only value of all layers, as a set; raise UserError for several."""
    values = set(given)
    if len(values) > 1:
        raise UserError(f"layers with different {what} ({sorted(values)}) are not supported")
    return values


def _remarks(layers: list[LayerFacts], memories: tuple[TokenMemory, ...]) -> Iterator[str]:
    """Yield what a user should know about entries that take more memory than the model's own."""
    heads = max(layer.num_kv_heads for layer in layers)
    width = max(max(layer.key_dim, layer.value_dim) for layer in layers)
    needed = sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)
    kept = sum(memory.layers * memory.entry for memory in memories)
    stored = 2 * heads * width * len(layers)
    if kept < needed:
        yield (
            "its latents are expanded here, in each step those of its new tokens: the cache holds"
            f" keys and values of every head, {stored / kept:.0f}x the memory of the latents;"
            " predictions describe the absorbed form, which reads the latents alone"
        )
    elif stored != needed:
        yield (
            "its keys and values differ in shape: the cache pads them, and takes"
            f" {stored / needed:.2f}x their memory"
        )
