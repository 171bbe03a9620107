"""The choice of a backend: the one that is asked for, or the fastest that works here.

A backend's module is imported when it is considered: Triton may not be installed.
"""

from collections.abc import Iterable
from importlib import import_module

import torch

from magicdec.attention.base import Attention
from magicdec.errors import UserError
from magicdec.kernels.toolchain import triton_obstacle

BACKENDS = {
    "sdpa": "SdpaAttention",
    "cpp": "CppAttention",
    "triton": "TritonAttention",
    "flash": "FlashAttention",
    "flashinfer": "FlashInferAttention",
}
FASTEST_FIRST = {"cpu": ("cpp", "sdpa"), "cuda": ("flash", "triton", "sdpa")}


def backend(name: str) -> type[Attention]:
    """Return the class of that name. Raise ImportError if its module needs what is not installed."""
    return getattr(import_module(f"magicdec.attention.{name}"), BACKENDS[name])


def choose(name: str, device: torch.device, dtype: torch.dtype, head_dims: Iterable[int]) -> tuple[str, str]:
    """Return a backend's name and why it was chosen, in one sentence that also says what was passed over.

    Raise UserError if `name` is not auto and cannot be used here.
    """
    head_dims = tuple(head_dims)
    if name != "auto":
        reason = obstacle(name, device, dtype, head_dims)
        if reason:
            raise UserError(f"attention={name} {reason}; use attention=auto")
        return name, f"attention={name}: as asked"
    passed_over = []
    for candidate in FASTEST_FIRST[device.type]:
        reason = obstacle(candidate, device, dtype, head_dims)
        if reason is None:
            break
        passed_over.append(f"{candidate} {reason}")
    chosen = [f"attention=auto: {candidate} is the fastest at hand", *filter(None, [backend(candidate).found()])]
    return candidate, "; ".join([*chosen, *passed_over])


def usable(device: torch.device, dtype: torch.dtype, head_dims: Iterable[int]) -> list[str]:
    """Return the names of all backends that can be used here, to compare them."""
    head_dims = tuple(head_dims)
    return [name for name in BACKENDS if obstacle(name, device, dtype, head_dims) is None]


def obstacle(name: str, device: torch.device, dtype: torch.dtype, head_dims: Iterable[int]) -> str | None:
    """Return why a backend cannot be used here, as the words that follow its name in a sentence; None if it can."""
    try:
        return next(filter(None, (backend(name).obstacle(device, dtype, dim) for dim in head_dims)), None)
    except ImportError as error:
        return triton_obstacle() or f"cannot be imported ({error})"
