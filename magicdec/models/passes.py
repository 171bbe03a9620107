"""A forward pass of few rows on a CPU in one call: all layers, with attention over a cache
(kernels/layer.cpp).

B rows, T tokens, E hidden size, M = B x T. The arithmetic of a step takes little time. Calling one
operator after another, each of which starts threads, would take several times as long.
"""

import ctypes
from functools import cache as once
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from magicdec.attention.base import Attention
from magicdec.attention.cpp import CodesCall, CppAttention, codes_call, reads
from magicdec.kernels import library
from magicdec.models.computed_rows import active_rows, among
from magicdec.models.kv_cache import KVCache
from magicdec.models.operators import TYPES, CppOperators, Rotation, at, epsilon, is_plain
from magicdec.models.taps import Taps

MATRICES = ("qkv", "output", "gate_up", "down")  # of a layer
WEIGHTS = (
    "attention_norm.weight qkv.weight qkv.bias q_norm.weight k_norm.weight "
    "output.weight output.bias mlp_norm.weight gate_up.weight down.weight"
)


class Weights(ctypes.Structure):
    """`struct Weights` of layer.cpp."""

    _fields_ = library.pointers(WEIGHTS.replace(".", "_"))


class Entries(ctypes.Structure):
    """`struct Entries` of layer.cpp."""

    _fields_ = [
        *library.pointers("k v queries positions"),
        ("codes", ctypes.POINTER(CodesCall)),
        *library.numbers("window"),
        *library.pointers("indices scores counted"),
        *library.numbers("num_indices"),
    ]


class PassCall(ctypes.Structure):
    """`struct Pass` of layer.cpp."""

    _fields_ = [
        ("weights", ctypes.POINTER(Weights)),
        ("entries", ctypes.POINTER(Entries)),
        *library.pointers("x out total norm seqlens cache_rows"),
        ("rotation", Rotation),
        *library.numbers("layers size features capacity"),
    ]


class Kernel:
    """The function that takes a model's layers in one call, and the pointers to their weights."""

    def __init__(self, layers: nn.ModuleList, addresses: list[Any], dtype: torch.dtype):
        """Decide for a model whose activations have this type; `addresses` are its weights' own."""
        self.addresses, self.dtype = addresses, dtype
        self.weights = (Weights * len(layers))(
            *(Weights(*map(at, _parameters(layer))) for layer in layers)
        )
        matrices = [getattr(layer, name) for layer in layers for name in MATRICES]
        types = {matrix.weight.dtype if is_plain(matrix) else None for matrix in matrices}
        # None: there is none for these types.
        self.call = _calls().get((dtype, types.pop())) if len(types) == 1 else None


_kernels: WeakKeyDictionary[nn.Module, Kernel] = WeakKeyDictionary()


def _kernel_for(layers: nn.ModuleList, dtype: torch.dtype) -> Kernel:
    """Return the kernel of a model, which is chosen once: again only if a weight was replaced."""
    kernel = _kernels.get(layers)
    addresses = _addresses(layers)
    if kernel is None or kernel.addresses != addresses or kernel.dtype != dtype:
        _kernels[layers] = kernel = Kernel(layers, addresses, dtype)
    return kernel


def run(
    layers: nn.ModuleList,
    norm: nn.RMSNorm,
    attention: Attention,
    x_BTE: Tensor,
    angles: tuple[Tensor, Tensor],
    cache: KVCache,
    plans: list[Any],
    taps: Taps | None = None,
) -> Tensor | None:
    """Return the normalised output of all layers; None for passes and models that need one operator
    after another.

    `angles` are cosines and sines (B, T, D / 2). `x_BTE` is overwritten. With taps, a call ends in
    front of each of their layers. Rows that rest are left out: their output is 0, and they store
    nothing.
    """
    if not _takes(attention, x_BTE, cache):
        return None
    B, T, E = x_BTE.shape
    kernel = _kernel_for(layers, x_BTE.dtype)
    queries = cache.last_queries if cache.keeps_queries else None
    q_LBTHD = None if queries is None else _room_for_queries(cache, x_BTE)
    entries = None if kernel.call is None else _entries(cache, plans, q_LBTHD)
    if kernel.call is None or entries is None:
        return None
    rows = active_rows(cache.resting_B)  # only these are computed; M of them instead of B
    # By names, because the kernel has their addresses only.
    x_MTE = _of(rows, x_BTE)
    slots_MT = _of(rows, cache.slots_BT(T))
    cos = _of(rows, angles[0])
    sin = _of(rows, angles[1])
    rotation = _rotation(cache, cos, sin, slots_MT, epsilon(norm, x_BTE))
    out_MTE = torch.empty_like(x_MTE)
    tapped = [layer for layer in taps.layers if layer < len(layers)] if taps else []
    for start, end in pairwise(sorted({0, *tapped, len(layers)})):
        total_MTE = None
        if taps:  # a call overwrites x
            taps.take(start, among(rows, x_MTE, B))
            x_MTE, total_MTE = x_MTE.clone(), torch.empty_like(x_MTE)
        tensors = (x_MTE, out_MTE, total_MTE, norm.weight, plans[0].seqlens_B, rows)
        described = PassCall(
            ctypes.pointer(kernel.weights[start]),
            ctypes.pointer(entries[start]),
            *map(at, tensors),
            rotation,
            end - start,
            E,
            cache.config.intermediate_size,
            cache.capacity,
        )
        kernel.call(ctypes.byref(described))
        x_MTE = x_MTE if total_MTE is None else total_MTE
    if taps:
        taps.take(len(layers), among(rows, x_MTE, B))
    if queries is not None and q_LBTHD is not None:
        for layer, q_BTHD in enumerate(q_LBTHD):
            queries.keep(layer, q_BTHD, attention)
    return among(rows, out_MTE, B)


