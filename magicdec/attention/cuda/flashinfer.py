"""Attention by the FlashInfer package, for NVIDIA GPUs (Ye et al. 2025, arXiv 2501.01005):
something to compare with.

B rows, S slots, T new tokens, H query heads over K KV heads, D head dim. Its kernel packs the query
heads of a KV head for any T, and balances the work by lengths that it reads on the host before each
pass: no graph can capture that, and `auto` never takes it.

It reads the cache in pages. Ours is the same memory seen differently: the entries of KV head k of
row b start at slot (b K + k) S. A page starts at any slot of the first head, b K S + s, and those
of the other heads S slots further on each: pages overlap, and their size depends on no capacity.
"""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from magicdec.attention.cuda.triton_fallback import FEW_TOKENS, LibraryAttention
from magicdec.attention.sdpa_fallback import KernelPlan, dtype_obstacle
from magicdec.config.choices import Backend
from magicdec.config.registry import BACKENDS

HEAD_DIMS = (64, 128, 256)
PAGE = 16  # slots; splits of the work consist of whole pages
WORKSPACE = 128 << 20  # bytes, as its documentation advises


def library() -> Any:
    """Return the library's class for caches in pages; raises ImportError where it is missing."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    return BatchPrefillWithPagedKVCacheWrapper


Key = tuple[str, int | None]


@BACKENDS.register(Backend("flashinfer", "cuda", captured=False))
class FlashInferAttention(LibraryAttention):
    """FlashInfer over our cache."""

    def __init__(self) -> None:
        super().__init__()
        self._library = library()
        self._workspace: Tensor | None = None
        # By the library's own backend and by window: layers of both kinds take turns in a pass.
        self._wrappers: dict[Key, Any] = {}
        self._planned: dict[Key, KernelPlan] = {}

    @classmethod
    @override
    def obstacle(cls, dtype: torch.dtype, head_dim: int) -> str | None:
        if obstacle := dtype_obstacle(dtype, (torch.bfloat16, torch.float16)):
            return obstacle
        if head_dim not in HEAD_DIMS:
            return f"supports the head dims {', '.join(map(str, HEAD_DIMS))}, not {head_dim}"
        try:
            library()
        except ImportError as error:
            return f"is not installed: {error}; install it: pip install -e '.[flashinfer]'"
        return None

    @override
    def read_all(self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: KernelPlan) -> Tensor:
        if self._workspace is None:
            self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=q_BTHD.device)
        if q_BTHD.is_meta:  # a memory estimate: only the workspace and the output take memory
            return torch.empty_like(q_BTHD)
        if self._planned.get(_key(plan)) is not plan:  # the first layer of a pass
            self._prepare(q_BTHD, k_BKSD, plan)
        out = self._wrapper(plan).run(q_BTHD.flatten(0, 1), (paged(k_BKSD), paged(v_BKSD)))
        return out.view(q_BTHD.shape)

    def _prepare(self, q_BTHD: Tensor, k_BKSD: Tensor, plan: KernelPlan) -> None:
        """Pass every row's pages to the library. Reads the lengths on the host."""
        (B, T, H, D), (K, S) = q_BTHD.shape, k_BKSD.shape[1:3]
        seqlens_B = plan.seqlens_B.cpu()
        count_B = (seqlens_B + PAGE - 1) // PAGE
        ends_B = count_B.cumsum(0)
        of_row = torch.arange(int(ends_B[-1])) - (ends_B - count_B).repeat_interleave(count_B)
        pages = (torch.arange(B) * K * S).repeat_interleave(count_B) + of_row * PAGE
        self._wrapper(plan).plan(
            torch.arange(B + 1, dtype=torch.int32) * T,
            torch.cat((torch.zeros(1), ends_B)).int(),
            pages.int(),
            (seqlens_B - (count_B - 1) * PAGE).int(),
            H,
            K,
            D,
            PAGE,
            causal=True,
            window_left=-1 if plan.window is None else plan.window - 1,
            q_data_type=q_BTHD.dtype,
        )
        self._planned[_key(plan)] = plan

    def _wrapper(self, plan: KernelPlan) -> Any:
        key = _key(plan)
        if key not in self._wrappers:
            self._wrappers[key] = self._library(self._workspace, "HND", backend=key[0])
        return self._wrappers[key]


def _key(plan: KernelPlan) -> Key:
    # FlashAttention-3, which the library would choose for itself on Hopper, neither packs the query
    # heads of a KV head nor divides a row's entries: of use in a prefill alone.
    return "fa2" if plan.shape.num_new <= FEW_TOKENS else "auto", plan.window


def paged(x_BKSD: Tensor) -> Tensor:
    """Return the same entries as (page, K, slot of the page, D): a page for each slot that one may
    start at.
    """
    assert x_BKSD.is_contiguous()
    B, K, S, D = x_BKSD.shape
    return x_BKSD.as_strided(
        (max(1, ((B - 1) * K + 1) * S - PAGE + 1), K, min(PAGE, S), D), (D, S * D, D, 1)
    )
