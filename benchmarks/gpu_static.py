"""Predict a round of Llama-3.1-8B on GPUs kernel by kernel, without one: docs/predictions/gpu.md.

    python benchmarks/gpu_static.py            # a minute on a CPU; nothing is computed

The round runs on a fake CUDA device, where every kernel outside of the compiled layers is recorded
with the bytes that it moves at least. The compiled halves of a layer are what PyTorch's Inductor
emits for them. A kernel takes the time of its bytes or of its FLOPs, at the rates that the cost
model takes from its calibration.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import render
import torch
from page import ROOT, setting
from render import Row, rounded, write_csv
from torch import Tensor

sys.path.append(str(ROOT))  # of the tests, which have the fake device

from magicdec.architectures.model_config import ModelConfig
from magicdec.cache.streaming import Streaming
from magicdec.costmodel.hardware import Hardware, hardware_named
from magicdec.costmodel.roofline import operators
from magicdec.costmodel.round import Setup, round_times
from magicdec.decoding.state import State
from magicdec.drafts.self import SelfSpeculation
from magicdec.models.transformer import Layer, Transformer
from magicdec.verification.sampling import Sampling
from tests.gpu_rehearsal.compile import Launch, Made, compiled
from tests.gpu_rehearsal.fake import LLAMA_8B, Op, Recording, engine, fake_cuda, prefilled, rounds
from tests.gpu_rehearsal.inductor import calls, emitted, pretended_gpu
from tests.gpu_rehearsal.sass import CLOCK_HZ, truncation_seconds

FOLDER = ROOT / "docs/predictions"
CELLS = (("H200", 24), ("H100", 11), ("8xH100", 64))
CONTEXT, GAMMA, BUDGET = 32768, 4, 512
TRUNCATION = ("collect", "find_cut", "write")  # kernels, in their order
GREEDY, SAMPLED = Sampling(), Sampling(0.8, 50, 0.9)
LAUNCH_S = 1.8e-6  # from the end of a kernel to the start of the next in a CUDA graph: assumed
# Of a multiprocessor that runs one program: 64 bytes a cycle from the L2 cache.
PROGRAM_BANDWIDTH = 64 * CLOCK_HZ
AIM = 1.35  # of a round over its bytes and FLOPs alone, on 8 GPUs
# Seconds of a sum in symmetric memory by the switch, by its bytes: published for H100s,
# vllm-project/vllm#42324.
MULTIMEM = ((512 << 10, 11e-6), (3 << 20, 23e-6))
BF16, FP32 = 2, 4
NORM = 4.5  # elements that a sum with its norm moves for each of a row, on average of a layer's two
HALVES = ((Layer, "before_attention"), (Layer, "after_attention"))
BESIDE = ((Transformer, "angles"), (Transformer, "normed"), (State, "inspect"), (State, "commit"))
PARTS = {
    "attention": ("triton:attend_split", "triton:attend_coded", "triton:merge_splits"),
    "head": ("mm",),
}
# The cost model's operators, by the kinds of kernels here.
OPERATORS = {
    "attention": ("attention",),
    "matmuls of layers": ("qkv", "output", "gate_up", "down"),
    "fused around them": ("norms", "rope_append", "gate"),
    "head": ("head",),
    "the rest": ("embedding", "choice"),
}


@dataclass(frozen=True)
class Kernel:
    """Cost of one launch."""

    part: str  # of the round
    kind: str
    num_bytes: float
    flops: float = 0.0
    rows: int = 1
    issuing_s: float = 0.0  # of its instructions, where these are what it takes longest for
    programs: int = 1 << 30  # where they may be fewer than a GPU's multiprocessors

    def seconds(self, hardware: Hardware) -> float:
        """Return the time of its bytes, its FLOPs or its instructions, whichever is longest."""
        bandwidth = min(hardware.bandwidth, self.programs * PROGRAM_BANDWIDTH)
        return max(
            self.num_bytes / bandwidth, self.flops / hardware.matmul_rate(self.rows), self.issuing_s
        )


def kernels(hardware: Hardware, batch: int, sampling: Sampling = GREEDY) -> list[Kernel]:
    """Return all kernels of a round on one of the GPUs."""
    ranks = hardware.count
    share = replace(LLAMA_8B.shared_by(ranks), vocab_size=LLAMA_8B.vocab_size // ranks)
    with fake_cuda() as recording:
        prepared = engine(
            "self",
            "streaming",
            share.num_layers,
            model=share,
            gamma=GAMMA,
            budget=BUDGET,
            sampling=sampling,
        )
        opened = prefilled(prepared, batch, CONTEXT)
        halves = Compiled(recording)
        with halves.watched():
            seen = rounds(opened, recording)
        found = [
            _kernel(op)
            for op in seen.ops
            if op.where not in halves.calls and op.name.removeprefix("triton:") not in TRUNCATION
        ]
        number = sum(halves.launches(method) for _, method in BESIDE)
        logits = [op for op in seen.ops if op.where == "inspect" and op.name == "sum"]
        moved = sum(op.read + op.written for op in logits)
        found += [Kernel("the round", "compiled beside layers", moved / number)] * number
    found += _truncations(seen.launches)
    for part, tokens, passes in (("propose", 1, GAMMA), ("verify", GAMMA + 1, 1)):
        layer = list(_layer(part, share, batch * tokens))
        found += layer * share.num_layers * passes
    return found


class Compiled:
    """The calls of what is compiled, and the kernels that Inductor emits for them."""

    def __init__(self, recording: Recording):
        self.recording = recording
        self.calls: dict[str, list[tuple[Callable, tuple]]] = {
            method: [] for _, method in (*BESIDE, *HALVES)
        }

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record operators under the method that they belong to, and keep the calls."""
        with ExitStack() as stack:
            for owner, method in (*BESIDE, *HALVES):
                stack.enter_context(
                    patch.object(owner, method, self._kept(getattr(owner, method), method))
                )
            yield

    def _kept(self, function: Callable, method: str) -> Callable:
        def call(owner: object, *args: object) -> object:
            self.calls[method].append((function.__get__(owner), args))
            with self.recording.under(method):
                return function(owner, *args)

        return call

    def launches(self, method: str) -> int:
        """Return the kernels of all calls of a method. Calls of the same shapes are compiled
        once.
        """
        shapes = [
            tuple(x.shape for x in args if isinstance(x, Tensor)) for _, args in self.calls[method]
        ]
        alike = dict(zip(shapes, self.calls[method], strict=True))
        with pretended_gpu():
            sources = {
                shape: emitted(torch.compile(function), args)
                for shape, (function, args) in alike.items()
            }
        return sum(len(calls(sources[shape])) for shape in shapes)


