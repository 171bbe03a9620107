"""The operators around attention: PyTorch's, the reference, and kernels for CPUs that do the same
in fewer passes.

B rows, T tokens, E hidden size, F MLP size, H query heads, K KV heads, D head dim, D2 = D / 2.
Attention's backend decides: with cpp the kernels of kernels/linear.cpp and kernels/layer.cpp run,
with any other PyTorch's operators.
"""

import ctypes
from functools import cache
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from magicdec.attention.base import Attention
from magicdec.attention.cpp import CppAttention
from magicdec.kernels import library
from magicdec.models.kv_cache import Place
from magicdec.models.rope import rotate

# Of activations and of matrices, for which there are kernels.
TYPES = (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16"))
Norms = tuple[nn.RMSNorm, nn.RMSNorm] | None  # of queries and of keys


class Operators:
    """PyTorch's operators."""

    def linear(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Return a linear layer's output. A layer with quantized weights computes it itself."""
        if is_plain(layer):
            return self.matmul(x, layer.weight, layer.bias)
        out: Tensor = layer(x)
        return out

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x times the transposed weight, which may be in bfloat16 where x is in float32."""
        return F.linear(x, weight.to(x.dtype), bias)

    def add_norm(self, norm: nn.RMSNorm, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + y, and the same normalised."""
        total = x + y
        return total, norm(total)

    def rotate(
        self,
        qkv: Tensor,
        num_heads: int,
        norms: Norms,
        cos: Tensor,
        sin: Tensor,
        place: Place | None,
    ) -> Tensor:
        """Rotate queries and keys of a joint projection (B, T, H + 2 K, D) to their positions,
        after their norms.

        Return the queries (B, T, H, D). Keys and values are written to their place, if there is
        one. `cos` and `sin` are (B, T, 1, D2). `qkv` may be changed.
        """
        num_kv_heads = (qkv.shape[2] - num_heads) // 2
        qk, v_BTKD = qkv.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), dim=2)
        if norms is not None:
            q_norm, k_norm = norms
            normed = q_norm(qk[:, :, :num_heads]), k_norm(qk[:, :, num_heads:])
            qk = torch.cat(normed, dim=2)
        rotated = rotate(qk, cos, sin)
        q_BTHD, k_BTKD = rotated.split_with_sizes((num_heads, num_kv_heads), dim=2)
        if place is not None:
            place.write(k_BTKD, v_BTKD)
        return q_BTHD

    def gated(self, gate_up: Tensor) -> Tensor:
        """Return SiLU of the gate times the other half: (B, T, 2 F) to (B, T, F)."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class Rotation(ctypes.Structure):
    """`struct Rotation` of layer.cpp."""

    _fields_ = [
        *library.pointers("qkv cos sin q_norm k_norm k v slots"),
        *library.numbers(
            "rows new_tokens heads kv_heads dim k_row k_head k_slot v_row v_head v_slot threads"
        ),
        ("epsilon", ctypes.c_double),
    ]


class CppOperators(Operators):
    """Kernels for CPUs, in float32 and bfloat16."""

    max_rows = 128  # of a matmul by our kernel; with many more, PyTorch's is faster

    def __init__(self) -> None:
        kernels = library.load()
        p, n = ctypes.c_void_p, ctypes.c_int64
        self._linear, self._rotate = {}, {}
        self._add_norm, self._gate = {}, {}
        for x, w in TYPES:
            self._linear[getattr(torch, x), getattr(torch, w)] = function = kernels[
                f"linear_{x}_{w}"
            ]
            function.argtypes = [p, p, p, p, n, n, n, n]
        for name in ("float32", "bfloat16"):
            dtype = getattr(torch, name)
            self._add_norm[dtype] = function = kernels[f"add_norm_{name}"]
            function.argtypes = [p, p, p, p, p, n, n, ctypes.c_double, n]
            self._gate[dtype] = function = kernels[f"gate_{name}"]
            function.argtypes = [p, p, n, n, n]
            self._rotate[dtype] = kernels[f"rotate_{name}"]

    @override
    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply. A row's result does not depend on how many there are, up to `max_rows`."""
        rows = x.numel() // x.shape[-1]
        if rows > self.max_rows:
            return matmul_of_many(x, weight.to(x.dtype), bias)
        x, weight = x.contiguous(), weight.contiguous()
        out = x.new_empty(*x.shape[:-1], weight.shape[0])
        call = self._linear[x.dtype, weight.dtype]
        call(at(x), at(weight), at(bias), at(out), rows, *weight.shape, torch.get_num_threads())
        return out

    @override
    def add_norm(self, norm: nn.RMSNorm, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x, y = x.contiguous(), y.contiguous()
        total = torch.empty_like(x)
        normed = torch.empty_like(x)
        size = x.shape[-1]
        call = self._add_norm[x.dtype]
        sizes = (x.numel() // size, size, epsilon(norm, x), torch.get_num_threads())
        call(*map(at, (x, y, norm.weight, total, normed)), *sizes)
        return total, normed

    @override
    def rotate(
        self,
        qkv: Tensor,
        num_heads: int,
        norms: Norms,
        cos: Tensor,
        sin: Tensor,
        place: Place | None,
    ) -> Tensor:
        qkv = qkv.contiguous()
        B, T, all_heads, D = qkv.shape
        q_norm, k_norm = (None, None) if norms is None else (norm.weight for norm in norms)
        k, v = (None, None) if place is None else (place.k_BKSD, place.v_BKSD)
        slots = None if place is None else place.slots_BT.contiguous()
        # By names, because the kernel has their addresses only.
        cos, sin = cos.contiguous(), sin.contiguous()
        pointers = map(at, (qkv, cos, sin, q_norm, k_norm, k, v, slots))
        strides = [
            stride for x in (k, v) for stride in ((0, 0, 0) if x is None else x.stride()[:3])
        ]
        sizes = (
            B,
            T,
            num_heads,
            (all_heads - num_heads) // 2,
            D,
            *strides,
            torch.get_num_threads(),
        )
        to_square = 0.0 if norms is None else epsilon(norms[0], qkv)
        self._rotate[qkv.dtype](ctypes.byref(Rotation(*pointers, *sizes, to_square)))
        return qkv[:, :, :num_heads]

    @override
    def gated(self, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        size = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], size)
        self._gate[gate_up.dtype](
            at(gate_up), at(out), out.numel() // size, size, torch.get_num_threads()
        )
        return out


PYTORCH = Operators()
WIDENED = 4096  # rows of a weight that are converted at a time


@cache
def operators_for(backend: type[Attention]) -> Operators:
    """Return the operators that go with a backend of attention."""
    return CppOperators() if issubclass(backend, CppAttention) else PYTORCH


@cache
def multiplies_bfloat16() -> bool:
    """Return whether oneDNN multiplies in bfloat16 on this processor, as with AVX-512."""
    is_built = torch.backends.mkldnn.is_available()
    return is_built and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def matmul_of_many(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x times the transposed weight, of the same type, for many rows on a CPU.

    In float32, `F.linear` calls MKL, which is half as fast as oneDNN on AMD's processors. In
    bfloat16, on a processor that does not multiply in it, `F.linear` takes six times as long as
    float32 with all conversions.
    """
    if x.dtype == torch.bfloat16 and not multiplies_bfloat16():
        wide, outs = x.float(), []
        for start in range(0, len(weight), WIDENED):
            rows = slice(start, start + WIDENED)
            own = None if bias is None else bias[rows].float()
            outs.append(matmul_of_many(wide, weight[rows].float(), own).bfloat16())
        return torch.cat(outs, dim=-1)
    if x.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return F.linear(x, weight, bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a layer multiplies by a contiguous weight that is not quantized."""
    return (
        isinstance(layer, nn.Linear)
        and type(layer.weight) is nn.Parameter
        and layer.weight.is_contiguous()
    )


def at(x: Tensor | None) -> int | None:
    """Return the address of a tensor's data; None without a tensor."""
    return None if x is None else x.data_ptr()


def epsilon(norm: nn.RMSNorm, x: Tensor) -> float:
    """Return the epsilon of a norm."""
    return torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
