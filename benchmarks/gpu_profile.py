"""A round under PyTorch's profiler: its longest kernels, and their kinds next to
docs/predictions/gpu.md.
"""

import csv
import re
from collections import Counter

import torch
from gpu_bench import Bench
from gpu_store import Record
from page import ROOT

from magicdec.decoding.timers import synchronize
from magicdec.errors import UserError
from magicdec.tracking.cells import markdown_table

PREDICTED = ROOT / "docs/predictions/gpu.csv"
ROUNDS = 3
LONGEST = 30  # kernels that are listed by name
# Kinds of kernels, as on the page, by parts of their names; the first that fits counts.
KINDS = {
    "attention": "attend_split|attend_coded|merge_splits|flash|fmha",
    "sums over ranks": "all_reduce|allreduce|nccl|multimem|two_shot",
    "matmuls": "gemm|nvjet|cutlass|cublas|splitKreduce|mm$|linear",
    "fused": "^triton_",
}
ON_THE_PAGE = {  # the rows of its table that each kind is the sum of
    "attention": ("attention",),
    "matmuls": ("matmuls of layers", "head"),
    "fused": ("fused around them",),
    "rest": ("the rest",),
    "launches": ("launches / layer and round overhead",),
}


def static_cell(bench: Bench) -> tuple[tuple[int, int, int, int], Record]:
    """Return the predicted cell of this GPU, as rows, context, budget and gamma, and its
    milliseconds by kind; for another device the first cell, without any.
    """
    budget, gamma = bench.sizes.budgets[0], bench.sizes.gammas[0]
    name = torch.cuda.get_device_name() if bench.device.type == "cuda" else ""
    with PREDICTED.open(encoding="utf-8") as file:
        predicted = list(csv.DictReader(file))
    for cell in dict.fromkeys(row["cell"] for row in predicted):
        card, rows, context = re.fullmatch(r"(\w+), (\d+) x ([\d,]+)", cell).groups()
        if re.search(rf"\b{card}\b", name):
            milliseconds = {
                row["of"]: float(row["kernel_by_kernel_ms"])
                for row in predicted
                if row["cell"] == cell
            }
            by_kind = {
                kind: sum(milliseconds[part] for part in parts)
                for kind, parts in ON_THE_PAGE.items()
            }
            return (int(rows), int(context.replace(",", "")), budget, gamma), by_kind
    return (*bench.cells[0], budget, gamma), {}


def profiled(
    bench: Bench, cell: tuple[int, int, int, int], policy: str = "streaming", *more: str
) -> Record:
    """Return the milliseconds of a round by kinds of kernels, and those of its longest kernels."""
    opened = bench.open(*cell, alpha=0.8, policy=policy, more=more)
    step = opened.decoder.cycle(opened.draft, cell[-1])
    opened.restart()
    step()
    synchronize(bench.device)
    on_gpu = bench.device.type == "cuda"
    activity = (
        torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    )
    with torch.profiler.profile(activities=[activity]) as profiler:
        for _ in range(ROUNDS):
            step()
        synchronize(bench.device)
    rested = bool(opened.decoder.state.finished_B.any())
    opened.close()
    if rested:  # waking rows between rounds would add kernels
        raise UserError(
            "rows have ended before the last round, and cost nothing in it; generate more tokens"
        )
    times: Counter[str] = Counter(dict.fromkeys(ON_THE_PAGE, 0.0))
    by_name, launches = Counter[str](), Counter[str]()
    events = [
        event
        for event in profiler.events()
        if not on_gpu or "cuda" in str(event.device_type).lower()
    ]
    for event in events:
        took = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        times[kind_of(event.name)] += took / 1e3 / ROUNDS
        by_name[event.name] += took / 1e3 / ROUNDS
        launches[event.name] += 1
    spans = [event.time_range for event in events]
    whole = (max(span.end for span in spans) - min(span.start for span in spans)) / 1e3 / ROUNDS
    times["launches"] = max(0.0, whole - sum(times.values()))
    rows = [[name, launches[name] / ROUNDS, ms] for name, ms in by_name.most_common(LONGEST)]
    found = {"round_ms": whole, "kernels": len(events) / ROUNDS} | {
        f"{kind}_ms": ms for kind, ms in times.items()
    }
    return found | {"text": markdown_table(["kernel", "launches", "ms"], rows)}


def predicted_ms(by_kind: Record) -> Record:
    """Return the predicted milliseconds, as they are stored next to the measured ones."""
    return {f"predicted_{kind}_ms": ms for kind, ms in by_kind.items()}


def kind_of(name: str) -> str:
    """Return the kind of a kernel."""
    return next((kind for kind, parts in KINDS.items() if re.search(parts, name)), "rest")
