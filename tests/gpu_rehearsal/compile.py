"""Triton kernels compiled for GPUs that are not there, down to the registers and the shared memory
of a program.

launch = seen.launches[0]               # as recorded on a fake device
made = compiled(launch, 90)             # or `build`, for a specialisation described by hand
assert not made.spilled and made.programs >= 2
"""

import math
import re
import subprocess
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

DTYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.int8: "i8", torch.bool: "i1",
}  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """What the number of programs that run at once depends on."""

    name: str
    sms: int
    shared: int  # bytes of a multiprocessor
    program_shared: int  # bytes that one program may have
    warps: int  # of a multiprocessor
    l2: int  # bytes


# By compute capability.
GPUS = {
    80: Gpu("A100", 108, 164 << 10, 163 << 10, 64, 40 << 20),
    89: Gpu("L40S", 142, 100 << 10, 99 << 10, 48, 96 << 20),
    90: Gpu("H100 and H200", 132, 228 << 10, 227 << 10, 64, 50 << 20),
    100: Gpu("B200", 148, 228 << 10, 227 << 10, 64, 126 << 20),
    120: Gpu("RTX PRO 6000", 188, 100 << 10, 99 << 10, 48, 128 << 20),
}
REGISTERS = 65536  # of a multiprocessor
# Bytes of a multiprocessor's shared memory that each program takes beyond its own.
SYSTEM_SHARED = 1024
MAX_PROGRAMS = 32  # of a multiprocessor, on all of them


@dataclass(frozen=True)
class Launch:
    """A Triton kernel that was launched: its arguments by name, its options and its grid."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.kernel.__name__


@dataclass(frozen=True)
class Made:
    """A compiled kernel: what a program of it takes, per thread and in all."""

    capability: int
    registers: int
    spilled: int  # bytes of stack and local memory
    shared: int
    warps: int
    ptx: str
    cubin: bytes

    @property
    def programs(self) -> int:
        """Programs that a multiprocessor runs at once: as registers, shared memory and warps
        allow.
        """
        gpu = GPUS[self.capability]
        per_warp = math.ceil(self.registers * 32 / 256) * 256
        by_registers = REGISTERS // per_warp // self.warps
        by_shared = gpu.shared // (self.shared + SYSTEM_SHARED)
        return min(by_registers, by_shared, gpu.warps // self.warps, MAX_PROGRAMS)


def compiled(launch: Launch, capability: int) -> Made:
    """The specialisation that a recorded launch would compile."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned = set()
    for parameter in launch.kernel.params:
        name, value = parameter.name, launch.arguments.get(parameter.name)
        if (
            parameter.is_constexpr
            or value is None
            or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize)
        ):
            constants[name] = value
        elif isinstance(value, torch.Tensor | torch.dtype):
            types[name] = f"*{DTYPES[getattr(value, 'dtype', value)]}"
            aligned.add(name)
        elif isinstance(value, int):
            types[name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
            aligned |= {name} if value % 16 == 0 and not parameter.do_not_specialize else set()
        else:
            types[name] = "fp32"
    return build(launch.kernel, capability, types, constants, launch.options, aligned)


def build(
    kernel: Any,
    capability: int,
    types: dict[str, str],
    constants: dict[str, Any],
    options: dict[str, Any],
    aligned: Collection[str] | None = None,
) -> Made:
    """Compile a kernel: `types` of its arguments (i32 where none is given) but for the constants,
    which may be None; `aligned`: the arguments that 16 divides, by default pointers and strides.
    """
    types = {name: types.get(name, "i32") for name in kernel.arg_names} | dict.fromkeys(
        constants, "constexpr"
    )
    if aligned is None:
        aligned = [
            name
            for name, kind in types.items()
            if kind[0] == "*" or re.fullmatch("[qkv]_[a-z]+", name)
        ]
    index = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    # Triton keeps what it has compiled under a name made of the source and of this text, too: it is
    # the same for arguments in any order.
    divided = [name for name in types if name in aligned and types[name] != "constexpr"]
    source = ASTSource(
        kernel,
        types,
        {index[name]: value for name, value in constants.items()},
        {index[name]: [["tt.divisibility", 16]] for name in divided},
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    cubin, shared, warps = made.asm["cubin"], made.metadata.shared, made.metadata.num_warps
    return Made(capability, *resources(cubin), shared, warps, made.asm["ptx"], cubin)


@cache
def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of stack and local memory, which is where spilled ones
    go.
    """
    usage = printed(triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin)
    registers, stack, local = map(
        int, re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage).groups()
    )
    return registers, stack + local


def printed(tool: str, option: str, cubin: bytes) -> str:
    """What one of CUDA's tools prints about a compiled kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run(
            [tool, option, path], capture_output=True, text=True, check=True
        ).stdout
