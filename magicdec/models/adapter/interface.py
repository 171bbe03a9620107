"""One forward pass of transformers' modules over a cache of ours, through transformers' attention
interface.

A module hands over the queries, keys and values of new tokens alone: it is given no cache. They are
written to ours, and attention over it is returned. So whatever a module does to make keys and
values, such as expanding latents, is done once per token.

B rows, T new tokens, N of them that are computed, H query heads, K KV heads, D head dim. A module
sees (1, N) tokens where some are left out, or (R, T) of some rows, otherwise (B, T).
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typing_extensions import override

from magicdec.attention.base import Attention, Weighting
from magicdec.models.kv_cache import KVCache, Place
from magicdec.models.recurrent_states import Computed
from magicdec.models.transformer import MAX_COMPILED, compile_parts

NAME = "magicdec"  # of the attention, and of the keyword that carries a pass to it


class Packing:
    """The tokens of a pass that are computed; the others are left out."""

    def __init__(self, shape: torch.Size, index: tuple[Tensor, ...]):
        """Take the shape (B, T) of all tokens, and where those are that are computed."""
        self.shape, self.index = shape, index

    @classmethod
    def of_tokens(cls, computed_BT: Tensor) -> "Packing":
        """Put the computed tokens (bool) side by side in one row."""
        rows_N, columns_N = computed_BT.nonzero(as_tuple=True)
        return cls(computed_BT.shape, (rows_N[None], columns_N[None]))

    @classmethod
    def of_rows(cls, computed_BT: Tensor) -> "Packing":
        """Take the rows of which any token is computed, with all of its tokens: recurrent layers
        tell rows apart.
        """
        [rows_R] = computed_BT.any(1).nonzero(as_tuple=True)
        return cls(computed_BT.shape, (rows_R,))

    def packed(self, x_BT: Tensor) -> Tensor:
        """Return the computed tokens (1, N, ...) or rows (R, T, ...) of a tensor (B, T, ...)."""
        return x_BT[self.index]

    def unpacked(self, x: Tensor) -> Tensor:
        """Return a tensor (B, T, ...) of what was computed, 0 elsewhere."""
        x_BT = x.new_zeros(*self.shape, *x.shape[2:])
        x_BT[self.index] = x
        return x_BT

    def place(self, place: Place) -> Place:
        """Return where to write what is computed."""
        rows = self.index[0]
        rows_B1 = rows if rows.dim() > 1 else rows[:, None]
        return place._replace(rows_B1=rows_B1, slots_BT=place.slots_BT[self.index])


def packing(cache: KVCache, num_new: int) -> Packing | None:
    """Return the tokens to compute: not those of resting rows, nor padding. None: all.

    Beyond CPUs, shapes are static: there all are computed.
    """
    resting_B, count_B = cache.resting_B, cache.count_B
    if cache.seqlens_B.device.type != "cpu" or (resting_B is None and count_B is None):
        return None
    computed_BT = torch.ones(cache.num_rows, num_new, dtype=torch.bool)
    if resting_B is not None:
        computed_BT &= ~resting_B[:, None]
    if count_B is not None:
        computed_BT &= torch.arange(num_new) < count_B[:, None]
    if bool(computed_BT.all()) or not bool(computed_BT.any()):
        return None
    by = Packing.of_tokens if cache.states is None else Packing.of_rows
    return by(computed_BT)


class ModulesPass:
    """One forward pass: the cache that it appends to, and how it attends."""

    def __init__(self, cache: KVCache, attention: Attention, num_new: int, dtype: torch.dtype):
        self.cache, self.attention = cache, attention
        self.plans: list[Any] = cache.plan(attention, num_new, dtype)
        self.slots_BT = cache.slots_BT(num_new)
        self.packing = packing(cache, num_new)

    def packed(self, x_BT: Tensor) -> Tensor:
        """Return a tensor (B, T, ...) as the modules see it."""
        return x_BT if self.packing is None else self.packing.packed(x_BT)

    def unpacked(self, x: Tensor) -> Tensor:
        """Return what the modules have made as a tensor (B, T, ...)."""
        return x if self.packing is None else self.packing.unpacked(x)

    @property
    def computed(self) -> Computed:
        """Return which rows are computed, and how many tokens each of them has, for recurrent
        layers.
        """
        rows_R = None if self.packing is None else self.packing.index[0]
        computed, count_B = Computed(rows_R), self.cache.count_B
        return computed if count_B is None else Computed(rows_R, computed.of(count_B))

    def attend(self, layer: int, q_BTHD: Tensor, weighting: Weighting) -> Tensor:
        """Return attention over a layer, to which the new tokens' entries are appended."""
        attention = self.attention.weighted(weighting)
        out_BTHD = self.cache.attend(layer, self.unpacked(q_BTHD), attention, self.plans[layer])
        return self.packed(out_BTHD)

    def write(self, layer: int, k_BTKD: Tensor, v_BTKD: Tensor) -> None:
        """Append the entries of new tokens to a layer, unless they are there already."""
        place = self.cache.place(layer, self.slots_BT)
        if place is None:
            return
        if self.packing is not None:
            place = self.packing.place(place)
        dtype = place.k_BKSD.dtype
        place.write(k_BTKD.to(dtype), v_BTKD.to(dtype))


