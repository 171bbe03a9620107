"""Compare the attention backends that are usable on this CPU, on one layer of the bundled target.

    python benchmarks/attention.py        # under a minute; cpp needs a C++ compiler

8 rows, 4 query heads over 2 KV heads of 64, T query tokens over S cached ones. The fastest of many
calls counts: other work on the machine only ever adds time. The limit is the larger of two times:
reading K and V once, and the two matmuls (4 H T S D FLOPs a row at the rate of a large matmul in
fp32). A backend's columns are its time over that of reading K and V once, and the share of the
limit that it reaches.
"""

import argparse
import sys
from functools import partial

import magicdec  # noqa: F401 - before PyTorch, which reads once how its threads wait

# isort: split
import torch

from magicdec.attention import backends
from magicdec.attention.base import Attention, Shape
from magicdec.config.registry import BACKENDS
from magicdec.measure.ceilings import fastest_s, matmul_rate
from magicdec.tracking.cells import markdown_table

ROWS, KV_HEADS, GROUP, DIM = 8, 2, 2, 64
CPU = torch.device("cpu")


@torch.inference_mode()
def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    rate = matmul_rate(CPU, torch.float32, size=512, repeats=10 * args.repeats)
    print(f"{args.dtype}, {torch.get_num_threads()} threads, {rate / 1e9:.0f} GFLOP/s in fp32\n")
    names, lines = backends.usable(CPU, dtype, [DIM]), []
    for length in args.lengths:
        kv = torch.randn(2, ROWS, KV_HEADS, length, DIM).to(dtype)
        for num_new in (1, 3, 5, 9):
            q = torch.randn(ROWS, num_new, KV_HEADS * GROUP, DIM).to(dtype)
            reading = fastest_s(kv.view(torch.float32).sum, CPU, args.repeats)
            limit = max(reading, 4 * q.numel() * length / rate)
            times = [attending(name, q, kv, args.repeats) for name in names]
            cells = [
                cell for time in times for cell in (f"{time / reading:.2f}", f"{limit / time:.0%}")
            ]
            lines.append([length, num_new, f"{1e3 * reading:.2f}", *cells])
            print(*lines[-1], file=sys.stderr, flush=True)
    columns = [column for name in names for column in (name, "of its limit")]
    print(markdown_table(["S", "T", "read K and V once, ms", *columns], lines))


def attending(name: str, q_BTHD: torch.Tensor, kv: torch.Tensor, repeats: int) -> float:
    """Return the seconds of a backend."""
    attention: Attention = BACKENDS[name].work()
    seqlens = torch.full((ROWS,), kv.shape[3], dtype=torch.int32)
    plan = attention.plan(seqlens, Shape(q_BTHD.shape[1], kv.shape[3], GROUP, q_BTHD.dtype), None)
    attend = partial(attention.attend, q_BTHD, *kv, plan)
    attend()
    return fastest_s(attend, CPU, repeats)


if __name__ == "__main__":
    main()