def _truncations(launches: list[Launch]) -> Iterator[Kernel]:
    """Yield the kernels that cut distributions. Top-k keeps few logits, which are copied."""
    made: dict[str, Made] = {}
    for launch in launches:
        if launch.name in TRUNCATION:
            made[launch.name] = made.get(launch.name) or compiled(launch, 90)
            rows, vocabulary = launch.arguments["out"].shape
            moved = (
                rows
                * vocabulary
                * {"collect": BF16, "find_cut": 0, "write": BF16 + FP32}[launch.name]
            )
            yield Kernel(
                "sampling",
                "truncation",
                moved,
                issuing_s=truncation_seconds(launch, made[launch.name], rows),
            )


def _kernel(op: Op) -> Kernel:
    kind = next((kind for kind, names in PARTS.items() if op.name in names), "the rest")
    return Kernel(
        op.where, kind, op.read + op.written, op.flops, op.inputs[0][0] if op.flops else 1
    )


def _layer(part: str, config: ModelConfig, rows: int) -> Iterator[Kernel]:
    """Yield the kernels of both halves of a layer, as Inductor fuses them."""
    E, F, D = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * D, config.num_kv_heads * D

    def matmul(inputs: int, outputs: int) -> Kernel:
        moved = BF16 * (inputs * outputs + rows * (inputs + outputs))
        return Kernel(part, "matmuls of layers", moved, 2 * rows * inputs * outputs, rows)

    def fused(elements: int, programs: int = 1 << 30) -> Kernel:
        return Kernel(part, "fused around them", BF16 * rows * elements, programs=programs)

    yield fused(5 * E, rows)  # sum and norm: a program for each row
    yield matmul(E, q + 2 * kv)
    yield fused(2 * (q + kv) + 2 * D)  # rotation
    yield fused(4 * kv)  # keys and values to the cache
    yield matmul(q, E)
    yield fused(4 * E, rows)  # sum and norm
    yield matmul(E, 2 * F)
    yield fused(3 * F)  # SwiGLU
    yield matmul(F, E)


