"""Attention by the FlashInfer package, for NVIDIA GPUs (Ye et al. 2025, arXiv 2501.01005): something to compare with.

B rows, S slots, T new tokens, H query heads over K KV heads, D head dim. Its kernel packs the query heads of a KV head
for any T, and balances the work by lengths that it reads on the host before each pass: no graph can capture that, and
`auto` never takes it.

It reads the cache in pages. Ours is the same memory seen differently: the entries of KV head k of row b start at slot
(b K + k) S, so that a page at slot b K S + s of the first head is followed by that of the next head S slots further on.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from magicdec.attention.kernel import KernelPlan, gpu_obstacle
from magicdec.attention.library import LibraryAttention

HEAD_DIMS = (64, 128, 256)
MAX_PAGE = 16  # slots; splits of the work consist of whole pages
WORKSPACE = 128 << 20  # bytes, as its documentation advises


def library() -> Any:
    """The library's class for caches in pages; raises ImportError where it is missing."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    return BatchPrefillWithPagedKVCacheWrapper


class FlashInferAttention(LibraryAttention):
    """FlashInfer over our cache."""

    name = "flashinfer"
    captured: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self._library = library()
        self._workspace: Tensor | None = None
        self._wrapper: Any = None
        self._planned: KernelPlan | None = None

    @classmethod
    def obstacle(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """See Attention.obstacle; raises ImportError where the library is missing."""
        if obstacle := gpu_obstacle(device, dtype, (torch.bfloat16, torch.float16)):
            return obstacle
        if head_dim not in HEAD_DIMS:
            return f"knows the head dims {', '.join(map(str, HEAD_DIMS))}, not {head_dim}"
        library()
        return None

    def read_all(self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: KernelPlan) -> Tensor:
        """See LibraryAttention.read_all."""
        if self._workspace is None:
            self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=q_BTHD.device)
        if q_BTHD.is_meta:  # memory is estimated: the workspace and the output are what it takes
            return torch.empty_like(q_BTHD)
        if plan is not self._planned:  # the first layer of a pass
            self._prepare(q_BTHD, k_BKSD, plan)
        out = self._wrapper.run(q_BTHD.flatten(0, 1), (paged(k_BKSD), paged(v_BKSD)))
        return out.view(q_BTHD.shape)

    def _prepare(self, q_BTHD: Tensor, k_BKSD: Tensor, plan: KernelPlan) -> None:
        """Tell the library every row's pages; reads the lengths on the host."""
        (B, T, H, D), (K, S) = q_BTHD.shape, k_BKSD.shape[1:3]
        size, seqlens_B = page_size(S), plan.seqlens_B.cpu()
        count_B = (seqlens_B + size - 1) // size
        ends_B = count_B.cumsum(0)
        first_B = torch.arange(B) * (K * S // size)
        pages = (first_B - ends_B + count_B).repeat_interleave(count_B) + torch.arange(int(ends_B[-1]))
        self._wrapper = self._wrapper or self._library(self._workspace, "HND")
        self._wrapper.plan(
            torch.arange(B + 1, dtype=torch.int32) * T,
            torch.cat((torch.zeros(1), ends_B)).int(),
            pages.int(),
            (seqlens_B - (count_B - 1) * size).int(),
            H,
            K,
            D,
            size,
            causal=True,
            window_left=-1 if plan.window is None else plan.window - 1,
            q_data_type=q_BTHD.dtype,
        )
        self._planned = plan


def page_size(capacity: int) -> int:
    """Slots of a page: rows consist of whole ones."""
    return math.gcd(capacity, MAX_PAGE)


def paged(x_BKSD: Tensor) -> Tensor:
    """The same entries as (page, K, slot of the page, D): as many pages as there is room for."""
    assert x_BKSD.is_contiguous()
    B, K, S, D = x_BKSD.shape
    size = page_size(S)
    return x_BKSD.as_strided((((B - 1) * K + 1) * S // size, K, size, D), (size * D, S * D, D, 1))
