"""Predict a round of Llama-3.1-8B on GPUs kernel by kernel, without one: docs/predictions/gpu.md.

    python benchmarks/gpu_static.py            # a minute on a CPU; nothing is computed

The round runs on a fake CUDA device, where every kernel outside of the compiled layers is recorded with the bytes that
it moves at least. The compiled halves of a layer are what PyTorch's Inductor emits for them. A kernel takes the time of
its bytes or of its FLOPs, at the rates that the cost model takes from its calibration.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch
from page import ROOT, provenance
from torch import Tensor

sys.path.append(str(ROOT))  # of the tests, which have the fake device

from magicdec.architectures import ModelConfig
from magicdec.cache.streaming import Streaming
from magicdec.costmodel.hardware import Hardware, hardware_named
from magicdec.costmodel.roofline import operators
from magicdec.costmodel.round import Setup, round_times
from magicdec.decoding.state import State
from magicdec.drafts.self import SelfSpeculation
from magicdec.models.transformer import Layer, Transformer
from magicdec.tracking.cells import markdown_table
from magicdec.verification.sampling import Sampling
from tests.gpu_rehearsal.compile import Launch, Made, compiled
from tests.gpu_rehearsal.fake import LLAMA_8B, Op, Recording, engine, fake_cuda, prefilled, rounds
from tests.gpu_rehearsal.inductor import calls, emitted, pretended_gpu
from tests.gpu_rehearsal.sass import truncation_seconds

PAGE = ROOT / "docs/predictions/gpu.md"
CELLS = (("H200", 24), ("H100", 11), ("8xH100", 64))
CONTEXT, GAMMA, BUDGET = 32768, 4, 512
TRUNCATION = ("collect", "find_cut", "write")  # kernels, in their order
GREEDY, SAMPLED = Sampling(), Sampling(0.8, 50, 0.9)
LAUNCH_S = 1.8e-6  # from the end of a kernel to the start of the next in a CUDA graph: assumed
AIM = 1.35  # of a round over its bytes and FLOPs alone, on 8 GPUs
# Seconds of a sum in symmetric memory by the switch, by its bytes: published for H100s, vllm-project/vllm#42324.
MULTIMEM = ((512 << 10, 11e-6), (3 << 20, 23e-6))
BF16, FP32 = 2, 4
NORM = 4.5  # elements that a sum with its norm moves for each of a row, on average of a layer's two
HALVES = ((Layer, "before_attention"), (Layer, "after_attention"))
BESIDE = ((Transformer, "angles"), (Transformer, "normed"), (State, "inspect"), (State, "commit"))
PARTS = {
    "attention": ("triton:attend_split", "triton:merge_splits"),
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
    """What one launch takes."""

    part: str  # of the round
    kind: str
    num_bytes: float
    flops: float = 0.0
    rows: int = 1
    issuing_s: float = 0.0  # of its instructions, where these are what it takes longest for

    def seconds(self, hardware: Hardware) -> float:
        """Return the time of its bytes, its FLOPs or its instructions, whichever is longest."""
        return max(self.num_bytes / hardware.bandwidth, self.flops / hardware.matmul_rate(self.rows), self.issuing_s)


def kernels(hardware: Hardware, batch: int, sampling: Sampling = GREEDY) -> list[Kernel]:
    """Return all kernels of a round on one of the GPUs."""
    ranks = hardware.count
    share = replace(LLAMA_8B.shared_by(ranks), vocab_size=LLAMA_8B.vocab_size // ranks)
    with fake_cuda() as recording:
        prepared = engine(
            "self", "streaming", share.num_layers, model=share, gamma=GAMMA, budget=BUDGET, sampling=sampling
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
        self.calls: dict[str, list[tuple[Callable, tuple]]] = {method: [] for _, method in (*BESIDE, *HALVES)}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record operators under the method that they belong to, and keep the calls."""
        with ExitStack() as stack:
            for owner, method in (*BESIDE, *HALVES):
                stack.enter_context(patch.object(owner, method, self._kept(getattr(owner, method), method)))
            yield

    def _kept(self, function: Callable, method: str) -> Callable:
        def call(owner: object, *args: object) -> object:
            self.calls[method].append((function.__get__(owner), args))
            with self.recording.under(method):
                return function(owner, *args)

        return call

    def launches(self, method: str) -> int:
        """Return the kernels of all calls of a method. Calls of the same shapes are compiled once."""
        shapes = [tuple(x.shape for x in args if isinstance(x, Tensor)) for _, args in self.calls[method]]
        alike = dict(zip(shapes, self.calls[method], strict=True))
        with pretended_gpu():
            sources = {shape: emitted(torch.compile(function), args) for shape, (function, args) in alike.items()}
        return sum(len(calls(sources[shape])) for shape in shapes)