def collectives(hardware: Hardware, batch: int) -> tuple[int, float, float]:
    """Return the sums over the ranks of a round, and their seconds: by the cost model, and in
    symmetric memory.
    """
    if hardware.count == 1:
        return 0, 0.0, 0.0
    each = 2 * LLAMA_8B.num_layers + 1  # of a pass: two in each layer, and the embedding's
    sizes = [batch * tokens * LLAMA_8B.hidden_size * BF16 for tokens in (*[1] * GAMMA, GAMMA + 1)]
    (small, fast), (large, slow) = MULTIMEM
    published = [fast + (slow - fast) * (size - small) / (large - small) for size in sizes]
    nccl = sum(each * hardware.allreduce_time(size, hardware.count) for size in sizes)
    return each * len(sizes), nccl, each * sum(published)


def modelled(setup: Setup) -> dict[str, float]:
    """Return the cost model's seconds of a round's bytes and FLOPs, by kinds of kernels."""
    hardware, times = setup.hardware, Counter[str]()
    drafting = setup.target_pass._replace(cached_tokens=setup.tokens_read)
    for forward, passes in (
        (drafting, GAMMA),
        (setup.target_pass._replace(query_tokens=GAMMA + 1), 1),
    ):
        for op in operators(forward, hardware):
            kind = next(kind for kind, names in OPERATORS.items() if op.name in names)
            compute = op.flops / hardware.matmul_rate(op.rows) if op.flops else 0.0
            times[kind] += (
                passes * op.number * max(op.bytes * op.stretch / hardware.bandwidth, compute)
            )
    return times


def parts(cell: str, hardware: Hardware, found: list[Kernel]) -> Iterator[Row]:
    """Yield the launches, bytes and times of each part of a round."""
    groups: dict[tuple[str, str], list[Kernel]] = {}
    for kernel in found:
        groups.setdefault((kernel.part, kernel.kind), []).append(kernel)
    for (part, kind), members in sorted(groups.items()):
        row = {"cell": cell, "part": part, "kernels_of": kind, "launches": len(members)}
        row |= {"gb": sum(k.num_bytes for k in members) / 1e9}
        yield row | {
            "ms": 1e3 * total(hardware, members),
            "launch_ms": 1e3 * LAUNCH_S * len(members),
        }


def total(hardware: Hardware, found: list[Kernel]) -> float:
    """Return the seconds of these kernels without their launches."""
    return sum(kernel.seconds(hardware) for kernel in found)


