"""Attention on CPUs in C++: of a few new tokens over a long cache (kernels/attention.cpp), and of
many (prefill.cpp). Selecting what a draft step reads (selection.cpp).

The J x T query rows of a few new tokens that share a KV head stay in registers and the L1 cache
while K and V stream past once, in splits that the threads share; the splits are merged by their
log-sum-exp.
"""

import ctypes
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from magicdec.attention.codes import TILE, Coded
from magicdec.attention.sdpa_fallback import (
    KernelAttention,
    KernelPlan,
    dtype_obstacle,
    with_dense_entries,
)
from magicdec.config.choices import Backend
from magicdec.config.registry import BACKENDS
from magicdec.kernels import library

STEP = 8  # head dims are multiples of it, as in attention.cpp
# Bytes of an entry's codes, and numbers that share a scale, are multiples of it, as in codes.h.
CODED_STEP = 16
TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class CodesCall(ctypes.Structure):
    """`struct Codes` of kernels/call.h."""

    _fields_ = [
        *library.pointers("k v k_scales v_scales first_exact"),
        *library.numbers("slots bits token_group feature_group"),
    ]


class Call(ctypes.Structure):
    """`struct Call` of kernels/call.h."""

    _fields_ = [
        *library.pointers("q k v out seqlens indices counted positions scores codes cache_rows"),
        *library.numbers("rows new_tokens kv_heads group dim slots num_indices window threads"),
        *library.numbers("q_row q_token q_head k_row k_head k_slot v_row v_head v_slot"),
        *library.pointers("sinks"),
        ("softcap", ctypes.c_double),
    ]


class Pages(ctypes.Structure):
    """`struct Pages` of kernels/selection.cpp."""

    _fields_ = [
        *library.pointers("q least largest shares first last sinks"),
        *library.numbers("rows new_tokens kv_heads group dim pages threads q_row q_token q_head"),
        ("softcap", ctypes.c_double),
    ]


