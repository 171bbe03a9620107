"""What backends share that have a kernel of their own.

More new tokens than it takes go the way of sdpa, and so does attention whose scores are asked for unless it returns
them. Shapes as in base.py.
"""

import sys
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from magicdec.attention.base import Attention, Shape
from magicdec.attention.sdpa import SdpaAttention, SdpaPlan


@dataclass(frozen=True)
class KernelPlan:
    """Lengths are all that a kernel needs; `sdpa` is made only where a pass goes that way."""

    seqlens_B: Tensor
    shape: Shape
    window: int | None
    positions_BKS: Tensor | None = None

    @cached_property
    def sdpa(self) -> SdpaPlan:
        """The same pass as sdpa plans it."""
        return SdpaAttention().plan(self.seqlens_B, self.shape, self.window, self.positions_BKS)

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

    def decode_scored(
        self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: KernelPlan, counted_BT: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What `attend_scored` is, by a kernel that returns scores."""
        return self._sdpa.attend_scored(q_BTHD, k_BKSD, v_BKSD, plan.sdpa, counted_BT)

    def prefill(
        self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: KernelPlan, indices_BKN: Tensor | None
    ) -> Tensor:
        """Attend as `attend` does, for more new tokens than the kernel takes."""
        return self._sdpa.attend(q_BTHD, k_BKSD, v_BKSD, plan.sdpa, indices_BKN)

    def plan(
        self, seqlens_B: Tensor, shape: Shape, window: int | None, positions_BKS: Tensor | None = None
    ) -> KernelPlan:
        """See Attention.plan."""
        positions_BKS = positions_BKS if positions_BKS is None else positions_BKS.contiguous()
        return KernelPlan(seqlens_B.contiguous(), shape, window, positions_BKS)

    def attend(
        self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: KernelPlan, indices_BKN: Tensor | None = None
    ) -> Tensor:
        """See Attention.attend."""
        if plan.shape.num_new > self.max_new_tokens:
            return self.prefill(q_BTHD, k_BKSD, v_BKSD, plan, indices_BKN)
        q, k, v = map(with_dense_entries, (q_BTHD, k_BKSD, v_BKSD))
        return self.decode(q, k, v, plan, indices_BKN if indices_BKN is None else indices_BKN.contiguous())

    def attend_scored(
        self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: KernelPlan, counted_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See Attention.attend_scored."""
        if plan.shape.num_new > self.max_new_tokens:
            return self._sdpa.attend_scored(q_BTHD, k_BKSD, v_BKSD, plan.sdpa, counted_BT)
        q, k, v = map(with_dense_entries, (q_BTHD, k_BKSD, v_BKSD))
        return self.decode_scored(q, k, v, plan, counted_BT if counted_BT is None else counted_BT.contiguous())


def gpu_obstacle(device: torch.device, dtype: torch.dtype, dtypes: Sequence[torch.dtype]) -> str | None:
    """Of a kernel for NVIDIA GPUs that computes in `dtypes`: see Attention.obstacle."""
    if device.type != "cuda":
        return f"is for NVIDIA GPUs, not for {device.type}"
    if dtype not in dtypes:
        *names, name = (str(known).removeprefix("torch.") for known in (*dtypes, dtype))
        return f"computes in {', '.join(names)}, not in {name}"
    return None


def with_dense_entries(x: Tensor) -> Tensor:
    """The same tensor with its last dimension in one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()
