"""What backends share that have a kernel of their own.

What it is not for, attention whose scores are asked for and more new tokens than it takes, goes the way of sdpa. Shapes
as in base.py.
"""

import sys
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from magicdec.attention.base import Attention, Shape
from magicdec.attention.sdpa import SdpaAttention, SdpaPlan


@dataclass(frozen=True)
class KernelPlan:
    """Lengths are all that a kernel needs; `sdpa` is made only where a pass goes that way."""

    seqlens_B: Tensor
    shape: Shape
    window: int | None

    @cached_property
    def sdpa(self) -> SdpaPlan:
        """The same pass as sdpa plans it."""
        return SdpaAttention().plan(self.seqlens_B, self.shape, self.window)

    @property
    def reach(self) -> int:
        """How many tokens one sees, itself included."""
        return self.shape.capacity if self.window is None else self.window


class KernelAttention(Attention[KernelPlan]):
    """Up to `max_new_tokens` go to the kernel, `decode`."""

    max_new_tokens: ClassVar[int] = sys.maxsize
    _sdpa = SdpaAttention()

    @abstractmethod
    def decode(
        self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: KernelPlan, indices_BKN: Tensor | None
    ) -> Tensor:
        """What `attend` is, by the kernel."""

    def plan(self, seqlens_B: Tensor, shape: Shape, window: int | None) -> KernelPlan:
        """See Attention.plan."""
        return KernelPlan(seqlens_B.contiguous(), shape, window)

    def attend(
        self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: KernelPlan, indices_BKN: Tensor | None = None
    ) -> Tensor:
        """See Attention.attend."""
        if plan.shape.num_new > self.max_new_tokens:
            return self._sdpa.attend(q_BTHD, k_BKSD, v_BKSD, plan.sdpa, indices_BKN)
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BTHD, k_BKSD, v_BKSD))
        return self.decode(q, k, v, plan, indices_BKN if indices_BKN is None else indices_BKN.contiguous())

    def attend_scored(self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: KernelPlan) -> tuple[Tensor, Tensor]:
        """See Attention.attend_scored."""
        return self._sdpa.attend_scored(q_BTHD, k_BKSD, v_BKSD, plan.sdpa)
