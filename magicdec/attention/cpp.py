"""Attention on CPUs in C++ (split_kv.cpp): split-KV decoding as GPUs do it, for a few new tokens over a long cache.

The G x T query rows that share a KV head stay in registers and the L1 cache while K and V stream past once, in splits
that the threads share; the splits are merged by their log-sum-exp.

The kernel is compiled when it is first asked for, in seconds, and kept for this very source, PyTorch and processor. It
is called with plain pointers: through PyTorch's own headers the compilation would take half a minute.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from magicdec.attention.kernel import KernelAttention, KernelPlan
from magicdec.errors import UserError

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("split_kv.cpp")
# The vectors are written out; letting the compiler find more of them makes the short loops around them slower.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-tree-vectorize", "-fopenmp", "-shared", "-fPIC")
LANES = 8  # numbers in a vector of split_kv.cpp
FUNCTIONS = {torch.float32: "attend_float32", torch.bfloat16: "attend_bfloat16"}
NO_COMPILER = "needs a C++ compiler, and neither g++ nor clang++ is installed (CXX names another)"

POINTERS = ("q", "k", "v", "out", "seqlens", "indices", "counted", "positions", "scores")
SIZES = ("rows", "new_tokens", "kv_heads", "group", "dim", "slots", "num_indices", "window", "threads")
AXES = {"q": ("row", "token", "head"), "k": ("row", "head", "slot"), "v": ("row", "head", "slot")}
STRIDES = tuple(f"{tensor}_{axis}" for tensor, axes in AXES.items() for axis in axes)


class Call(ctypes.Structure):
    """`struct Call` of split_kv.cpp."""

    _fields_ = [(n, ctypes.c_void_p) for n in POINTERS] + [(n, ctypes.c_int64) for n in SIZES + STRIDES]


class CppAttention(KernelAttention):
    """The fastest on a CPU. The first run builds it."""

    name = "cpp"
    max_new_tokens: ClassVar[int] = 32  # arithmetic decides beyond, and PyTorch's matmuls are better at that

    def __init__(self) -> None:
        """Build the kernel if it is not there yet; raises UserError where that fails."""
        self._library = ctypes.CDLL(str(build()))

    @classmethod
    def obstacle(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """See Attention.obstacle."""
        if device.type != "cpu":
            return f"is for CPUs, not for {device.type}"
        if dtype not in FUNCTIONS:
            return f"computes in float32 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
        if head_dim % LANES:
            return f"needs a head dim that is a multiple of {LANES}, not {head_dim}"
        if not library().exists() and compiler() is None:
            return NO_COMPILER
        return None

    def decode(
        self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: KernelPlan, indices_BKN: Tensor | None
    ) -> Tensor:
        """See KernelAttention.decode."""
        return self._call(q_BTHD, k_BKSD, v_BKSD, plan, indices=indices_BKN)

    def decode_scored(
        self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: KernelPlan, counted_BT: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See KernelAttention.decode_scored. The weights are written once more, R numbers a slot beside its 2 x D, and
        summed once all of a KV head's splits are there.
        """
        scores_BKS = torch.empty(k_BKSD.shape[:3])
        return self._call(q_BTHD, k_BKSD, v_BKSD, plan, counted=counted_BT, scores=scores_BKS), scores_BKS

    def _call(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: KernelPlan,
        indices: Tensor | None = None,
        counted: Tensor | None = None,
        scores: Tensor | None = None,
    ) -> Tensor:
        (B, T, H, D), (K, S) = q_BTHD.shape, k_BKSD.shape[1:3]
        out_BTHD = torch.empty((B, T, H, D), dtype=q_BTHD.dtype)
        tensors = (q_BTHD, k_BKSD, v_BKSD, out_BTHD, plan.seqlens_B, indices, counted, plan.positions_BKS, scores)
        pointers = [None if x is None else x.data_ptr() for x in tensors]
        num_indices = 0 if indices is None else indices.shape[-1]
        sizes = (B, T, K, H // K, D, S, num_indices, plan.reach, torch.get_num_threads())
        strides = [stride for x in (q_BTHD, k_BKSD, v_BKSD) for stride in x.stride()[:3]]
        getattr(self._library, FUNCTIONS[q_BTHD.dtype])(ctypes.byref(Call(*pointers, *sizes, *strides)))
        return out_BTHD


def compiler() -> str | None:
    """The system's C++ compiler, `CXX` first; None where there is none."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++"))), None)


@cache
def library() -> Path:
    """Where the kernel lies once it is built: a file per source, flags, PyTorch and processor."""
    identity = (SOURCE.read_text(), FLAGS, torch.__version__, platform.machine(), _processor())
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "magicdec")
    return folder / f"split_kv-{digest}.so"


def build() -> Path:
    """The kernel, compiled unless it is there. Safe beside other processes that do the same: the last one wins."""
    path, command = library(), compiler()
    if path.exists():
        return path
    if command is None:
        raise UserError(
            "attention=cpp needs a C++ compiler (g++ or clang++), and none is installed; use attention=sdpa"
        )
    log.info("attention=cpp: compiling %s with %s, once", SOURCE.name, command)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder, path.name)
        done = subprocess.run([command, *FLAGS, str(SOURCE), "-o", str(made)], capture_output=True, text=True)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit code {done.returncode}"]
            raise UserError(f"attention=cpp: {command} failed: {errors[0]}; use attention=sdpa")
        made.replace(path)
    return path


def _processor() -> str:
    """What -march=native looks at, where the operating system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text().splitlines()
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features"))))
