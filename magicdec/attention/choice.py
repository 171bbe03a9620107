"""The choice of a backend: the one that is asked for, or the fastest that works here.

A backend's module is imported when it is considered: the library that it needs may not be installed.
"""

from collections.abc import Iterable
from importlib import import_module

import torch

from magicdec.attention.base import Attention
from magicdec.errors import UserError

BACKENDS = {
    "sdpa": "SdpaAttention",
    "cpp": "CppAttention",
    "triton": "TritonAttention",
    "flash": "FlashAttention",
    "flashinfer": "FlashInferAttention",
}
FASTEST_FIRST = {"cpu": ("cpp", "sdpa"), "cuda": ("flash", "triton", "sdpa")}

INSTALL = {
    "triton": "pip install -e '.[triton]'",
    "flash": "pip install --no-build-isolation -e '.[flash]'",
    "flashinfer": "pip install -e '.[flashinfer]'",
}


def backend(name: str) -> type[Attention]:
    """Return the class of that name. Raise ImportError if the library that it needs is not installed."""
    return getattr(import_module(f"magicdec.attention.{name}"), BACKENDS[name])


def choose(name: str, device: torch.device, dtype: torch.dtype, head_dims: Iterable[int]) -> tuple[str, str]:
    """Return a backend's name and why it was chosen, in one sentence that also says what was passed over.

    Raise UserError if `name` is not auto and cannot be used here.
    """
    head_dims = tuple(head_dims)
    if name != "auto":
        obstacle = _obstacle(name, device, dtype, head_dims)
        if obstacle:
            raise UserError(f"attention={name} {obstacle}; use attention=auto")
        return name, f"attention={name}: as asked"
    passed_over = []
    for candidate in FASTEST_FIRST[device.type]:
        reason = _obstacle(candidate, device, dtype, head_dims)
        if reason is None:
            break
        passed_over.append(f"{candidate} {reason}")
    return candidate, "; ".join([f"attention=auto: {candidate} is the fastest at hand", *passed_over])


def usable(device: torch.device, dtype: torch.dtype, head_dims: Iterable[int]) -> list[str]:
    """Return the names of all backends that can be used here, to compare them."""
    head_dims = tuple(head_dims)
    return [name for name in BACKENDS if _obstacle(name, device, dtype, head_dims) is None]


def _obstacle(name: str, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, ...]) -> str | None:
    try:
        return next(filter(None, (backend(name).obstacle(device, dtype, dim) for dim in head_dims)), None)
    except ImportError as error:
        return f"cannot be imported ({error}); install it: {INSTALL[name]}"
