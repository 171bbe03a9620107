"""Run on a CPU what torch.compile emitted for a GPU, its kernels in Triton's interpreter.

TRITON_INTERPRET=1 python -m tests.gpu_rehearsal.run_emitted FOLDER...

In each folder, source.py is run on arguments.safetensors; configs.json holds a configuration of
each kernel by name. Outputs, and the arguments afterwards, because kernels may write to them, go to
results.safetensors.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton.language as tl
from safetensors.torch import load_file, save_file
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_helpers, triton_heuristics

HEURISTICS = ("pointwise", "reduction", "persistent_reduction")
# The interpreter calls no library of a GPU.
LIBDEVICE = SimpleNamespace(
    rsqrt=lambda x: tl.rsqrt(x), exp=lambda x: tl.exp(x), mul_rn=lambda x, y: x * y
)


class Kernel:
    """A kernel of Inductor, launched in one of its configurations."""

    def __init__(self, kernel: Any, meta: dict[str, Any], config: dict[str, int]):
        self.kernel, self.config = kernel, config
        self.grid = triton_heuristics.GridExpr.from_meta(meta, config)

    def run(self, *args: Any, stream: int) -> None:
        sizes = dict(zip(self.kernel.arg_names, args, strict=False)) | self.config
        self.kernel[self.grid.eval_slow(sizes)](*args, **self.config)


def loaded(source: str, configs: dict[str, dict[str, int]]) -> ModuleType:
    """Load the source, with kernels that the interpreter runs, and memory of the CPU."""

    def heuristic(inductor_meta: dict[str, Any], **_: Any) -> Any:
        return lambda kernel: Kernel(kernel, inductor_meta, configs[kernel.__name__])

    def kernel(_: Any, name: str, source: str, **__: Any) -> Any:
        return getattr(PyCodeCache.load(source), name)

    with (
        patch.object(AsyncCompile, "triton", kernel),
        patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
        patch.object(triton_helpers, "libdevice", LIBDEVICE),
        patch.object(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, create=True),
        patch.multiple(triton_heuristics, **dict.fromkeys(HEURISTICS, heuristic)),
    ):
        module = PyCodeCache.load(source)
    module.empty_strided_cuda = module.empty_strided_cpu
    return module


def main(folder: Path) -> None:
    """Run what is in a folder."""
    args = load_file(folder / "arguments.safetensors")
    module = loaded(
        (folder / "source.py").read_text(), json.loads((folder / "configs.json").read_text())
    )
    with (
        patch.object(torch.cuda, "_DeviceGuard", nullcontext),
        patch.object(torch.cuda, "set_device"),
    ):
        outputs = module.call([args[str(i)] for i in range(len(args))])
    results = {f"output {i}": x.contiguous() for i, x in enumerate(outputs)}
    save_file(
        results | {f"argument {i}": x for i, x in args.items()}, folder / "results.safetensors"
    )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        main(Path(name))
