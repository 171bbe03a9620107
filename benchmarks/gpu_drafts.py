"""The parts of benchmarks/gpu.py that compare drafts, kernels, and ways to compile them, at one
cell.
"""

from collections.abc import Iterator
from functools import partial

import gpu_kernels
import torch
from gpu_bench import Bench, cell_name
from gpu_checks import LARGE_S, last_line
from gpu_kernels import Layer
from gpu_profile import predicted_ms, profiled, static_cell
from gpu_store import Point, Record

from magicdec.config.registry import POLICIES
from magicdec.measure.round_profile import profile_round

CHECKED_ROWS = 2
# What drafts, as a policy and overrides. What comes first matters most, and is profiled, too.
DRAFTS = {
    "streaming": ("streaming",),
    "quest": ("quest",),
    "topk": ("topk",),
    "quantized": ("quantized",),
    "verify_guided": ("verify_guided",),
    "streaming, int4 weights": ("streaming", "draft.quantization=int4"),
    "streaming, int8 weights": ("streaming", "draft.quantization=int8"),
    "quantized, 8 bits": ("quantized", "cache.bits=8"),
}
PROFILED = ("quest", "topk", "quantized", "verify_guided", "streaming, int4 weights")
# Settings of PyTorch's Inductor. Trying configurations of what writes to the cache would copy a
# layer's whole cache, so that only matmuls are tuned.
COMPILERS = {
    "plain": {},
    "programmatic dependent launches": {"triton.enable_pdl": True},
    "autotuned matmuls": {"max_autotune_gemm": True},
}


def profile(bench: Bench) -> Iterator[Point]:
    """Profile a round of the predicted cell kernel by kernel, then of each policy that selects or
    reads codes.
    """
    cell, by_kind = static_cell(bench)
    sizes = dict(zip(("batch", "context", "budget", "gamma"), cell, strict=True))

    def predicted() -> Record:
        return {"policy": "streaming"} | sizes | profiled(bench, cell) | predicted_ms(by_kind)

    def measured(name: str, policy: str, *more: str) -> Record:
        its_sizes = dict(zip(sizes, bench.policy_cell, strict=True))
        return {"policy": name} | its_sizes | profiled(bench, bench.policy_cell, policy, *more)

    yield Point("profile", cell_name(*cell), predicted, LARGE_S)
    for name in PROFILED:
        yield Point(
            "profile",
            f"{name}, {cell_name(*bench.policy_cell)}",
            partial(measured, name, *DRAFTS[name]),
        )


def policies(bench: Bench) -> Iterator[Point]:
    """Time the rounds of every policy at the same budget, and of quantized drafts, next to their
    prediction.
    """
    batch, context, budget, gamma = cell = bench.policy_cell

    def measured(name: str, policy: str, *more: str) -> Record:
        opened = bench.open(*cell, 0.8, policy=policy, more=more)
        times = profile_round(opened, bench.sizes.repeats)
        opened.close()
        predicted = bench.predicted(bench.large(*cell, policy, *more), gamma)
        names = [name for name in ("draft_ms", "verify_ms", "round_ms") if predicted]
        sizes = {
            "policy": name,
            "batch": batch,
            "context": context,
            "budget": budget,
            "gamma": gamma,
        }
        return (
            sizes | times | {f"predicted_{name}": predicted[f"predicted/{name}"] for name in names}
        )

    others = sorted(set(POLICIES) - set(DRAFTS), key="h2o".__eq__)  # it selects for seconds
    for name, settings in (DRAFTS | {policy: (policy,) for policy in others}).items():
        yield Point("policies", f"{name}, {cell_name(*cell)}", partial(measured, name, *settings))


def variants(bench: Bench) -> Iterator[Point]:
    """Time the same steps with each way to compile what is around attention."""
    cell = bench.policy_cell

    def measured(name: str, settings: dict[str, bool]) -> Record:
        torch._dynamo.reset()  # compile again
        with torch._inductor.config.patch(settings):
            opened = bench.open(*cell, 0.8)
            times = profile_round(opened, bench.sizes.repeats)
        opened.close()
        torch._dynamo.reset()
        return (
            {"compiled": name}
            | dict(zip(("batch", "context", "budget", "gamma"), cell, strict=True))
            | times
        )

    for name, settings in COMPILERS.items():
        yield Point(
            "variants", f"{name}, {cell_name(*cell)}", partial(measured, name, settings), LARGE_S
        )


def authors(bench: Bench) -> Iterator[Point]:
    """Time the steps of the MagicDec authors' own software, where there is a checkout of it."""
    batch, context, budget, gamma = bench.policy_cell
    sizes = [
        f"--batch={batch}",
        f"--context={context}",
        f"--budget={budget}",
        f"--repeats={bench.sizes.repeats}",
    ]
    for tokens in (0, gamma) if bench.checkout else ():
        command = ["benchmarks/gpu_authors.py", str(bench.checkout), *sizes, f"--gamma={tokens}"]
        key = f"{cell_name(batch, context, budget)}, {tokens + 1} tokens verified"
        yield Point("authors", key, partial(last_line, *command))


def layer(bench: Bench, rows: int) -> Layer:
    """Return the sizes at which kernels are checked and timed: the first cell's."""
    if bench.device.type == "cpu":
        return gpu_kernels.tiny()
    return Layer(bench.device, bench.dtype, rows, bench.cells[0][1], bench.sizes.budgets[0])


def checks(bench: Bench) -> Iterator[Point]:
    """Compare each kernel with its reference."""
    for name in gpu_kernels.KERNELS:
        yield Point(
            "checks", name, lambda name=name: gpu_kernels.checked(name, layer(bench, CHECKED_ROWS))
        )


def kernels(bench: Bench) -> Iterator[Point]:
    """Time each kernel next to its rivals."""

    def measured(name: str) -> Record:
        copied = bench.store.points("ceilings").get("ceilings", {}).get("copy_gbs")
        sizes = layer(bench, bench.policy_cell[0])
        return {"kernel": name} | gpu_kernels.timed(
            name, sizes, bench.sizes.repeats, copied and 1e9 * copied
        )

    for name in gpu_kernels.KERNELS:
        yield Point("kernels", name, partial(measured, name))