def _truncations(launches: list[Launch]) -> Iterator[Kernel]:
    """Yield the kernels that cut distributions. Top-k keeps few logits, which are copied."""
    made: dict[str, Made] = {}
    for launch in launches:
        if launch.name in TRUNCATION:
            made[launch.name] = made.get(launch.name) or compiled(launch, 90)
            rows, vocabulary = launch.arguments["out"].shape
            moved = rows * vocabulary * {"collect": BF16, "find_cut": 0, "write": BF16 + FP32}[launch.name]
            yield Kernel("sampling", "truncation", moved, issuing_s=truncation_seconds(launch, made[launch.name], rows))


def _kernel(op: Op) -> Kernel:
    kind = next((kind for kind, names in PARTS.items() if op.name in names), "the rest")
    return Kernel(op.where, kind, op.read + op.written, op.flops, op.inputs[0][0] if op.flops else 1)


def _layer(part: str, config: ModelConfig, rows: int) -> Iterator[Kernel]:
    """Yield the kernels of both halves of a layer, as Inductor fuses them."""
    E, F, D = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * D, config.num_kv_heads * D

    def matmul(inputs: int, outputs: int) -> Kernel:
        moved = BF16 * (inputs * outputs + rows * (inputs + outputs))
        return Kernel(part, "matmuls of layers", moved, 2 * rows * inputs * outputs, rows)

    def fused(elements: int) -> Kernel:
        return Kernel(part, "fused around them", BF16 * rows * elements)

    yield fused(5 * E)  # sum and norm
    yield matmul(E, q + 2 * kv)
    yield fused(2 * (q + kv) + 2 * D)  # rotation
    yield fused(4 * kv)  # keys and values to the cache
    yield matmul(q, E)
    yield fused(4 * E)  # sum and norm
    yield matmul(E, 2 * F)
    yield fused(3 * F)  # SwiGLU
    yield matmul(F, E)


def collectives(hardware: Hardware, batch: int) -> tuple[int, float, float]:
    """Return the sums over the ranks of a round, and their seconds: by the cost model, and in symmetric memory."""
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
    for forward, passes in ((drafting, GAMMA), (setup.target_pass._replace(query_tokens=GAMMA + 1), 1)):
        for op in operators(forward, hardware):
            kind = next(kind for kind, names in OPERATORS.items() if op.name in names)
            compute = op.flops / hardware.matmul_rate(op.rows) if op.flops else 0.0
            times[kind] += passes * op.number * max(op.bytes * op.stretch / hardware.bandwidth, compute)
    return times


def section(name: str, batch: int) -> list[str]:
    """Return the lines of one cell."""
    hardware = hardware_named(name, stack="magicdec")
    found = kernels(hardware, batch)
    groups: dict[tuple[str, str], list[Kernel]] = {}
    for kernel in found:
        groups.setdefault((kernel.part, kernel.kind), []).append(kernel)
    rows = []
    for (part, kind), members in sorted(groups.items()):
        moved, seconds = sum(k.num_bytes for k in members), sum(k.seconds(hardware) for k in members)
        times = [f"{1e3 * t:.3f}" for t in (seconds, LAUNCH_S * len(members))]
        rows.append([part, kind, f"{len(members):,}", f"{moved / 1e9:.3f}", *times])
    table = markdown_table(["part", "kernels of", "launches", "GB", "ms of bytes or FLOPs", "ms of launches"], rows)
    lines = [f"## {name}, {batch} x {CONTEXT:,}", "", *summary(hardware, batch, found), ""]
    return [*lines, *sampled(hardware, batch, found), "", comparison(hardware, batch, found), table]


def summary(hardware: Hardware, batch: int, found: list[Kernel]) -> Iterator[str]:
    """Yield a paragraph on the round as a whole."""
    moving, launching = sum(kernel.seconds(hardware) for kernel in found), LAUNCH_S * len(found)
    yield f"{len(found):,} kernels move for {1e3 * moving:.1f} ms; launches add {launching / moving:.1%}."
    number, nccl, symmetric = collectives(hardware, batch)
    total = moving + launching
    if not number:
        yield f"In all {1e3 * total:.1f} ms, {total / moving:.2f} times the bytes and FLOPs alone."
        return
    faster = "symmetric memory, as published for H100s, presumably eight"
    for how, summing in (("NCCL, as calibrated", nccl), (faster, symmetric)):
        whole = total + summing
        yield f"{number} sums over the ranks by {how}: {1e3 * summing:.1f} ms, {1e6 * summing / number:.0f} us each;"
        yield f"in all {1e3 * whole:.1f} ms, {whole / moving:.2f} times the bytes and FLOPs alone."
    yield f"The aim is {AIM} times: a sum may then take {1e6 * (AIM * moving - total) / number:.1f} us."
    rows, norms = batch * (2 * GAMMA + 1), 2 * LLAMA_8B.num_layers
    saved = norms * (GAMMA + 1) * LAUNCH_S
    saved += norms * rows * NORM * LLAMA_8B.hidden_size * BF16 / hardware.bandwidth
    yield "With each sum and the norm behind it in one kernel, which this project does not have, it would be"
    yield f"{(total + symmetric - saved) / moving:.2f} times. Fewer sums would need another division of the layers."


