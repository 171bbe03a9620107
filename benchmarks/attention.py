"""Ways to attend on a CPU, side by side: what the choice of `attention=sdpa` with folded heads rests on.

    python benchmarks/attention.py        # about a minute; flex_attention needs a C++ compiler

8 rows, 4 query heads over 2 KV heads of 64, fp32: the bundled target. T query tokens over S cached ones, one layer.
"""

import time
from statistics import median

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from magicdec.attention.base import Shape
from magicdec.attention.sdpa import SdpaAttention
from magicdec.measure.memory import read_bandwidth

ROWS, KV_HEADS, GROUP, DIM = 8, 2, 2, 64
REPEATS = 25


def milliseconds(function) -> float:
    """Median over alternating-free repeats, after a warm-up."""
    for _ in range(3):
        function()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - start))
    return median(times)


@torch.inference_mode()
def main() -> None:
    """Print a table in Markdown."""
    bandwidth = read_bandwidth(torch.device("cpu"))
    flex, folded = torch.compile(flex_attention, dynamic=False), SdpaAttention()
    print("| S | T | read K and V once | sdpa, heads folded | sdpa, enable_gqa | two matmuls | flex_attention |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for length in (4096, 8192):
        k, v = torch.randn(2, ROWS, KV_HEADS, length, DIM)
        seqlens = torch.full((ROWS,), length, dtype=torch.int32)
        floor = 1e3 * 2 * k.numel() * 4 / bandwidth
        for num_new in (1, 3, 5, 9):
            q = torch.randn(ROWS, num_new, KV_HEADS * GROUP, DIM)
            plan = folded.plan(seqlens, Shape(num_new, length, GROUP, q.dtype), None)
            causal = torch.zeros(1, 1, num_new, length)
            causal[..., -num_new:].masked_fill_(torch.ones(num_new, num_new).triu(1).bool(), float("-inf"))
            cells = [
                milliseconds(lambda q=q, plan=plan, k=k, v=v: folded.attend(q, k, v, plan)),
                milliseconds(
                    lambda q=q, m=causal, k=k, v=v: F.scaled_dot_product_attention(
                        q.transpose(1, 2), k, v, attn_mask=m, enable_gqa=True
                    )
                ),
                milliseconds(lambda q=q, m=causal, k=k, v=v: matmuls(q, k, v, m)),
                flex_milliseconds(flex, q, k, v),
            ]
            print(f"| {length} | {num_new} | {floor:.1f} | " + " | ".join(cells_text(cells)) + " |", flush=True)


def matmuls(q_BTHD, k, v, mask):
    """Softmax attention written out, heads folded."""
    q = q_BTHD.unflatten(2, (KV_HEADS, GROUP)).permute(0, 2, 3, 1, 4).reshape(ROWS, KV_HEADS, -1, DIM)
    scores = (q @ k.transpose(-1, -2)).mul_(DIM**-0.5).add_(mask.repeat(1, 1, GROUP, 1))
    return scores.softmax(-1) @ v


def flex_milliseconds(flex, q, k, v) -> float | str:
    """Compiled flex_attention, causal over the last tokens."""
    offset = k.shape[2] - q.shape[1]

    def causal(score, _b, _h, q_index, k_index):
        return torch.where(q_index + offset >= k_index, score, -float("inf"))

    try:
        return milliseconds(lambda: flex(q.transpose(1, 2), k, v, score_mod=causal, enable_gqa=True))
    except Exception as error:
        return type(error).__name__


def cells_text(cells) -> list[str]:
    """Milliseconds, or the name of what went wrong."""
    return [f"{cell:.1f}" if isinstance(cell, float) else cell for cell in cells]


if __name__ == "__main__":
    main()
