"""Ways to attend on a CPU, side by side: what the choice of `attention=cpp`, and of sdpa's folded heads, rests on.

    python benchmarks/attention.py        # a minute or two; cpp and flex_attention need a C++ compiler

8 rows, 4 query heads over 2 KV heads of 64: the bundled target. T query tokens over S cached ones, one layer. The ways
take turns, and each one's fastest turn counts, because other work on a machine only ever adds; times are then divided
by that of reading K and V once, which takes its turns with them.

The limit is the longer of reading and arithmetic, each at its best: of arithmetic only the two matmuls are counted,
4 H T S D FLOPs a row at the rate of a large matmul in fp32. How much of it cpp reaches stands beside it.
"""

import argparse
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

ROWS, KV_HEADS, GROUP, DIM = 8, 2, 2, 64


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
    backends = {"cpp": CppAttention(), "sdpa, heads folded": SdpaAttention()}
    header = [
        "S",
        "T",
        "read K and V once, ms",
        "limit",
        "cpp, % of it",
        *backends,
        "cpp, scored",
        "sdpa, enable_gqa",
        "two matmuls",
        "flex_attention",
    ]
    rate = matmul_rate(torch.device("cpu"), torch.float32, size=512, repeats=10 * args.repeats)
    machine = f"{torch.get_num_threads()} threads, {rate / 1e9:.0f} GFLOP/s in fp32"
    print(f"{args.dtype}, {machine}; times over that of reading K and V once\n")
    print(f"| {' | '.join(header)} |\n|{' --- |' * len(header)}")
    for length in args.lengths:
        kv = torch.randn(2, ROWS, KV_HEADS, length, DIM).to(dtype)
        k, v = kv
        seqlens = torch.full((ROWS,), length, dtype=torch.int32)
        bits = kv.view(torch.float32)
        for num_new in (1, 3, 5, 9):
            q = torch.randn(ROWS, num_new, KV_HEADS * GROUP, DIM).to(dtype)
            causal = torch.zeros(1, 1, num_new, length, dtype=dtype)
            causal[..., -num_new:].masked_fill_(torch.ones(num_new, num_new).triu(1).bool(), float("-inf"))
            shape = Shape(num_new, length, GROUP, dtype)
            plans = {name: backend.plan(seqlens, shape, None) for name, backend in backends.items()}
            ways = [lambda bits=bits: bits.sum()]
            ways += [
                lambda b=backend, q=q, k=k, v=v, plan=plans[name]: b.attend(q, k, v, plan)
                for name, backend in backends.items()
            ]
            ways += [
                lambda q=q, k=k, v=v, plan=plans["cpp"]: backends["cpp"].attend_scored(q, k, v, plan),
                lambda q=q, k=k, v=v, mask=causal: F.scaled_dot_product_attention(
                    q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=True
                ),
                lambda q=q, k=k, v=v, mask=causal: matmuls(q, k, v, mask),
                lambda q=q, k=k, v=v: flexible(flex, q, k, v),
            ]
            floor, *times = fastest(ways, args.repeats)
            limit = max(1.0, 4 * q.numel() * length / rate / floor)
            cells = [f"{1e3 * floor:.2f}", f"{limit:.2f}", f"{100 * limit * floor / times[0]:.0f}"]
            cells += ["failed" if t is None else f"{t / floor:.2f}" for t in times]
            print(f"| {length} | {num_new} | {' | '.join(cells)} |", flush=True)


def fastest(ways, repeats) -> list[float | None]:
    """Seconds of each way's fastest turn; None for one that fails at its first, untimed one."""
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
    """Softmax attention written out, heads folded."""
    q = q_BTHD.unflatten(2, (KV_HEADS, GROUP)).permute(0, 2, 3, 1, 4).reshape(ROWS, KV_HEADS, -1, DIM)
    scores = (q @ k.transpose(-1, -2)).mul_(DIM**-0.5).add_(mask.repeat(1, 1, GROUP, 1))
    return scores.softmax(-1) @ v


def flexible(flex, q, k, v):
    """Compiled flex_attention, causal over the last tokens."""
    offset = k.shape[2] - q.shape[1]

    def causal(score, _b, _h, q_index, k_index):
        return torch.where(q_index + offset >= k_index, score, -float("inf"))

    return flex(q.transpose(1, 2), k, v, score_mod=causal, enable_gqa=True)


if __name__ == "__main__":
    main()
