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
from tests.attention.twins import attend, attend_scored, case, expected, expected_scored  # noqa: E402

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


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def compiled(kernel, capability, types, constants, options):
    """A kernel as a launch would compile it: `types` of its arguments but for the constants, which may be None."""
    types = {name: types.get(name, "i32") for name in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
    strides = re.compile("[qkv]_[a-z]+")
    aligned = [i for i, (name, kind) in enumerate(types.items()) if kind.startswith("*") or strides.fullmatch(name)]
    source = ASTSource(
        kernel,
        types,
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def attend_compiled(capability, dtype, dim, group, num_new, kind):
    """The attending kernel: of a decoding in splits, of a prefill whole."""
    split, tile = num_new < 100, ours.tile_size(group * num_new)
    types = dict.fromkeys(("q", "k", "v", "out"), f"*{dtype}") | {"seqlens": "*i32", "scale": "fp32"}
    types |= {"partial": "*fp32", "lse": "*fp32", "raw": "*fp32", "indices": "*i64", "positions": "*i32"}
    constants = {
        "K": 8, "G": group, "D": dim, "PADDED_D": triton.next_power_of_2(dim), "BLOCK": ours.BLOCK, "TILE": tile,
        "SELECTED": kind == "selected", "SPLIT": split, "SCORED": kind == "scored", "UPCAST": False,
    }  # fmt: skip
    constants |= {} if kind == "selected" else {"indices": None}
    constants |= {} if kind == "positions" else {"positions": None}
    constants |= {} if kind == "scored" else {"raw": None}
    constants |= {} if split else {"partial": None}
    return compiled(ours.attend_split, capability, types, constants, ours.launch_options(DTYPES[dtype], tile, dim))


def resources(cubin, path):
    """Registers per thread and bytes of stack, which is where spilled ones go, as cuobjdump of Triton's wheel tells."""
    path.write_bytes(cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", path]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", told).groups()
    return int(registers), int(stack) + int(local)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("dtype", "dim", "group", "num_new", "kind"),
    [
        ("bf16", 128, 4, 5, "all"),
        ("bf16", 128, 8, 9, "all"),
        ("bf16", 128, 4, 512, "all"),
        ("fp16", 80, 1, 1, "selected"),
        ("bf16", 128, 4, 5, "positions"),
        ("bf16", 128, 4, 5, "scored"),
        ("bf16", 128, 8, 64, "scored"),
    ],
)
def test_compiled(capability, dtype, dim, group, num_new, kind, tmp_path):
    """Nothing spilled, tensor cores used, and room on a multiprocessor for enough warps to hide memory's latency."""
    made = attend_compiled(capability, dtype, dim, group, num_new, kind)
    registers, spilled = resources(made.asm["cubin"], tmp_path / "kernel.cubin")
    assert spilled == 0
    programs = REGISTERS // (registers * 32 * made.metadata.num_warps)
    assert programs * made.metadata.num_warps >= RESIDENT_WARPS
    assert made.metadata.shared <= SHARED_MEMORY[capability]
    assert "mma" in made.asm["ptx"]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("dim", "splits"), [(128, ours.MAX_SPLITS), (80, 2)])
def test_merging_compiled(capability, dim, splits, tmp_path):
    """Nothing spilled."""
    types = {"partial": "*fp32", "lse": "*fp32", "out": "*bf16"}
    padded = triton.next_power_of_2(dim)
    constants = {"K": 8, "G": 4, "D": dim, "PADDED_D": padded, "PADDED_SPLITS": splits}
    constants["ROWS"] = ours.merge_rows(20, splits * padded)
    made = compiled(ours.merge_splits, capability, types, constants, {"enable_fp_fusion": True})
    assert resources(made.asm["cubin"], tmp_path / "kernel.cubin")[1] == 0


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("some", [True, False])
def test_summing_compiled(capability, some, tmp_path):
    """Nothing spilled."""
    types = {"raw": "*fp32", "lse": "*fp32", "seqlens": "*i32", "counted": "*u8", "out": "*fp32"}
    types |= {"positions": "*i32"}
    constants = {"K": 8, "G": 4, "PADDED_SPLITS": ours.MAX_SPLITS, "BLOCK": ours.SUMMED}
    constants |= {} if some else {"counted": None, "positions": None}
    made = compiled(ours.sum_scores, capability, types, constants, {"enable_fp_fusion": True})
    assert resources(made.asm["cubin"], tmp_path / "kernel.cubin")[1] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("num_new", [1, 2, 5, 9, 32, 500])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)])
def test_on_a_gpu(num_new, group, dtype, tolerance):
    for dim in ours.HEAD_DIMS:
        arguments = [x.cuda() for x in case(num_new, group, dim, 3000, dtype)]
        out = attend(ours.TritonAttention(), *arguments)
        torch.testing.assert_close(out.float(), expected(*arguments), atol=tolerance, rtol=tolerance)
        if num_new <= 64:
            scores = attend_scored(ours.TritonAttention(), *arguments)[1]
            torch.testing.assert_close(scores, expected_scored(*arguments)[1], atol=1e-3, rtol=1e-3)
