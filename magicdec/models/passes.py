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
from magicdec.attention.codes import Coded
from magicdec.attention.cpp import CodesCall, CppAttention, codes_call, reads
from magicdec.kernels import library
from magicdec.models.kv_cache import KVCache, Reads, active_rows, among
from magicdec.models.operators import CppOperators, Rotation, at, epsilon, is_plain
from magicdec.models.taps import Taps

MATRICES = ("qkv", "output", "gate_up", "down")
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
        *library.pointers("k v positions"),
        ("codes", ctypes.POINTER(CodesCall)),
        *library.numbers("window"),
        *library.pointers("indices scores"),
        *library.numbers("num_indices"),
    ]


class Pass(ctypes.Structure):
    """`struct Pass` of layer.cpp."""

    _fields_ = [
        ("weights", ctypes.POINTER(Weights)),
        ("entries", ctypes.POINTER(Entries)),
        *library.pointers("x out total norm seqlens cache_rows"),
        ("rotation", Rotation),
        *library.numbers("layers size features capacity"),
    ]


class Table:
    """Pointers to the weights of a model's layers, `found` there."""

    def __init__(self, layers: nn.ModuleList, found: list[Any]):
        self.found = found
        matrices = [getattr(layer, name) for layer in layers for name in MATRICES]
        kinds = {matrix.weight.dtype if is_plain(matrix) else None for matrix in matrices}
        self.dtype = kinds.pop() if len(kinds) == 1 else None  # None: there is no kernel for them
        self.weights = (Weights * len(layers))(
            *(Weights(*map(at, _parameters(layer))) for layer in layers)
        )


_tables: WeakKeyDictionary[nn.Module, Table] = WeakKeyDictionary()


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
    (B, T, E), k, v = x_BTE.shape, cache.k_LBKSD, cache.v_LBKSD
    few = CppOperators.max_rows >= B * T and CppAttention.max_new_tokens >= T
    reading = [one for layer in range(len(layers)) if (one := cache.reads(layer)) is not None]
    known = type(cache).place is KVCache.place and len(reading) == len(layers)
    if not isinstance(attention, CppAttention) or not few or not known or k.dtype != x_BTE.dtype:
        return None
    coded = [cache.coded(layer) for layer in range(len(layers))]
    if not all(one is None or reads(one) for one in coded):
        return None
    table, found = _tables.get(layers), _found(layers)
    if table is None or table.found != found:
        _tables[layers] = table = Table(layers, found)
    call = _calls().get((x_BTE.dtype, table.dtype))
    if call is None:
        return None
    c, L, (S, D) = cache.config, len(layers), k.shape[3:]
    entries = _entries(cache, plans, coded, reading)
    rows = active_rows(cache.resting_B)  # only these are computed; M of them instead of B
    x_MTE, cos, sin, slots_MT = (
        x if rows is None else x[rows] for x in (x_BTE, *angles, cache.slots_BT(T))
    )
    out_MTE = torch.empty_like(x_MTE)
    pointers = (None, at(cos), at(sin), None, None, None, None, at(slots_MT))
    sizes = (
        len(x_MTE),
        T,
        c.num_heads,
        c.num_kv_heads,
        D,
        *k.stride()[1:4],
        *v.stride()[1:4],
        torch.get_num_threads(),
    )
    rotation = Rotation(*pointers, *sizes, epsilon(norm, x_BTE))
    for start, end in pairwise(sorted({0, *(taps.layers if taps else ()), L})):
        total_MTE = None
        if taps:  # a call overwrites x
            taps.take(start, among(rows, x_MTE, B))
            x_MTE, total_MTE = x_MTE.clone(), torch.empty_like(x_MTE)
        tensors = map(at, (x_MTE, out_MTE, total_MTE, norm.weight, plans[0].seqlens_B, rows))
        layers_from = (ctypes.pointer(table.weights[start]), ctypes.pointer(entries[start]))
        call(
            ctypes.byref(
                Pass(*layers_from, *tensors, rotation, end - start, E, c.intermediate_size, S)
            )
        )
        x_MTE = x_MTE if total_MTE is None else total_MTE
    if taps:
        taps.take(L, among(rows, x_MTE, B))
    return among(rows, out_MTE, B)


def _entries(
    cache: KVCache, plans: list[Any], coded: list[Coded | None], reading: list[Reads]
) -> Any:
    """Return an array of each layer's `Entries`, which keeps the descriptions of codes alive."""
    k_at, v_at = (
        range(
            x.data_ptr(), x.data_ptr() + len(x) * x.stride(0) * x.itemsize, x.stride(0) * x.itemsize
        )
        for x in (cache.k_LBKSD, cache.v_LBKSD)
    )
    entries = (Entries * len(plans))()
    for layer, (k, v, plan, one, (indices, scores)) in enumerate(
        zip(k_at, v_at, plans, coded, reading, strict=True)
    ):
        codes = None if one is None else ctypes.pointer(codes_call(one))
        num_indices = 0 if indices is None else indices.shape[-1]
        entries[layer] = Entries(
            k, v, at(plan.positions_BKS), codes, plan.reach, at(indices), at(scores), num_indices
        )
    return entries


@once
def _calls() -> dict[tuple[torch.dtype, torch.dtype | None], Any]:
    """Return the kernels, by the types of activations and of matrices."""
    names = (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16"))
    kernels = library.load()
    return {(getattr(torch, x), getattr(torch, w)): kernels[f"forward_{x}_{w}"] for x, w in names}


def _parameters(layer: nn.Module) -> list[Tensor | None]:
    names = (name.split(".") for name in WEIGHTS.split())
    return [getattr(getattr(layer, module, None), name, None) for module, name in names]


def _found(layers: nn.ModuleList) -> list[Any]:
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
