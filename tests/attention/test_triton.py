"""The Triton kernels without a GPU: interpreted, and compiled for A100 and H100 down to their registers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton (Linux only)")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from magicdec.attention import triton as ours  # noqa: E402
from tests.attention.twins import attend, case, expected  # noqa: E402

# Bytes of a program: 80 stands for the L40, too, which has the least; H100s hold more.
SHARED_MEMORY = {80: 99 * 1024, 90: 227 * 1024}
REGISTERS = 65536  # of a multiprocessor
RESIDENT_WARPS = 8  # that it must have room for
HERE = Path(__file__).parent


def test_interpreted():
    """In a process of its own: Triton interprets or compiles, not both."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", HERE / "interpreted_triton.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE.parent.parent)
    assert done.returncode == 0, done.stdout + done.stderr


def compiled(capability, dtype, dim, group, num_new, selected=False):
    """The attending kernel as a launch would compile it: of a decoding in splits, of a prefill whole."""
    pointers = dict.fromkeys(("q", "k", "v", "out"), f"*{dtype}") | {"seqlens": "*i32"}
    pointers |= {"partial": "*fp32", "lse": "*fp32"}
    kernel = ours.attend_split
    constants = {
        "K": 8, "G": group, "D": dim, "PADDED_D": triton.next_power_of_2(dim), "BLOCK": ours.BLOCK,
        "TILE": ours.tile_size(group * num_new), "SELECTED": selected, "UPCAST": False,
        "SPLIT": num_new < 100,
    }  # fmt: skip
    if selected:
        pointers["indices"] = "*i64"
    else:
        constants["indices"] = None
    strides = {name: "i32" for name in kernel.arg_names if re.fullmatch("[qkv]_[a-z]+", name)}
    signature = dict.fromkeys(("T", "num_splits", "num_indices", "reach"), "i32") | {"scale": "fp32"}
    signature |= strides | pointers | dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    aligned = [i for i, name in enumerate(kernel.arg_names) if name in pointers or name in strides]
    source = ASTSource(
        kernel,
        signature,
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    options = ours.launch_options(torch_dtype, constants["TILE"], dim)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(cubin, path):
    """Registers per thread and bytes of stack, which is where spilled ones go, as cuobjdump of Triton's wheel tells."""
    path.write_bytes(cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", path]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", told).groups()
    return int(registers), int(stack) + int(local)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("dtype", "dim", "group", "num_new", "selected"),
    [("bf16", 128, 4, 5, False), ("bf16", 128, 8, 9, False), ("fp16", 80, 1, 1, True), ("bf16", 128, 4, 512, False)],
)
def test_compiled(capability, dtype, dim, group, num_new, selected, tmp_path):
    """Nothing spilled, tensor cores used, and room on a multiprocessor for enough warps to hide memory's latency."""
    made = compiled(capability, dtype, dim, group, num_new, selected)
    registers, spilled = resources(made.asm["cubin"], tmp_path / "kernel.cubin")
    assert spilled == 0
    programs = REGISTERS // (registers * 32 * made.metadata.num_warps)
    assert programs * made.metadata.num_warps >= RESIDENT_WARPS
    assert made.metadata.shared <= SHARED_MEMORY[capability]
    assert "mma" in made.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.parametrize("num_new", [1, 2, 5, 9, 32, 500])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)])
def test_on_a_gpu(num_new, group, dtype, tolerance):
    for dim in ours.HEAD_DIMS:
        arguments = [x.cuda() for x in case(num_new, group, dim, 3000, dtype)]
        out = attend(ours.TritonAttention(), *arguments)
        torch.testing.assert_close(out.float(), expected(*arguments), atol=tolerance, rtol=tolerance)