def _takes(attention: Attention, x_BTE: Tensor, cache: KVCache) -> bool:
    """Return whether a pass is one of few rows that the kernels take: of one type, with the usual
    weights of attention. Queries are kept of all rows or none.
    """
    B, T, _ = x_BTE.shape
    is_small = CppAttention.max_new_tokens >= T and CppOperators.max_rows >= B * T
    is_usual = isinstance(attention, CppAttention) and attention.weighting.is_plain
    is_of_all = cache.resting_B is None or not cache.keeps_queries
    return is_small and is_usual and is_of_all and cache.k_LBKSD.dtype == x_BTE.dtype


def _room_for_queries(cache: KVCache, x_BTE: Tensor) -> Tensor:
    """Allocate the queries of all layers (L, B, T, H, D)."""
    config = cache.config
    return x_BTE.new_empty(config.num_layers, *x_BTE.shape[:2], config.num_heads, config.head_dim)


def _of(rows: Tensor | None, x_B: Tensor) -> Tensor:
    """Return these rows of a tensor; all where that is None."""
    return x_B if rows is None else x_B[rows]


def _rotation(cache: KVCache, cos: Tensor, sin: Tensor, slots: Tensor, epsilon: float) -> Rotation:
    """Return how keys are rotated and where they go; each layer has its own queries, weights and
    entries.
    """
    config, (num_rows, num_new) = cache.config, slots.shape
    return Rotation(
        None,
        at(cos),
        at(sin),
        *(None, None, None, None),
        at(slots),
        num_rows,
        num_new,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        *cache.k_LBKSD.stride()[1:4],
        *cache.v_LBKSD.stride()[1:4],
        torch.get_num_threads(),
        epsilon,
    )


def _entries(cache: KVCache, plans: list[Any], q_LBTHD: Tensor | None) -> Any:
    """Return an array of each layer's `Entries`, which keeps the descriptions of codes alive.

    None where attention depends on queries, or reads codes that the kernel does not.
    """
    entries = (Entries * len(plans))()
    k_at = _layers_at(cache.k_LBKSD)
    v_at = _layers_at(cache.v_LBKSD)
    q_at = None if q_LBTHD is None else _layers_at(q_LBTHD)
    for layer, plan in enumerate(plans):
        reading = cache.reads(layer)
        coded = cache.coded(layer)
        if reading is None or (coded is not None and not reads(coded)):
            return None
        entries[layer] = Entries(
            k_at[layer],
            v_at[layer],
            None if q_at is None else q_at[layer],
            at(plan.positions_BKS),
            None if coded is None else ctypes.pointer(codes_call(coded)),
            plan.reach,
            at(reading.indices_BKN),
            at(reading.scores_BKS),
            at(reading.counted_BT),
            0 if reading.indices_BKN is None else reading.indices_BKN.shape[-1],
        )
    return entries


def _layers_at(x_LBKSD: Tensor) -> range:
    """Return the address of every layer."""
    first = x_LBKSD.data_ptr()
    step = x_LBKSD.stride(0) * x_LBKSD.itemsize
    return range(first, first + len(x_LBKSD) * step, step)


@once
def _calls() -> dict[tuple[torch.dtype, torch.dtype | None], Any]:
    """Return the kernels, by the types of activations and of matrices."""
    kernels = library.load()
    functions = {}
    for x, w in TYPES:
        types = getattr(torch, x), getattr(torch, w)
        functions[types] = kernels[f"forward_{x}_{w}"]
    return functions


def _parameters(layer: nn.Module) -> list[Tensor | None]:
    names = (name.split(".") for name in WEIGHTS.split())
    return [getattr(getattr(layer, module, None), name, None) for module, name in names]


def _addresses(layers: nn.ModuleList) -> list[Any]:
    """Return the address and type of each weight. Look them up in every pass: a weight may have
    been replaced.

    Reading modules' dictionaries takes one or two microseconds per layer, `layers.parameters()`
    takes ten.
    """
    return [
        (weight.data_ptr(), weight.dtype)
        for layer in layers
        for module in layer._modules.values()
        if module is not None
        for weight in module._parameters.values()
        if weight is not None
    ]
