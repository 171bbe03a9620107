"""Sums over the GPUs of a machine through memory that all of them can reach: PyTorch's symmetric
memory.

NCCL copies a rank's part to the others. Here a matmul writes its part where the others can read it,
and one kernel sums in place: in the switch where it can (multimem), else each rank sums a part of
the whole (two-shot). Both kernels can be captured in a graph. Both end when all ranks have read, so
that one buffer serves all sums.
"""

from functools import cache
from importlib import import_module
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from magicdec.errors import UserError, to_stderr

# Of a sum: those of decoding. With the larger ones of a prefill NCCL is as fast.
MAX_BYTES = 16 << 20
DTYPES = (torch.bfloat16, torch.float32)  # that PyTorch's kernels sum
KEY = "hardware.all_reduce"


class SymmetricSums:
    """A buffer on each rank of a group, and the kernel that sums over all of them."""

    def __init__(self, ranks: dist.ProcessGroup, device: torch.device):
        """Allocate and exchange addresses. Every rank of the group must call it."""
        memory = _memory()
        self.buffer = memory.empty(MAX_BYTES, dtype=torch.uint8, device=device)
        handle = memory.rendezvous(self.buffer, ranks)
        self._group = ranks.group_name
        operators = torch.ops.symm_mem
        self._sum = (
            operators.multimem_all_reduce_
            if handle.multicast_ptr
            else operators.two_shot_all_reduce_
        )

    def checked(self, size: int) -> "SymmetricSums":
        """Return itself after a sum over `size` ranks. Raise RuntimeError if it is wrong."""
        if bool(
            (
                self.sum(torch.ones(64, dtype=torch.bfloat16, device=self.buffer.device)) != size
            ).any()
        ):
            raise RuntimeError("its sums are wrong")
        return self

    def takes(self, x: Tensor, columns: int) -> bool:
        """Return whether the buffer takes a sum with the rows of `x` and this number of columns."""
        size = prod(x.shape[:-1]) * columns * x.element_size()
        return x.dtype in DTYPES and not x.is_meta and size <= MAX_BYTES and size % 16 == 0

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks; it is overwritten by the next one."""
        return self._summed(self._place(x.shape, x.dtype).copy_(x))

    def linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """Return the sum over all ranks of a linear layer's output; it is overwritten by the next
        one.
        """
        out = self._place((*x.shape[:-1], layer.weight.shape[0]), x.dtype)
        rows = x.flatten(0, -2)
        weight_t = layer.weight.t()
        if layer.bias is None:
            torch.mm(rows, weight_t, out=out.flatten(0, -2))
        else:
            torch.addmm(layer.bias, rows, weight_t, out=out.flatten(0, -2))
        return self._summed(out)

    def _place(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.buffer[: prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def _summed(self, x: Tensor) -> Tensor:
        self._sum(x.view(-1), "sum", self._group)
        return x


@cache
def sums(choice: str, ranks: dist.ProcessGroup, device: torch.device) -> SymmetricSums | None:
    """Return the sums of these ranks; None where NCCL is chosen, or where `choice` is auto and they
    cannot work.

    Every rank must call it. Raise UserError if symmetric memory is asked for and cannot work.
    """
    if choice == "nccl" or (choice == "auto" and device.type != "cuda"):
        return None
    problem = _obstacle(ranks, device)
    made = cast("Any", None)
    for attempt in (lambda _: SymmetricSums(ranks, device), lambda new: new.checked(ranks.size())):
        if not _all_agree(problem is None, ranks, device):
            problem = problem or "does not work on another rank"
            continue
        try:
            made = attempt(made)
        except (
            Exception
        ) as error:  # of a private module, on all kinds of drivers and links: NCCL works without it
            reason = str(error).strip().partition("\n")[0]
            problem = f"cannot be set up: {reason or type(error).__name__}"
    if _all_agree(problem is None, ranks, device):
        return made
    problem = problem or "does not work on another rank"
    if choice != "auto":
        raise UserError(f"{KEY}={choice}: symmetric memory {problem}; set it to nccl")
    if dist.get_rank() == 0:
        to_stderr(f"note: {KEY}=auto: NCCL sums over the ranks, because symmetric memory {problem}")
    return None


def _obstacle(ranks: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return why a group cannot sum in symmetric memory; None if no reason is known."""
    if device.type != "cuda":
        return f"is for NVIDIA GPUs, not for {device.type}"
    if _memory() is None:
        return f"is missing from PyTorch {torch.__version__}"
    current = torch.cuda.current_device()
    # A machine's ranks are its GPUs.
    others = [other for other in dist.get_process_group_ranks(ranks) if other != current]
    if not all(torch.cuda.can_device_access_peer(current, other) for other in others):
        return f"needs GPUs that reach each other's memory, and GPU {current} does not reach all"
    return None


def _all_agree(mine: bool, ranks: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether `mine` is true on every rank."""
    flag = torch.tensor(float(mine), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=ranks)
    return bool(flag)


def _memory() -> Any:
    """Return PyTorch's module, which is private; None where it is missing, or has other names."""
    try:
        module = import_module("torch.distributed._symmetric_memory")
        _ = module.empty, module.rendezvous
        _ = torch.ops.symm_mem.multimem_all_reduce_, torch.ops.symm_mem.two_shot_all_reduce_
    except (ImportError, AttributeError):
        return None
    return module
