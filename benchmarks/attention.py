"""Compare ways to attend on a CPU: the reason for `attention=cpp`, and for the folded heads of sdpa.

    python benchmarks/attention.py        # a minute or two; cpp and flex_attention need a C++ compiler

One layer of the bundled target: 8 rows, 4 query heads over 2 KV heads of 64, T query tokens over S cached ones. The
ways take turns, and the fastest turn of each counts, because other work on the machine only ever adds time. Times are
divided by the time to read K and V once, which takes its turns too.

The limit is the larger of two times: reading K and V, and the two matmuls (4 H T S D FLOPs a row at the rate of a large
matmul in fp32). The next column is the share of that limit which cpp reaches.
"""

import argparse
import sys
import time

import magicdec  # noqa: F401 - before PyTorch, which reads once how its threads wait

# isort: split
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from magicdec.attention.base import Shape
from magicdec.attention.cpp import CppAttention
from magicdec.attention.sdpa import SdpaAttention
from magicdec.measure.ceilings import matmul_rate
from magicdec.tracking.cells import markdown_table

ROWS, KV_HEADS, GROUP, DIM = 8, 2, 2, 64


COLUMNS = ("S", "T", "read K and V once, ms", "limit", "cpp, % of it", "cpp", "sdpa, heads folded", "cpp, scored")
COLUMNS += ("sdpa, enable_gqa", "two matmuls", "flex_attention")


@torch.inference_mode()
def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    flex = torch.compile(flex_attention, dynamic=False)
    rate = matmul_rate(torch.device("cpu"), torch.float32, size=512, repeats=10 * args.repeats)
    machine = f"{torch.get_num_threads()} threads, {rate / 1e9:.0f} GFLOP/s in fp32"
    print(f"{args.dtype}, {machine}; times over that of reading K and V once\n")
    rows = []
    for length in args.lengths:
        kv = torch.randn(2, ROWS, KV_HEADS, length, DIM).to(dtype)
        for num_new in (1, 3, 5, 9):
            q = torch.randn(ROWS, num_new, KV_HEADS * GROUP, DIM).to(dtype)
            floor, *times = fastest(ways(q, kv, flex), args.repeats)
            limit = max(1.0, 4 * q.numel() * length / rate / floor)
            cells = [length, num_new, f"{1e3 * floor:.2f}", f"{limit:.2f}", f"{100 * limit * floor / times[0]:.0f}"]
            rows.append([*cells, *("failed" if t is None else f"{t / floor:.2f}" for t in times)])
            print(*rows[-1], file=sys.stderr, flush=True)
    print(markdown_table(COLUMNS, rows))


def ways(q, kv, flex) -> list:
    """Return what takes turns: reading K and V, then the ways to attend in the order of COLUMNS."""
    k, v = kv
    num_new, length = q.shape[1], k.shape[2]
    mask = torch.zeros(1, 1, num_new, length, dtype=q.dtype)
    mask[..., -num_new:].masked_fill_(torch.ones(num_new, num_new).triu(1).bool(), float("-inf"))
    bits, cpp, sdpa = kv.view(torch.float32), CppAttention(), SdpaAttention()
    seqlens, shape = torch.full((ROWS,), length, dtype=torch.int32), Shape(num_new, length, GROUP, q.dtype)
    cpp_plan, sdpa_plan = cpp.plan(seqlens, shape, None), sdpa.plan(seqlens, shape, None)
    q_heads = q.transpose(1, 2)
    return [
        lambda: bits.sum(),
        lambda: cpp.attend(q, k, v, cpp_plan),
        lambda: sdpa.attend(q, k, v, sdpa_plan),
        lambda: cpp.attend_scored(q, k, v, cpp_plan),
        lambda: F.scaled_dot_product_attention(q_heads, k, v, attn_mask=mask, enable_gqa=True),
        lambda: matmuls(q, k, v, mask),
        lambda: flexible(flex, q, k, v),
    ]


def fastest(ways, repeats) -> list[float | None]:
    """Return the seconds of each way's fastest turn, or None if its first, untimed turn fails."""
    best: list[float | None] = []
    for way in ways:
        try:
            way()
            best.append(float("inf"))
        except Exception:
            best.append(None)
    for _ in range(repeats):
        for i, way in enumerate(ways):
            if best[i] is not None:
                start = time.perf_counter()
                way()
                best[i] = min(best[i], time.perf_counter() - start)
    return best


def matmuls(q_BTHD, k, v, mask):
    """Return softmax attention as two matmuls, with folded heads."""
    q = q_BTHD.unflatten(2, (KV_HEADS, GROUP)).permute(0, 2, 3, 1, 4).reshape(ROWS, KV_HEADS, -1, DIM)
    scores = (q @ k.transpose(-1, -2)).mul_(DIM**-0.5).add_(mask.repeat(1, 1, GROUP, 1))
    return scores.softmax(-1) @ v


def flexible(flex, q, k, v):
    """Return compiled flex_attention, causal over the last tokens."""
    offset = k.shape[2] - q.shape[1]

    def causal(score, _b, _h, q_index, k_index):
        return torch.where(q_index + offset >= k_index, score, -float("inf"))

    return flex(q.transpose(1, 2), k, v, score_mod=causal, enable_gqa=True)


if __name__ == "__main__":
    main()
