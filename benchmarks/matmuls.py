"""A layer's matmuls with few rows on a CPU: PyTorch's, oneDNN's with weights that it packed before, and our kernel.

    python benchmarks/matmuls.py                # prints a table; a minute, on an otherwise idle machine
    python benchmarks/matmuls.py --cpu-time     # one thread's processor time, for a busy machine

The ways take turns, and the fastest of many calls counts. Each turn takes another layer's weights, as a step does.
"""

import argparse
import time
from collections.abc import Callable

import magicdec  # noqa: F401 - before PyTorch, which reads once how its threads wait

# isort: split
import torch
import torch.nn.functional as F
from page import provenance
from torch import Tensor

from magicdec.models.operators import CppOperators
from magicdec.tracking.cells import markdown_table

# Of a layer: rows and columns of QKV, the output, gate and up, down.
MODELS = {
    "tiny": ((512, 256), (256, 256), (1408, 256), (256, 704)),
    "tiny draft": ((256, 128), (128, 128), (704, 128), (128, 352)),
    "SmolLM2-135M": ((960, 576), (576, 576), (3072, 576), (576, 1536)),
}
ROWS = (1, 2, 4, 8, 16, 24, 48, 96, 128)
LAYERS, SECONDS = 8, 0.5


def ways(ops: CppOperators, x: Tensor, weights: list[Tensor]) -> dict[str, Callable[[int], Tensor]]:
    """Return the ways to multiply with the weight of layer i, by their names."""
    narrow = [weight.bfloat16() for weight in weights]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, len(x)) for weight in weights]
    return {
        "F.linear": lambda i: F.linear(x, weights[i]),
        "oneDNN, packed": lambda i: torch.ops.mkldnn._linear_pointwise(x, packed[i], None, "none", [], ""),
        "ours": lambda i: ops.matmul(x, weights[i]),
        "ours, bfloat16 weights": lambda i: ops.matmul(x, narrow[i]),
    }


def fastest(calls: dict[str, Callable[[int], Tensor]], clock: Callable[[], float]) -> dict[str, float]:
    """Return the milliseconds of the fastest call of each way."""
    found, turn, end = dict.fromkeys(calls, float("inf")), 0, time.perf_counter() + SECONDS
    while turn < LAYERS or time.perf_counter() < end:
        for name, call in calls.items():
            start = clock()
            call(turn % LAYERS)
            found[name] = min(found[name], 1e3 * (clock() - start))
        turn += 1
    return found


@torch.inference_mode()
def main() -> None:
    """Measure all models and rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-time", action="store_true", help="processor time of one thread")
    arguments = parser.parse_args()
    if arguments.cpu_time:
        torch.set_num_threads(1)
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    ops, lines, header = CppOperators(), [], []
    for model, shapes in MODELS.items():
        for rows in ROWS:
            total: dict[str, float] = {}
            for shape in shapes:
                weights = [torch.randn(shape) for _ in range(LAYERS)]
                for name, ms in fastest(ways(ops, torch.randn(rows, shape[1]), weights), clock).items():
                    total[name] = total.get(name, 0.0) + ms
            header = ["model", "rows", *total]
            lines.append([model, str(rows), *(f"{ms:.3f}" for ms in total.values())])
            print(*lines[-1], flush=True)
    print("\nms per layer\n", markdown_table(header, lines), provenance("python benchmarks/matmuls.py"), sep="\n")


if __name__ == "__main__":
    main()
