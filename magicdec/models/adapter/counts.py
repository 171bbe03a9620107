"""The weights and the memory of a model's layers, counted on its modules and on the cache that a
pass without storage leaves behind.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.quantizers.quantizers_utils import should_convert_module
from typing_extensions import override

from magicdec.architectures.layer_facts import (
    Matrices,
    Recurrence,
    Stretches,
    TokenMemory,
    stretches,
)
from magicdec.errors import UserError, in_one_line
from magicdec.models.meta_runs import EachOnce

TOKENS = 2  # of the pass
EXPERTS_PER_TOKEN = "magicdec_experts_per_token"  # an attribute of experts that a pass reached
LINEAR_STATES = ("conv_states", "recurrent_states")
ENTRIES = {"keys", "values", "indexer_keys", *LINEAR_STATES}  # tensors of a cache that are counted
EXCLUDED = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
# Matrices to and from which all heads share latents, and the scorer of sparse attention: engines
# keep them whole on each rank.
REPLICATED, INDEXER = {"q_a_proj", "kv_a_proj_with_mqa"}, "indexer"
SCALE_OF_32 = 1 / 32  # of MXFP4: a byte for 32 weights
SCALE_OF_16 = 1 / 16  # of NVFP4: a byte for 16 weights
SCALE_OF_BLOCK = 4 / 128**2  # of FP8


def _in_groups(settings: Mapping[str, Any]) -> float:
    """Return the bytes of a weight whose group has a scale in 16 bits and a zero."""
    bits = settings.get("bits") or settings.get("w_bit") or 4
    return bits / 8 + (2 + bits / 8) / _group_size(settings, 128)


def _in_schemes(settings: Mapping[str, Any]) -> float:
    """Return the bytes of a weight of the first scheme, as of compressed-tensors."""
    schemes = (settings.get("config_groups") or {}).values()
    weights = next((scheme.get("weights") or {} for scheme in schemes), {})
    return weights["num_bits"] / 8 + 2 / _group_size(weights, inf)


def _group_size(settings: Mapping[str, Any], usual: float) -> float:
    """Return how many weights share a scale; a size such as -1 means all of a row."""
    size = settings.get("group_size")
    if size is None:
        return usual
    return size if size > 0 else inf


# Of a weight, by quant_method.
BYTES_BY_METHOD: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "mxfp4": lambda settings: 0.5 + SCALE_OF_32,
    "nvfp4": lambda settings: 0.5 + SCALE_OF_16,
    "fp8": lambda settings: 1 + SCALE_OF_BLOCK,
    "fbgemm_fp8": lambda settings: 1.0,
    "awq": _in_groups,
    "gptq": _in_groups,
    "compressed-tensors": _in_schemes,
}


class WeightSizes:
    """The sizes of weights in a quantized checkpoint, by the settings of its quantization."""

    def __init__(self, settings: Mapping[str, Any] | None):
        """Raise UserError for a method whose sizes are not known."""
        plain = settings or {}
        method = str(plain.get("quant_method"))
        self.only_experts = method == "mxfp4"
        try:
            excluded = [plain.get(key) or () for key in EXCLUDED]
            patterns = [
                name
                for names in excluded
                for name in ([names] if isinstance(names, str) else names)
            ]
            self.excluded = [re.compile(str(name).removeprefix("re:")).pattern for name in patterns]
            self.bytes = BYTES_BY_METHOD[method](plain) if plain else None
        except (AttributeError, KeyError, TypeError, re.error):  # another method, or broken values
            raise UserError(
                f"quant_method={method}: the size of its weights is not known from these settings;"
                f" known methods: {', '.join(BYTES_BY_METHOD)}"
            ) from None

    def of(self, name: str, module: nn.Module) -> float | None:
        """Return the bytes of a weight of a module; None where it is not quantized."""
        is_experts = hasattr(module, EXPERTS_PER_TOKEN)
        is_converted = is_experts or (isinstance(module, nn.Linear) and not self.only_experts)
        if not is_converted or not should_convert_module(name, self.excluded):
            return None
        return self.bytes


def matrices_of(
    model: Any, stored: WeightSizes, layers: Iterable[nn.Module] = ()
) -> tuple[Matrices, ...]:
    """Return the weights of a model's layers, which `layers` tells apart, or of one layer, after a
    pass that has reached its experts.
    """
    place_of = {
        id(module): place for place, layer in enumerate(layers) for module in layer.modules()
    }
    kinds: dict[Matrices, list[int | None]] = {}
    outside = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    if hasattr(model, "get_output_embeddings"):
        outside.add(id(model.get_output_embeddings().weight))
    for name, module in model.named_modules():
        owner = model.get_submodule(name.rpartition(".")[0])
        # Attention and layers with states know their place in the cache.
        in_mlp = not (hasattr(owner, "layer_idx") or hasattr(module, "layer_idx"))
        least = 3 if hasattr(module, EXPERTS_PER_TOKEN) else 2  # without the biases of experts
        for weight in module.parameters(recurse=False):
            if weight.dim() >= least and id(weight) not in outside:
                kind = _matrix(name, module, weight, stored.of(name, module), in_mlp)
                kinds.setdefault(kind, []).append(place_of.get(id(module)))
    experts = {kind.experts for kind in kinds if kind.experts}
    return tuple(
        replace(
            kind,
            number=len(places),
            places=_stretches(places),
            # What chooses among experts is whole, too.
            is_replicated=kind.is_replicated or (kind.in_mlp and kind.outputs in experts),
        )
        for kind, places in kinds.items()
    )


def _stretches(places: Sequence[int | None]) -> Stretches:
    """Return the stretches of layers; () where any is not known."""
    known = [place for place in places if place is not None]
    return stretches(known) if len(known) == len(places) else ()


def _matrix(
    name: str, module: nn.Module, weight: Tensor, stored_bytes: float | None, in_mlp: bool
) -> Matrices:
    short = name.rpartition(".")[2]
    if hasattr(module, EXPERTS_PER_TOKEN):
        experts, outputs, inputs = weight.shape
        if getattr(module, "is_transposed", False):
            outputs, inputs = inputs, outputs
        taken = int(getattr(module, EXPERTS_PER_TOKEN))
        return Matrices(
            short, 1, inputs, outputs, experts, taken, stored_bytes=stored_bytes, in_mlp=True
        )
    rows, *others = weight.shape
    return Matrices(
        short,
        1,
        torch.Size(others).numel(),
        rows,
        stored_bytes=stored_bytes,
        in_mlp=in_mlp,
        is_replicated=short in REPLICATED or INDEXER in name.split("."),
    )


READS_OF_A_NUMBER = (
    torch.ops.aten._local_scalar_dense.default,
    # In inference mode, composite operators arrive whole.
    torch.ops.aten.item.default,
    torch.ops.aten.is_nonzero.default,
)


class ScalarsAreOne(TorchDispatchMode):
    """A mode in which a number read from a tensor without storage is 1: masks let everything be
    seen.
    """

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in READS_OF_A_NUMBER and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype, device="cpu").item()
        return func(*args, **(kwargs or {}))


def kept_by_a_pass(model: Any) -> Any:
    """Return the cache of a pass of TOKENS tokens through modules without storage, whatever their
    attention is. Raise UserError where the modules cannot run so.
    """
    tokens_BT = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    mask_BT = torch.ones_like(tokens_BT)
    try:
        with torch.device("meta"), torch.no_grad(), ScalarsAreOne(), EachOnce():
            output = model.get_decoder()(
                input_ids=tokens_BT, attention_mask=mask_BT, use_cache=True
            )
    except Exception as error:  # of the modules' own code
        raise UserError(
            f"model_type={model.config.model_type}: its modules cannot be counted"
            f" ({in_one_line(error):.160})"
        ) from None
    return cache_of(output, model.config)


def cache_of(output: Any, config: Any) -> Any:
    """Return the cache that a pass has left. Raise UserError for modules that keep none."""
    cache = getattr(output, "cache", None)
    if cache is None:
        raise UserError(f"model_type={config.model_type}: its modules keep no keys and values")
    return cache


def memories_of(cache: Any, config: Any, last: bool = False) -> tuple[TokenMemory, ...]:
    """Return what the layers keep, or the last one alone, by the cache that a pass of TOKENS tokens
    of one row has left.

    Raise UserError for a cache that keeps what is not known to be counted.
    """
    for name, value in vars(cache).items():
        if isinstance(value, list) and any(isinstance(item, Tensor) for item in value):
            raise _not_counted(config, name)
    kinds: dict[TokenMemory, list[int | None]] = {}
    for place, layer in enumerate(cache.layers[-1:] if last else cache.layers):
        kinds.setdefault(_memory(layer, config), []).append(None if last else place)
    return tuple(
        replace(kind, layers=len(places), places=_stretches(places))
        for kind, places in kinds.items()
        if kind.entry or kind.state_bytes
    )


def recurrence_of(cache: Any, config: Any) -> Recurrence | None:
    """Return the layers that have states and no entries, and the sizes of their states, by the
    cache that a pass has left; None: there are none.

    Raise UserError where they differ from each other.
    """
    sizes = {}
    for index, layer in enumerate(cache.layers):
        tensors = dict(_tensors(layer))
        if LINEAR_STATES[1] in tensors and "keys" not in tensors:
            sizes[index] = tuple(size for name in LINEAR_STATES for size in tensors[name].shape[1:])
    if not sizes:
        return None
    if len({*sizes.values()}) > 1:
        raise UserError(f"model_type={config.model_type}: its recurrent layers differ in size")
    features, width, heads, key_dim, value_dim = sizes[min(sizes)]
    return Recurrence(tuple(sizes), features, width, heads, key_dim, value_dim)


def _memory(layer: Any, config: Any) -> TokenMemory:
    tensors = dict(_tensors(layer))
    states = [tensor for name, tensor in _tensors(layer) if name in LINEAR_STATES]
    if hasattr(layer, "conv_states") and not tensors:
        raise UserError(
            f"model_type={config.model_type}: its recurrent layers keep their states themselves"
        )
    if unknown := sorted({*tensors} - ENTRIES):
        raise _not_counted(config, unknown[0])
    state_bytes = sum(state.numel() * state.itemsize for state in states)
    if "keys" not in tensors:
        return TokenMemory(1, state_bytes=state_bytes)
    keys, values = tensors["keys"], tensors["values"]
    heads = keys.shape[1]
    key_dim = keys.shape[3]
    value_dim = values.shape[3]
    # Latents of one head serve as keys and as values, and the part that is rotated as keys alone.
    is_latent = heads == 1 and key_dim != value_dim
    scored = 2 * key_dim + value_dim if is_latent else key_dim + value_dim
    index = tensors.get("indexer_keys")
    index_dim = 0 if index is None else index.shape[-1]
    return TokenMemory(
        1,
        query_heads=config.num_attention_heads,
        heads=heads,
        entry=heads * (key_dim + value_dim),
        scores=config.num_attention_heads * scored,
        window=getattr(layer, "sliding_window", None),
        state_bytes=state_bytes,
        index_entry=index_dim,
        index_scores=index_dim * (getattr(config, "index_n_heads", None) or 1),
        # Layers without an index of their own read what one before them has chosen.
        selected=getattr(config, "index_topk", None),
    )


def _not_counted(config: Any, name: str) -> UserError:
    return UserError(
        f"model_type={config.model_type}: its cache also keeps {name}, which is not predicted"
    )


def _tensors(layer: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a layer of a cache keeps of a sequence, by name."""
    for name, value in vars(layer).items():
        values = value.values() if isinstance(value, dict) else [value]
        for tensor in values:
            if isinstance(tensor, Tensor) and tensor.dim() > 1:
                yield name, tensor
