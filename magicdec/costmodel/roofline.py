"""The roofline of one forward pass: FLOPs and bytes of every operator, and the time they take.

B rows, T query tokens each, S cached tokens each, N = B T rows of a matmul; one rank's share under
tensor parallelism. An operator takes max(bytes / bandwidth, FLOPs / rate), plus the part of the
shorter that the machine does not hide behind the longer. A layer adds launch overhead and, with
several ranks, two all-reduces (Megatron).
"""

from functools import cache, lru_cache
from math import ceil
from typing import NamedTuple

from magicdec.architectures.layer_facts import Matrices, TokenMemory
from magicdec.architectures.model_config import ModelConfig
from magicdec.costmodel.hardware import Device, Hardware
from magicdec.costmodel.matmuls import VECTOR_SHARE
from magicdec.costmodel.routing import UNIFORM, Routing
from magicdec.costmodel.stacks import Stack

BF16 = 2.0  # bytes
# Split-KV kernels stop splitting once tiles of (row, KV head) fill this share of the places a GPU
# has for them (num_splits_heuristic in FlashAttention's flash_api.cpp; FlashInfer's planner
# likewise), two places to an SM.
UNSPLIT_SHARE, TILES_PER_SM = 0.8, 2
# Passes whose operators are kept: a calibration tries many efficiencies on the passes of its rows.
MOST_PASSES = 4096


@cache
def _share(model: ModelConfig, ranks: int) -> ModelConfig:
    """Return one rank's share of a model of any kind."""
    return model.shared_by(ranks)


class Operator(NamedTuple):
    """One kind of kernel in a pass, on one rank."""

    name: str
    reads: str  # what its bytes mostly are: weights, kv or activations
    number: int  # how many of them a pass has
    flops: float  # of each
    bytes: float
    rows: float  # that share what is read: what a matmul's rate saturates with
    stretch: float = 1.0  # of the memory's time, where the GPU is left partly idle
    is_exact: bool = True  # weights are not codes


class StepTime(NamedTuple):
    """Seconds of a step by what bounds them."""

    weights: float = 0.0  # reading weights
    kv: float = 0.0  # reading keys and values
    activations: float = 0.0  # moving everything else
    compute: float = 0.0  # matmuls and attention that are bound by FLOPs
    communication: float = 0.0
    overhead: float = 0.0  # launches, gaps, the host

    @property
    def total(self) -> float:
        """Return the sum of all parts, in seconds."""
        return sum(self)

    @property
    def largest(self) -> str:
        """Return the part that takes longest."""
        return max(self._fields, key=lambda name: getattr(self, name))

    def plus(self, other: "StepTime", times: float = 1.0) -> "StepTime":
        """Return the sum with `times` the other, part by part."""
        return StepTime(*(mine + times * its for mine, its in zip(self, other, strict=True)))

    def scaled(self, factor: float) -> "StepTime":
        """Return every part times a factor."""
        return StepTime(*(part * factor for part in self))


class Pass(NamedTuple):
    """One forward pass: its shape, its ranks, and the bytes of its elements."""

    model: ModelConfig
    batch: int
    query_tokens: float  # on average, where rows differ
    cached_tokens: float
    ranks: int = 1
    weight_bytes: float = BF16  # of an element of a layer's matrices
    kv_bytes: float = BF16
    activation_bytes: float = BF16
    # Bytes of an element of the head's weights, which are never quantized; None: as activations.
    head_bytes: float | None = None
    # The query tokens of a row whose logits are computed; None: all of them. With 0, the head is
    # not read.
    logit_tokens: float | None = None
    chooses: bool = True  # whether the choice of tokens from the logits belongs to it
    splits: bool = True  # attention is split over the cached tokens where rows leave SMs idle
    routing: Routing = UNIFORM  # of tokens to experts