def reads(coded: Coded) -> bool:
    """Return whether the kernel reads these codes as they are."""
    sizes = (coded.v.codes_LBKNC.shape[-1] // TILE, coded.k.group_size, coded.v.group_size)
    return all(size % CODED_STEP == 0 for size in sizes)


def codes_call(coded: Coded) -> CodesCall:
    """Return what the kernel needs of a layer's codes."""
    k, v = coded.k, coded.v
    layer = coded.layer
    tensors = (
        k.codes_LBKNC[layer],
        v.codes_LBKNC[layer],
        k.scales[layer],
        v.scales[layer],
        coded.first_exact_B,
    )
    pointers = (x.data_ptr() for x in tensors)
    return CodesCall(*pointers, k.num_slots, k.bits, k.group_size, v.group_size)


@BACKENDS.register(Backend("cpp", "cpu", priority=1))
class CppAttention(KernelAttention):
    """The fastest on a CPU. The first run builds it."""

    takes_weighting = True
    # Beyond that, arithmetic is the limit, and prefill.cpp is faster.
    max_new_tokens: ClassVar[int] = 32

    def __init__(self) -> None:
        """Build the kernels if needed; raise UserError where that fails."""
        self._library = library.load()
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._select_largest = self._library["select_largest"]
        self._select_largest.argtypes = [*[pointer] * 4, *[size] * 4]

    @classmethod
    @override
    def obstacle(cls, dtype: torch.dtype, head_dim: int) -> str | None:
        if obstacle := dtype_obstacle(dtype, TYPES):
            return obstacle
        if head_dim % STEP:
            return f"needs a head dim that is a multiple of {STEP}, not {head_dim}"
        return library.obstacle()

    @override
    def decode(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: KernelPlan,
        indices_BKN: Tensor | None,
    ) -> Tensor:
        return self._call("attend", q_BTHD, k_BKSD, v_BKSD, plan, indices=indices_BKN)

    @override
    def prefill(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: KernelPlan,
        indices_BKN: Tensor | None,
    ) -> Tensor:
        """Leave selected slots, and slots in no order, to sdpa."""
        if indices_BKN is not None or plan.positions_BKS is not None:
            return super().prefill(q_BTHD, k_BKSD, v_BKSD, plan, indices_BKN)
        q, k, v = map(with_dense_entries, (q_BTHD, k_BKSD, v_BKSD))
        return self._call("prefill", q, k, v, plan)

    @override
    def attend_coded(
        self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: KernelPlan, coded: Coded
    ) -> Tensor:
        if plan.shape.num_new > self.max_new_tokens or not reads(coded):
            return super().attend_coded(q_BTHD, k_BKSD, v_BKSD, plan, coded)
        q, k, v = map(with_dense_entries, (q_BTHD, k_BKSD, v_BKSD))
        return self._call("attend", q, k, v, plan, coded=coded)

    @override
    def decode_scored(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: KernelPlan,
        counted_BT: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Write the weights, too: R numbers a slot, next to its 2 x D. Sum them once all splits of
        a head are done.
        """
        scores_BKS = torch.empty(k_BKSD.shape[:3], dtype=torch.float32)
        out_BTHD = self._call(
            "attend", q_BTHD, k_BKSD, v_BKSD, plan, counted=counted_BT, scores=scores_BKS
        )
        return out_BTHD, scores_BKS

    @override
    def page_shares(
        self,
        q_BTHD: Tensor,
        least_BKPD: Tensor,
        largest_BKPD: Tensor,
        first_B: Tensor,
        last_B: Tensor,
    ) -> Tensor:
        (B, T, H, D), (K, P) = q_BTHD.shape, least_BKPD.shape[1:3]
        shares_BKP = torch.empty(B, K, P, dtype=torch.float32)
        q = with_dense_entries(q_BTHD)
        tensors = [q, least_BKPD.contiguous(), largest_BKPD.contiguous(), shares_BKP]
        tensors += [x.long().contiguous() for x in (first_B, last_B)]
        sinks_H = self._sinks_H
        pointers = [None if x is None else x.data_ptr() for x in (*tensors, sinks_H)]
        sizes = (B, T, K, H // K, D, P, torch.get_num_threads(), *q.stride()[:3])
        call = Pages(*pointers, *sizes, self.weighting.softcap or 0.0)
        self._library[f"page_shares_{TYPES[q.dtype]}"](ctypes.byref(call))
        return shares_BKP

    @override
    def select_largest(self, scores: Tensor, first: Tensor, last: Tensor, count: int) -> Tensor:
        *leading, S = scores.shape
        slots = torch.empty(*leading, min(count, S), dtype=torch.int64)
        scores, first, last = (
            scores.contiguous(),
            *(x.long().expand(leading).contiguous() for x in (first, last)),
        )
        pointers = [x.data_ptr() for x in (scores, first, last, slots)]
        self._select_largest(*pointers, first.numel(), S, slots.shape[-1], torch.get_num_threads())
        return slots

    @property
    def _sinks_H(self) -> Tensor | None:
        sinks_H = self.weighting.sinks_H
        return None if sinks_H is None else sinks_H.float().contiguous()

    def _call(
        self,
        function: str,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: KernelPlan,
        indices: Tensor | None = None,
        counted: Tensor | None = None,
        scores: Tensor | None = None,
        coded: Coded | None = None,
    ) -> Tensor:
        (B, T, H, D), (K, S) = q_BTHD.shape, k_BKSD.shape[1:3]
        assert k_BKSD.dtype == v_BKSD.dtype == q_BTHD.dtype  # the kernel has their addresses only
        out_BTHD = torch.empty((B, T, H, D), dtype=q_BTHD.dtype)
        tensors = (
            q_BTHD,
            k_BKSD,
            v_BKSD,
            out_BTHD,
            plan.seqlens_B,
            indices,
            counted,
            plan.positions_BKS,
            scores,
        )
        codes = None if coded is None else codes_call(coded)
        pointers = [None if x is None else x.data_ptr() for x in tensors]
        sinks_H = self._sinks_H
        pointers += [None if codes is None else ctypes.addressof(codes), None]
        at_sinks = None if sinks_H is None else sinks_H.data_ptr()
        num_indices = 0 if indices is None else indices.shape[-1]
        sizes = (B, T, K, H // K, D, S, num_indices, plan.reach, torch.get_num_threads())
        strides = [stride for x in (q_BTHD, k_BKSD, v_BKSD) for stride in x.stride()[:3]]
        self._library[f"{function}_{TYPES[q_BTHD.dtype]}"](
            ctypes.byref(Call(*pointers, *sizes, *strides, at_sinks, self.weighting.softcap or 0.0))
        )
        return out_BTHD
