"""Predict what a config.json does here, before its weights are downloaded: `magicdec doctor
--model`.
"""

from collections.abc import Iterator

import torch

from magicdec.architectures.model_config import ModelConfig
from magicdec.architectures.modules_config import ModulesConfig
from magicdec.attention import backends
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.costmodel.growth import growth
from magicdec.measure.memory_use import available_bytes
from magicdec.models.last_queries import MOST_KEPT
from magicdec.planning.as_draft import Described
from magicdec.units import GIB

TOKENS = 1000  # whose keys and values are counted


def examine(
    model: Described, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, str]]:
    """Yield the facts about a model, as checks and their texts."""
    config = model.config
    predicted = config.as_predicted()
    if refusal := getattr(config, "refusal", ""):
        yield "runs", f"no: {refusal}"
        yield "predictions", "scenario=predict and scenario=plan, with target.path=FOLDER"
        yield from _growth(predicted)
        yield from _sizes(predicted, device, dtype)
        return
    yield "implementation", _implementation(config)
    yield "attention", _attention(config, device, dtype)
    yield from (("remark", remark) for remark in config.remarks_on(config.max_position_embeddings))
    yield "drafts", f"{', '.join(DRAFTS)}; draft=model with any target of the same vocabulary"
    yield "cache policies", ", ".join(_policies(config))
    yield from (("refused", refused) for refused in _refused(config))
    yield from _growth(predicted)
    yield from _sizes(config, device, dtype)


def _growth(config: ModelConfig) -> Iterator[tuple[str, str]]:
    text = growth(config) or f"with the context grow the entries of all {config.num_layers} layers"
    yield "a step reads", text


def _implementation(config: ModelConfig) -> str:
    if not isinstance(config, ModulesConfig):
        return "native: our own transformer"
    text = f"transformers: its modules for {config.model_type} over our caches"
    if config.num_experts:
        text += f"; {config.num_experts} experts, of which a token takes {config.experts_per_token}"
    return text


def _attention(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> str:
    head_dims = [config.head_dim]
    name, _ = backends.choose("auto", device, dtype, head_dims, config.attention_needs)
    layers = len(config.sliding_layers)
    windows = f"; a window of {config.sliding_window:,} tokens in {layers} layers" if layers else ""
    needs = "".join(f"; {need}" for need in config.attention_needs)
    return f"{name}, head dim {config.head_dim}{windows}{needs}"


def _policies(config: ModelConfig) -> list[str]:
    """Return the policies over which a target drafts for itself."""
    return [
        name for name in POLICIES if config.recurrence is None or not POLICIES[name].facts.replays
    ]


def _refused(config: ModelConfig) -> Iterator[str]:
    """Yield what runs refuse with this model, and why."""
    if isinstance(config, ModulesConfig):
        yield "hardware.tensor_parallel above 1: its modules run on one device"
        yield "draft.quantization with draft=self: codes replace layers of our own transformer"
    if config.recurrence is not None:
        others = ", ".join(name for name in POLICIES if name not in _policies(config))
        yield f"cache={others} with draft=self: recurrent layers cannot run the context again"
        yield (
            f"cache.observation_window above {MOST_KEPT} with draft=self: recurrent layers cannot"
            " run the end of the context again"
        )
        yield "draft.model: a draft of its own cannot take back the states of rejected tokens"
    longest = config.max_position_embeddings
    yield f"batch.context_len + batch.generate_len above {longest:,}: its trained context"


def _sizes(
    config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, str]]:
    weights = config.stored_weight_bytes(dtype.itemsize)
    entries = config.kv_elements_per_token * TOKENS * dtype.itemsize
    precision = str(dtype).removeprefix("torch.")
    billions = config.num_parameters / 1e9
    yield "weights", f"{weights / GIB:,.2f} GiB in {precision} ({billions:,.2f}B)"
    yield "KV cache", f"{entries / GIB:,.4f} GiB per {TOKENS:,} tokens in {precision}"
    available = available_bytes(device)
    room = int((available - weights) / entries * TOKENS)
    if room < TOKENS:
        yield "memory", f"does not fit into {available / GIB:,.1f} GiB; use a larger machine"
    else:
        text = f"fits into {available / GIB:,.1f} GiB, with room for the keys and values of about"
        yield "memory", f"{text} {room:,} tokens, less activations"