def summary(cell: str, hardware: Hardware, batch: int, found: list[Kernel]) -> Row:
    """Return the round as a whole: its launches, its sums over the ranks, and what sampling
    adds.
    """
    moving, launching = total(hardware, found), LAUNCH_S * len(found)
    number, nccl, symmetric = collectives(hardware, batch)
    whole, rows, norms = moving + launching, batch * (2 * GAMMA + 1), 2 * LLAMA_8B.num_layers
    saved = norms * (GAMMA + 1) * LAUNCH_S
    saved += norms * rows * NORM * LLAMA_8B.hidden_size * BF16 / hardware.bandwidth
    row: Row = {
        "cell": cell,
        "kernels": len(found),
        "moving_ms": 1e3 * moving,
        "launching_ms": 1e3 * launching,
    }
    row |= {"sums": number, "total_ms": 1e3 * (whole + nccl)}
    if number:
        row |= {"nccl_us": 1e6 * nccl / number, "symmetric_us": 1e6 * symmetric / number}
        row |= {
            "symmetric_total_ms": 1e3 * (whole + symmetric),
            "fused_total_ms": 1e3 * (whole + symmetric - saved),
        }
        row |= {"aim": AIM, "aim_us": 1e6 * (AIM * moving - whole) / number}
    return row | sampled(hardware, batch, found)


def sampled(hardware: Hardware, batch: int, greedy: list[Kernel]) -> Row:
    """Return what sampling adds to the round, by its truncations: each is several kernels."""
    found = kernels(hardware, batch, SAMPLED)
    each = [k.seconds(hardware) for k in found if k.kind == "truncation"]
    times = [1e3 * sum(each[i : i + len(TRUNCATION)]) for i in range(0, len(each), len(TRUNCATION))]
    before, after = (total(hardware, each) + LAUNCH_S * len(each) for each in (greedy, found))
    row = {
        "sampled_kernels": len(found),
        "sampled_ms": 1e3 * (after - before),
        "truncation_ms": sum(times),
    }
    return row | {"proposal_truncation_ms": min(times), "verify_truncation_ms": max(times)}


def comparison(cell: str, hardware: Hardware, batch: int, found: list[Kernel]) -> list[Row]:
    """Return this count and the cost model, operator by operator."""
    setup = Setup(
        LLAMA_8B, hardware, batch, CONTEXT, SelfSpeculation(), Streaming(budget=BUDGET, num_sink=4)
    )
    theirs, times, ours = modelled(setup), round_times(setup, GAMMA), Counter[str]()
    for kernel in found:
        ours[kernel.kind if kernel.kind in OPERATORS else "the rest"] += kernel.seconds(hardware)
    steps = [*[times.draft] * GAMMA, times.verify, times.overhead]
    pairs = [(kind, ours[kind], theirs[kind]) for kind in OPERATORS]
    pairs.append(("bytes and FLOPs", sum(ours.values()), sum(theirs.values())))
    pairs.append(
        ("sums by NCCL", collectives(hardware, batch)[1], sum(step.communication for step in steps))
    )
    pairs.append(
        (
            "launches / layer and round overhead",
            LAUNCH_S * len(found),
            sum(step.overhead for step in steps),
        )
    )
    sums = pairs[len(OPERATORS) :]
    pairs.append(("altogether", sum(mine for _, mine, _ in sums), sum(its for _, _, its in sums)))
    keys = ("kernel_by_kernel_ms", "cost_model_ms")
    return [
        {"cell": cell, "of": name, **dict(zip(keys, (1e3 * a, 1e3 * b), strict=True))}
        for name, a, b in pairs
    ]


def main() -> None:
    """Count, and write the CSV files and the page."""
    argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0]).parse_args()
    files: dict[str, list[Row]] = {"gpu": [], "gpu-parts": [], "gpu-rounds": []}
    for name, batch in CELLS:
        hardware, cell = hardware_named(name, stack="magicdec"), f"{name}, {batch} x {CONTEXT:,}"
        found = kernels(hardware, batch)
        files["gpu"] += comparison(cell, hardware, batch, found)
        files["gpu-parts"] += parts(cell, hardware, found)
        files["gpu-rounds"].append(
            summary(cell, hardware, batch, found) | {"measured_by": setting()}
        )
        print(f"{name}: done", flush=True)
    for stem, rows in files.items():
        write_csv(FOLDER / f"{stem}.csv", [rounded(row) for row in rows])
    render.write("predictions/gpu")


if __name__ == "__main__":
    main()
