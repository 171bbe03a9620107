"""Attention by the flash-attn package, for NVIDIA GPUs (FlashAttention-2, arXiv 2307.08691, and -3,
arXiv 2407.08608).

T new tokens, H query heads over K KV heads, J = H / K. The library's function for caches serves
both prefill and decoding: each row may have its own length.

FlashAttention-2 reads K and V once for the J heads that share them only where there is a single
query token. A verification of few tokens therefore goes to Triton's kernel, which reads them once
for all J x T. FlashAttention-3 packs query heads itself, and is used for every pass.
"""

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from magicdec.attention.cuda.triton_fallback import FEW_TOKENS, LibraryAttention, flash_obstacle
from magicdec.attention.sdpa_fallback import KernelPlan
from magicdec.config.choices import Backend
from magicdec.config.registry import BACKENDS

# The modules of each version, in the order in which they are looked for; newer wheels of version 3
# have the first one.
MODULES = {3: ("flash_attn_3.flash_attn_interface", "flash_attn_interface"), 2: ("flash_attn",)}
# Indices of version 3's wheels, by the CUDA that PyTorch is built for (docs/attention.md has the
# sources). Version 2 has no wheels for the PyTorch that the package requires.
INDICES_3 = {"12.6": "cu126", "12.8": "cu128", "12.9": "cu129", "13.0": "cu130"}


class Library(NamedTuple):
    """The library's function for caches, whether it packs query heads, and which version it is."""

    attend: Callable
    packs: bool
    version: str


def library() -> Library:
    """Return the best version that can be used here. Raise ImportError, with the reasons, if there
    is none.
    """
    passed_over: list[str] = []
    for version, modules in MODULES.items():
        name = f"FlashAttention-{version}"
        if version == 3 and not on_hopper():
            continue
        for module in modules:
            try:
                attend = import_module(module).flash_attn_with_kvcache
            except ImportError as error:
                reason = f"{name} cannot be imported ({error})"
                continue
            return Library(attend, version == 3, "; ".join([name, *passed_over]))
        passed_over.append(reason)
    raise ImportError("; ".join(passed_over))


def on_hopper() -> bool:
    """Return whether the GPU is one that FlashAttention-3 is for."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def remedy() -> str:
    """Return what to type to install the library for this GPU and PyTorch."""
    cuda = torch.version.cuda or ""
    if on_hopper() and cuda in INDICES_3:
        index = f"https://download.pytorch.org/whl/{INDICES_3[cuda]}"
        return f"install it: pip install --no-deps flash-attn-3 --index-url {index}"
    version = ".".join(torch.__version__.split(".")[:2])
    return (
        f"no wheel is known for this GPU, PyTorch {version} and CUDA {cuda or 'none'}"
        " (docs/attention.md)"
    )


@BACKENDS.register(Backend("flash", "cuda", priority=1))
class FlashAttention(LibraryAttention):
    """The library's kernels; Triton's for a verification with FlashAttention-2."""

    takes_weighting = True

    def __init__(self) -> None:
        super().__init__()
        self._library, self._packs, _ = library()

    @classmethod
    @override
    def obstacle(cls, dtype: torch.dtype, head_dim: int) -> str | None:
        if obstacle := flash_obstacle(dtype, head_dim):
            return obstacle
        try:
            library()
        except ImportError as error:
            return f"is not installed: {error}; {remedy()}"
        return None

    @classmethod
    @override
    def version(cls) -> str:
        return library().version

    @override
    def takes(self, q_BTHD: Tensor, k_BKSD: Tensor) -> bool:
        """Take every prefill, which is bound by arithmetic and not by reading K and V."""
        num_new = q_BTHD.shape[1]
        group = q_BTHD.shape[2] // k_BKSD.shape[1]
        return self._packs or group == 1 or num_new == 1 or num_new > FEW_TOKENS

    @override
    def read_all(self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: KernelPlan) -> Tensor:
        if q_BTHD.is_meta:  # what the library allocates for its splits is a few MiB
            return torch.empty_like(q_BTHD)
        sinks_H, softcap = self.weighting
        answer = self._library(
            q_BTHD,
            k_BKSD.transpose(1, 2),
            v_BKSD.transpose(1, 2),
            cache_seqlens=plan.seqlens_B,
            causal=True,
            window_size=(-1, -1) if plan.window is None else (plan.window - 1, 0),
            **({} if softcap is None else {"softcap": softcap}),
            **({} if sinks_H is None else {"return_softmax_lse": True}),
        )
        if sinks_H is None:
            return answer
        # The share of the softmax that is left to the slots.
        out_BTHD, lse_BHT, *_ = answer
        share_BHT = torch.sigmoid(lse_BHT - sinks_H.float()[:, None])
        return (out_BTHD * share_BHT.transpose(1, 2)[..., None]).to(out_BTHD.dtype)