def sampled(hardware: Hardware, batch: int, greedy: list[Kernel]) -> Iterator[str]:
    """Yield a paragraph on what sampling adds to the round."""
    found = kernels(hardware, batch, SAMPLED)
    each = [k.seconds(hardware) for k in found if k.kind == "truncation"]
    times = [sum(each[i : i + len(TRUNCATION)]) for i in range(0, len(each), len(TRUNCATION))]
    before, after = (sum(k.seconds(hardware) + LAUNCH_S for k in each) for each in (greedy, found))
    settings = f"temperature {SAMPLED.temperature}, top-k {SAMPLED.top_k} and top-p {SAMPLED.top_p}"
    yield f"Sampled at {settings}, the round has {len(found):,} kernels and takes {1e3 * (after - before):.1f} ms more."
    yield f"Its {len(times)} truncations take {1e3 * sum(times):.2f} ms of that, by their bytes or instructions:"
    yield f"{1e3 * min(times):.2f} ms for each token of a proposal, {1e3 * max(times):.2f} ms for a verification."


def comparison(hardware: Hardware, batch: int, found: list[Kernel]) -> str:
    """Return a table of this count and the cost model, operator by operator."""
    setup = Setup(LLAMA_8B, hardware, batch, CONTEXT, SelfSpeculation(), Streaming(budget=BUDGET, num_sink=4))
    theirs, times, ours = modelled(setup), round_times(setup, GAMMA), Counter[str]()
    for kernel in found:
        ours[kernel.kind if kernel.kind in OPERATORS else "the rest"] += kernel.seconds(hardware)
    steps = [*[times.draft] * GAMMA, times.verify, times.overhead]
    pairs = [(kind, ours[kind], theirs[kind]) for kind in OPERATORS]
    pairs.append(("bytes and FLOPs", sum(ours.values()), sum(theirs.values())))
    pairs.append(("sums by NCCL", collectives(hardware, batch)[1], sum(step.communication for step in steps)))
    pairs.append(("launches / layer and round overhead", LAUNCH_S * len(found), sum(step.overhead for step in steps)))
    sums = pairs[len(OPERATORS) :]
    pairs.append(("altogether", sum(mine for _, mine, _ in sums), sum(its for _, _, its in sums)))
    rows = [[name, *(f"{1e3 * t:.3f}" for t in pair), f"{1e3 * (pair[1] - pair[0]):+.3f}"] for name, *pair in pairs]
    return markdown_table(["ms of", "kernel by kernel", "cost model", "difference"], rows)


INTRODUCTION = f"""
Self-speculation, StreamingLLM's cache of {BUDGET} entries, gamma {GAMMA}, greedy, bfloat16, `attention=triton`,
`hardware.compile`, one CUDA graph. Kernels that are not compiled are recorded on a fake CUDA device, with the bytes
that they move at least; the others are those that Inductor emits for an H100 (`tests/gpu_rehearsal/` counts a layer's).
Bandwidth, matmul rate and all-reduces are the cost model's, from its calibration ([how](../cost-model.md)).

Assumed: {1e6 * LAUNCH_S:.1f} us between two kernels, and the published times of sums in symmetric memory.
The cost model's `layer_overhead_us` and `round_overhead_us` are fitted to the MagicDec paper's times, so they hold all
that its software and GPUs add to the bytes: launches, kernels that fall short, ranks that wait. They are most of the
difference to the count of launches here, and stay until they can be calibrated on this software.
A truncation is three kernels. Each takes the time of its bytes, or of its instructions on an H100 at 1.755 GHz.
Not included: kernels that fall short of the bandwidth, waves that are not full, and the gathering of logits over ranks.
"""


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args()
    lines = [
        "# Predicted, not measured: a round of Llama-3.1-8B on GPUs, kernel by kernel",
        "",
        f"{provenance('python benchmarks/gpu_static.py')}. No GPU is involved.",
        INTRODUCTION,
    ]
    for name, batch in CELLS:
        lines += section(name, batch)
        print(f"{name}: done", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