class _Written(Exception):
    """The entries of a layer are written: what its modules would do next, nobody reads."""


@contextmanager
def writing() -> Iterator[None]:
    """Run modules up to the attention of the first layer that they reach in an `EntriesPass`."""
    with suppress(_Written):
        yield


class EntriesPass(ModulesPass):
    """A pass within `writing` that writes the entries of one layer and attends to nothing."""

    def __init__(self, cache: KVCache, num_new: int):
        self.cache = cache
        self.slots_BT = cache.slots_BT(num_new)
        self.packing = packing(cache, num_new)

    @override
    def attend(self, layer: int, q_BTHD: Tensor, weighting: Weighting) -> Tensor:
        """End the pass."""
        raise _Written


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention interface asks: query (B, H, T, D), key and value (B, K, T,
    D) of the new tokens; return (B, T, H, D).

    Our backends scale by 1/sqrt(D) and have one D: queries carry a scaling of the model's own, and
    narrower keys or values are padded with zeros.
    """
    forward: ModulesPass = given[NAME]
    width = forward.cache.config.head_dim
    heads = forward.cache.config.num_kv_heads
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    factor = scaling * math.sqrt(width)
    if not math.isclose(factor, 1.0, rel_tol=1e-6):
        query = (query.float() * factor).to(query.dtype)
    q = _wide(query, width).transpose(1, 2)
    k = _wide(key, width).transpose(1, 2)
    v = _wide(value, width).transpose(1, 2)
    repeats = heads // k.shape[2]
    if repeats > 1:
        k = k.repeat_interleave(repeats, 2)
        v = v.repeat_interleave(repeats, 2)
    layer = forward.cache.config.entry_place(module.layer_idx)
    forward.write(layer, k, v)
    q = q.to(forward.cache.k_LBKSD.dtype)  # a module's norm or rotation may widen it
    out_BTHD = forward.attend(layer, q, Weighting(s_aux, softcap))
    return out_BTHD[..., : value.shape[-1]].to(query.dtype), None


def _wide(x: Tensor, width: int) -> Tensor:
    """Return the same numbers with zeros behind them, up to `width` features."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def layers_of(decoder: Any) -> nn.ModuleList:
    """Return the layers of a decoder; none where no list has as many as its config says."""
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
    number = decoder.config.num_hidden_layers
    return next((each for each in lists if len(each) == number), nn.ModuleList())


def compile_forward(layers: Iterable[nn.Module]) -> None:
    """Compile the forward pass of each layer but its attention, which writes to caches and may wait
    for the host. Layers of one class share the compiled code.
    """
    # Here and not from the beginning: this imports PyTorch's compiler, which takes a second.
    ALL_ATTENTION_FUNCTIONS.register(NAME, torch.compiler.disable(attend))
    torch._dynamo.config.recompile_limit = MAX_COMPILED
    for layer in layers:
        compile_parts(layer, "forward")


# transformers makes no masks for an attention without an entry in its interface of masks.
ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