def step_time(forward: Pass, hardware: Hardware) -> StepTime:
    """Return the seconds of a forward pass on a machine."""
    times = dict.fromkeys(StepTime._fields, 0.0)
    bandwidth = hardware.bandwidth
    exposed = 1 - hardware.efficiency.overlap
    for op in operators(forward, hardware):
        memory = op.bytes * op.stretch / bandwidth
        share = hardware.efficiency.attention_fraction if op.reads == "kv" else 1.0
        compute = op.flops / (share * hardware.matmul_rate(op.rows)) if op.flops else 0.0
        seconds = max(memory, compute) + exposed * min(memory, compute)
        if op.reads == "weights":
            memory, compute, seconds = _matmul_times(op, hardware, op.is_exact) or (
                memory,
                compute,
                seconds,
            )
        times[op.reads if memory >= compute else "compute"] += op.number * seconds
    model, layers = forward.model, forward.model.num_layers
    message = forward.batch * forward.query_tokens * model.hidden_size * forward.activation_bytes
    times["communication"] = 2 * layers * hardware.allreduce_time(message, forward.ranks)
    achieved = hardware.efficiency
    overhead_us = layers * achieved.layer_overhead_us + achieved.step_overhead_us
    if achieved.expert_overhead_us:
        of_experts = (m.number * _touched(m, forward) for m in model.matrices if m.experts)
        overhead_us += achieved.expert_overhead_us * sum(of_experts)
    times["overhead"] = 1e-6 * overhead_us
    return StepTime(**times)


def _touched(matrices: Matrices, forward: Pass) -> float:
    """Return how many of a layer's experts a pass touches."""
    return forward.routing.touched(
        matrices.experts, matrices.experts_per_token, forward.batch, forward.query_tokens
    )


def _matmul_times(
    op: Operator, hardware: Hardware, is_exact: bool
) -> tuple[float, float, float] | None:
    """Return the seconds of reading, of computing and of a matmul of an engine; None where its
    machine's calibration says all.
    """
    device = hardware.device
    if not is_exact and op.rows <= hardware.stack.vector_rows and device.vector_flops:
        reading = op.bytes / hardware.bandwidth
        computing = (op.rows - 1) / op.rows * op.flops / (VECTOR_SHARE * device.vector_flops)
        # Decoding the weights for one row is hidden behind reading them; for others it is not.
        return reading, computing, reading + computing
    if hardware.shares is None:
        return None
    reading = op.bytes / device.bandwidth
    computing = op.flops / device.flops
    elements = op.flops / (2 * op.rows)
    seconds = hardware.shares.seconds(op.rows, elements, reading, computing, is_exact)
    return reading, computing, seconds


def operators(forward: Pass, hardware: Hardware) -> tuple[Operator, ...]:
    """Return all operators of a pass on one rank."""
    return _operators(forward, hardware.stack, hardware.device)


