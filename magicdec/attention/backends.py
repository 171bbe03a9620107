"""Choose a backend: the requested one, or the best that works here."""

from collections.abc import Collection, Iterable

import torch

from magicdec.config.registry import BACKENDS
from magicdec.errors import UserError

DEVICES = {"cpu": "CPUs", "cuda": "NVIDIA GPUs"}


def choose(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dims: Iterable[int],
    needs: Collection[str] = (),
) -> tuple[str, str]:
    """Return a backend's name and the reason for it, which also says why better ones cannot be
    used. `needs` are what the models' attention has beyond the softmax, for messages.

    Raise UserError if `name` is not auto and cannot be used here.
    """
    head_dims = tuple(head_dims)
    if name != "auto":
        reason = obstacle(name, device, dtype, head_dims, needs)
        if reason:
            raise UserError(f"attention={name} {reason}; use attention=auto")
        return name, f"attention={name}: as asked"
    passed_over = []
    for candidate in _best_first(device):
        reason = obstacle(candidate, device, dtype, head_dims, needs)
        if reason is None:
            break
        passed_over.append(f"{candidate} {reason}")
    version = BACKENDS[candidate].work.version()
    chosen = [f"attention=auto: {candidate} is the fastest at hand", *filter(None, [version])]
    return candidate, "; ".join([*chosen, *passed_over])


def _best_first(device: torch.device) -> list[str]:
    """Return the backends that attention=auto may take on a device, the best first. The last one
    works everywhere.
    """
    names = list(BACKENDS) if device.type == "cuda" else BACKENDS.within("magicdec.attention")
    facts = [BACKENDS[name].facts for name in names]
    usable = [
        backend
        for backend in facts
        if backend.priority is not None and backend.device in (None, device.type)
    ]
    return [
        backend.name
        for backend in sorted(usable, key=lambda backend: backend.priority or 0, reverse=True)
    ]


def usable(device: torch.device, dtype: torch.dtype, head_dims: Iterable[int]) -> list[str]:
    """Return the names of all backends that can be used here, to compare them."""
    head_dims = tuple(head_dims)
    return [name for name in BACKENDS if obstacle(name, device, dtype, head_dims) is None]


def obstacle(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dims: Iterable[int],
    needs: Collection[str] = (),
) -> str | None:
    """Return why a backend cannot be used here, as the words that follow its name in a sentence;
    None if it can.
    """
    chosen = BACKENDS[name]
    if chosen.facts.device not in (None, device.type):
        return f"is for {DEVICES[str(chosen.facts.device)]}, not for {device.type}"
    if needs and not chosen.work.takes_weighting:
        return f"does not have {' and '.join(sorted(needs))}"
    return next(filter(None, (chosen.work.obstacle(dtype, dim) for dim in head_dims)), None)
