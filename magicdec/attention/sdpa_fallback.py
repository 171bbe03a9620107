"""The common part of backends with a kernel of their own.

sdpa takes passes with more new tokens than the kernel takes, and passes that need scores where the
kernel returns none. Shapes as in base.py.
"""

import sys
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from magicdec.attention.base import Attention, Shape
from magicdec.attention.sdpa import SdpaAttention, SdpaPlan


@dataclass(frozen=True)
class KernelPlan:
    """The lengths, which are all that a kernel needs. `sdpa` is planned only if a pass needs it."""

    seqlens_B: Tensor
    shape: Shape
    window: int | None
    positions_BKS: Tensor | None = None

    @cached_property
    def sdpa(self) -> SdpaPlan:
        """The same pass, planned by sdpa."""
        return SdpaAttention().plan(self.seqlens_B, self.shape, self.window, self.positions_BKS)

    @property
    def reach(self) -> int:
        """The number of tokens that one sees, itself included."""
        return self.shape.capacity if self.window is None else self.window


class KernelAttention(Attention[KernelPlan]):
    """A backend whose kernel, `decode`, takes up to `max_new_tokens`."""

    max_new_tokens: ClassVar[int] = sys.maxsize

    @property
    def _sdpa(self) -> SdpaAttention:
        return SdpaAttention().weighted(self.weighting)

    @abstractmethod
    def decode(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: KernelPlan,
        indices_BKN: Tensor | None,
    ) -> Tensor:
        """Attend as `attend` does, by the kernel."""

    def decode_scored(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: KernelPlan,
        counted_BT: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Attend as `attend_scored` does, by a kernel that returns scores."""
        return self._sdpa.attend_scored(q_BTHD, k_BKSD, v_BKSD, plan.sdpa, counted_BT)

    def prefill(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: KernelPlan,
        indices_BKN: Tensor | None,
    ) -> Tensor:
        """Attend as `attend` does, for more new tokens than the kernel takes."""
        return self._sdpa.attend(q_BTHD, k_BKSD, v_BKSD, plan.sdpa, indices_BKN)

    @override
    def plan(
        self,
        seqlens_B: Tensor,
        shape: Shape,
        window: int | None,
        positions_BKS: Tensor | None = None,
    ) -> KernelPlan:
        positions_BKS = positions_BKS if positions_BKS is None else positions_BKS.contiguous()
        return KernelPlan(seqlens_B.contiguous(), shape, window, positions_BKS)

    @override
    def attend(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: KernelPlan,
        indices_BKN: Tensor | None = None,
    ) -> Tensor:
        if plan.shape.num_new > self.max_new_tokens:
            return self.prefill(q_BTHD, k_BKSD, v_BKSD, plan, indices_BKN)
        q, k, v = map(with_dense_entries, (q_BTHD, k_BKSD, v_BKSD))
        return self.decode(
            q, k, v, plan, indices_BKN if indices_BKN is None else indices_BKN.contiguous()
        )

    @override
    def attend_scored(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: KernelPlan,
        counted_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if plan.shape.num_new > self.max_new_tokens:
            return self._sdpa.attend_scored(q_BTHD, k_BKSD, v_BKSD, plan.sdpa, counted_BT)
        q, k, v = map(with_dense_entries, (q_BTHD, k_BKSD, v_BKSD))
        return self.decode_scored(
            q, k, v, plan, counted_BT if counted_BT is None else counted_BT.contiguous()
        )


def dtype_obstacle(dtype: torch.dtype, dtypes: Iterable[torch.dtype]) -> str | None:
    """Return Attention.obstacle for a kernel that computes in `dtypes`."""
    if dtype not in dtypes:
        *names, name = [str(each).removeprefix("torch.") for each in (*dtypes, dtype)]
        return f"computes in {', '.join(names)}, not in {name}"
    return None


def with_dense_entries(x: Tensor) -> Tensor:
    """Return the same tensor with a contiguous last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()
