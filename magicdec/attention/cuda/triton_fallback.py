"""Attention by a library's kernel for GPUs.

Shapes as in base.py.
"""

from abc import abstractmethod

import torch
from torch import Tensor
from typing_extensions import override

from magicdec.attention.base import PageBounds
from magicdec.attention.codes import Coded
from magicdec.attention.cuda.triton import HEAD_DIMS, TritonAttention
from magicdec.attention.sdpa_fallback import KernelAttention, KernelPlan, dtype_obstacle

MAX_FLASH_HEAD_DIM = 256
FEW_TOKENS = 32  # query tokens of a verification; more are a prefill


class LibraryAttention(KernelAttention):
    """A library's kernel for GPUs, `read_all`. It takes neither selected slots nor positions and
    returns no scores: Triton's kernel does all that, or sdpa where Triton is missing.
    """

    @property
    def _triton(self) -> TritonAttention:
        return TritonAttention().weighted(self.weighting)

    @override
    def scored_tokens(self, scores_per_token: int, dtype: torch.dtype, head_dim: int) -> int:
        other = self._triton_for(torch.device("cuda"), dtype, head_dim) or self._sdpa
        return other.scored_tokens(scores_per_token, dtype, head_dim)

    @abstractmethod
    def read_all(self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: KernelPlan) -> Tensor:
        """Attend over all slots, by the library."""

    def takes(self, q_BTHD: Tensor, k_BKSD: Tensor) -> bool:
        """Return whether the library reads K and V no more often than Triton's kernel would."""
        return True

    @override
    def decode(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: KernelPlan,
        indices_BKN: Tensor | None,
    ) -> Tensor:
        other = self._triton_for(q_BTHD.device, q_BTHD.dtype, q_BTHD.shape[-1])
        reads_all = indices_BKN is None and plan.positions_BKS is None
        if reads_all and (other is None or self.takes(q_BTHD, k_BKSD)):
            return self.read_all(q_BTHD, k_BKSD, v_BKSD, plan)
        if other:
            return other.decode(q_BTHD, k_BKSD, v_BKSD, plan, indices_BKN)
        return self._sdpa.attend(q_BTHD, k_BKSD, v_BKSD, plan.sdpa, indices_BKN)

    @override
    def attend_coded(
        self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: KernelPlan, coded: Coded
    ) -> Tensor:
        if other := self._triton_for(q_BTHD.device, q_BTHD.dtype, q_BTHD.shape[-1]):
            return other.attend_coded(q_BTHD, k_BKSD, v_BKSD, plan, coded)
        return super().attend_coded(q_BTHD, k_BKSD, v_BKSD, plan, coded)

    @override
    def decode_scored(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: KernelPlan,
        counted_BT: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        if other := self._triton_for(q_BTHD.device, q_BTHD.dtype, q_BTHD.shape[-1]):
            return other.decode_scored(q_BTHD, k_BKSD, v_BKSD, plan, counted_BT)
        return super().decode_scored(q_BTHD, k_BKSD, v_BKSD, plan, counted_BT)

    @override
    def attend_observed(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: KernelPlan,
        scores_BKS: Tensor,
    ) -> Tensor:
        if other := self._triton_for(q_BTHD.device, q_BTHD.dtype, q_BTHD.shape[-1]):
            return other.attend_observed(q_BTHD, k_BKSD, v_BKSD, plan, scores_BKS)
        return super().attend_observed(q_BTHD, k_BKSD, v_BKSD, plan, scores_BKS)

    @override
    def score_keys(
        self, q_BTHD: Tensor, k_BKSD: Tensor, plan: KernelPlan, counted_BT: Tensor | None = None
    ) -> Tensor:
        if other := self._triton_for(q_BTHD.device, q_BTHD.dtype, q_BTHD.shape[-1]):
            return other.score_keys(q_BTHD, k_BKSD, plan, counted_BT)
        return super().score_keys(q_BTHD, k_BKSD, plan, counted_BT)

    @override
    def select_largest(self, scores: Tensor, first: Tensor, last: Tensor, count: int) -> Tensor:
        if other := self._triton_for(scores.device, scores.dtype, HEAD_DIMS[0]):
            return other.select_largest(scores, first, last, count)
        return super().select_largest(scores, first, last, count)

    @override
    def select_slots(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: KernelPlan,
        length_B: Tensor,
        count: int,
    ) -> Tensor:
        if other := self._triton_for(q_BTHD.device, q_BTHD.dtype, q_BTHD.shape[-1]):
            return other.select_slots(q_BTHD, k_BKSD, v_BKSD, plan, length_B, count)
        return super().select_slots(q_BTHD, k_BKSD, v_BKSD, plan, length_B, count)

    @override
    def select_pages(
        self, q_BTHD: Tensor, bounds: PageBounds, first_B: Tensor, length_B: Tensor, count: int
    ) -> Tensor:
        if other := self._triton_for(q_BTHD.device, q_BTHD.dtype, q_BTHD.shape[-1]):
            return other.select_pages(q_BTHD, bounds, first_B, length_B, count)
        return super().select_pages(q_BTHD, bounds, first_B, length_B, count)

    def _triton_for(
        self, device: torch.device, dtype: torch.dtype, head_dim: int
    ) -> KernelAttention | None:
        """Return Triton's kernel if it can be used. On the meta device, the memory of a GPU is
        estimated.
        """
        return (
            None if device.type == "cpu" or self._triton.obstacle(dtype, head_dim) else self._triton
        )


def flash_obstacle(dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why the kernels of FlashAttention cannot take such tensors, whoever ships them, or
    None.
    """
    if obstacle := dtype_obstacle(dtype, (torch.bfloat16, torch.float16)):
        return obstacle
    if head_dim % 8 or head_dim > MAX_FLASH_HEAD_DIM:
        return (
            f"needs a head dim that is a multiple of 8 and at most {MAX_FLASH_HEAD_DIM}, not"
            f" {head_dim}"
        )
    return None