@lru_cache(MOST_PASSES)
def _operators(forward: Pass, stack: Stack, device: Device) -> tuple[Operator, ...]:
    model = _share(forward.model, forward.ranks)
    rows = forward.batch * forward.query_tokens
    hidden, activation = model.hidden_size, forward.activation_bytes
    vocabulary = ceil(model.num_logits / (forward.ranks if stack.sharded_head else 1))
    head_bytes = forward.head_bytes or activation
    tokens = forward.query_tokens if forward.logit_tokens is None else forward.logit_tokens
    head = _matmul(
        Matrices("head", 1, hidden, vocabulary, stored_bytes=head_bytes),
        forward._replace(query_tokens=tokens),
    )
    head = head._replace(is_exact=forward.weight_bytes >= BF16)  # read by the kernels of its layers
    passes = stack.logit_passes if forward.chooses else 0

    def elementwise(name: str, number: int, elements_per_row: float) -> Operator:
        return Operator(
            name, "activations", number, 0.0, rows * elements_per_row * activation, rows
        )

    # Queries, keys and values that are rotated and appended: read and written.
    rotated = sum(memory.layers * (memory.scores // 2 + memory.entry) for memory in model.memories)
    return (
        elementwise("embedding", 1, 2 * hidden),
        *(_matmul(matrices, forward) for matrices in model.matrices),
        *(op for memory in model.memories for op in _reads(memory, forward, device)),
        # Two norms with their residual sums: read both, write both. The gate.
        elementwise("norms", model.num_layers, 8 * hidden),
        elementwise("rope_append", 1, 4 * rotated),
        elementwise("gate", 1, 3 * model.gated_features),
        *([head] if tokens else ()),
        elementwise("choice", 1, passes * vocabulary * tokens / forward.query_tokens),
    )


def _matmul(matrices: Matrices, forward: Pass) -> Operator:
    """Return the products with equal matrices; of experts, with those that the pass touches."""
    size = matrices.stored_bytes or forward.weight_bytes
    weights = matrices.inputs * matrices.outputs
    rows = forward.batch * forward.query_tokens
    read = 1.0
    if matrices.experts:
        read = _touched(matrices, forward)
        rows *= matrices.experts_per_token
    activations = rows * (matrices.inputs + matrices.outputs) * forward.activation_bytes
    return Operator(
        matrices.name,
        "weights",
        matrices.number,
        flops=2 * rows * weights,
        bytes=read * weights * size + activations,
        rows=rows / read,
        is_exact=size >= BF16,
    )


def _reads(memory: TokenMemory, forward: Pass, device: Device) -> list[Operator]:
    """Return what equal layers read of earlier tokens: entries, an index of them, and states."""
    batch, tokens = forward.batch, forward.query_tokens
    ops = []
    if memory.entry:
        # Where it is not split, each query head has a tile of its own.
        heads = memory.heads if forward.splits else memory.query_heads
        stretch = tile_stretch(batch * heads, device.num_sms, forward.splits)
        cached = batch * memory.read(forward.cached_tokens)
        rows = tokens * memory.query_heads / memory.heads
        flops = 2 * tokens * cached * memory.scores
        num_bytes = cached * memory.entry * forward.kv_bytes
        ops.append(Operator("attention", "kv", memory.layers, flops, num_bytes, rows, stretch))
    if memory.index_entry:
        cached = batch * memory.kept(forward.cached_tokens)
        flops = 2 * tokens * cached * memory.index_scores
        num_bytes = cached * memory.index_entry * forward.kv_bytes
        rows = tokens * memory.index_scores / memory.index_entry
        ops.append(Operator("index", "kv", memory.layers, flops, num_bytes, rows))
    if memory.state_bytes:
        # Read once, and written after each token, because any of them may be the last one accepted.
        num_bytes = batch * memory.state_bytes * (1 + tokens)
        ops.append(Operator("states", "activations", memory.layers, 0.0, num_bytes, batch * tokens))
    return ops


def entries_time(forward: Pass, hardware: Hardware) -> StepTime:
    """Return the seconds in which a head makes entries of the target's hidden states in all its
    layers: without attention and MLP.
    """
    model = _share(forward.model, forward.ranks)
    layers = model.num_layers
    outputs = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    fused = model.num_fusions * model.fused_parameters
    weights = fused + layers * model.qkv_inputs * outputs
    rows = forward.batch * forward.query_tokens
    in_layers = layers * (model.hidden_size + model.qkv_inputs + outputs)
    moved = rows * (fused // model.hidden_size + in_layers) * forward.activation_bytes
    reading = weights * forward.weight_bytes / hardware.bandwidth
    compute = 2 * rows * weights / hardware.matmul_rate(rows)
    overhead = 1e-6 * layers * hardware.efficiency.layer_overhead_us
    return StepTime(
        weights=reading if reading >= compute else 0.0,
        activations=moved / hardware.bandwidth,
        compute=compute if compute > reading else 0.0,
        overhead=overhead,
    )


def choice_time(forward: Pass, hardware: Hardware) -> float:
    """Return the seconds to choose tokens from the logits, for a pass that does not include the
    choice.
    """
    share = forward.model.num_logits / (forward.ranks if hardware.stack.sharded_head else 1)
    moved = (
        hardware.stack.logit_passes
        * forward.batch
        * forward.query_tokens
        * share
        * forward.activation_bytes
    )
    return moved / hardware.bandwidth


def tile_stretch(tiles: int, num_sms: int | None, splits: bool = True) -> float:
    """Return how much longer attention takes because unsplit tiles come in waves, the last of them
    unfilled. With `splits`, few tiles are split until they fill all places.

    A full wave runs at the memory's speed. Of the last, each tile has an SM to itself, and draws at
    most the bandwidth of the two tiles that otherwise share it: it takes at least half a wave.
    (Both paper tables with 256 tiles on an A100, 216 places, show it: their KV reads take 1.25
    times as long per byte as those with fewer.)
    """
    if num_sms is None:
        return 1.0
    places = TILES_PER_SM * num_sms
    waves, rest = divmod(tiles, places)
    if (splits and (tiles < UNSPLIT_SHARE * places or waves == 0)) or rest == 0:
        return 1.0
    return (waves + max(rest / places, 1 / TILES_PER_SM)) * places / tiles


def arithmetic_intensity(forward: Pass, hardware: Hardware) -> float:
    """Return FLOPs per byte of a whole pass on one rank."""
    ops = operators(forward, hardware)
    flops = sum(op.number * op.flops for op in ops)
    return flops / sum(op.number * op.bytes for op in ops)


def layer_weights(model: ModelConfig) -> int:
    """Return the elements of the matrices of all layers, which are what a draft's quantization
    makes smaller.
    """
    return sum(matrices.elements for matrices in model.matrices)
