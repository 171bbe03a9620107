"""Build the objects of a run from its plan, and estimate their memory. Nothing else constructs them."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from magicdec.attention.base import Attention
from magicdec.config.registry import BACKENDS, CORPORA
from magicdec.costmodel.memory import Memory
from magicdec.data import PromptRequest, Prompts, load_prompts
from magicdec.data.tokenizer import load_tokenizer
from magicdec.engine.native import NativeEngine
from magicdec.errors import UserError, to_stderr
from magicdec.kernels import library, toolchain
from magicdec.measure import memory
from magicdec.measure.footprint import Footprint, UniformAttention, footprint, largest_batch
from magicdec.models import checkpoint
from magicdec.models.parallel import Share, share
from magicdec.models.transformer import Transformer
from magicdec.planning import shared
from magicdec.planning.resolve import Model, Plan
from magicdec.tracking.progress import Progress
from magicdec.units import GIB

log = logging.getLogger(__name__)

# Memory that suffices without a look at activations: so many times what weights and caches take, and more bytes.
AMPLE, SPARE = 2, 4 * GIB


def engine(plan: Plan, progress: Progress) -> NativeEngine:
    """Load the weights and assemble the engine."""
    torch.backends.cuda.matmul.allow_tf32 = False  # fp32 means fp32
    name = plan.config.attention
    log.info(plan.reasons)
    if any(obstacle in plan.reasons for obstacle in (*library.OBSTACLES, toolchain.NEEDS_C, "hardware.compile=false")):
        to_stderr(f"warning: {plan.reasons}; decoding is slower without it")
    with progress.task(f"attention={name}", total=1) as task:  # cpp is compiled at its first use
        attention = BACKENDS[name].work()
        task.advance(1)

    def load(model: Model) -> Transformer:
        return shared.SHARED.model(shared.model_key(plan, model), lambda: _load(model, plan, attention, progress))

    return _engine(plan, load)


def _engine(plan: Plan, load: Callable[[Model], Transformer]) -> NativeEngine:
    c = plan.config
    target = load(plan.target)
    draft_model = _draft_model(plan, target, load)
    return NativeEngine(c.batch, c.sampling, c.draft, c.cache, c.hardware, target, draft_model)


def prompts(
    plan: Plan, tokenizer: object | None, num_rows: int | None = None, context_len: int | None = None
) -> Prompts:
    """Return prompts as token ids: by default as many and as long as all batches of the run need."""
    c = plan.config
    request = PromptRequest(
        num_rows=int(c.batch.size) * c.batch.num_batches if num_rows is None else num_rows,
        context_len=c.batch.context_len if context_len is None else context_len,
        vocab_size=plan.target.config.vocab_size,
        tokenizer=tokenizer,
        seed=c.data.seed,
        path=c.data.path,
        task=c.data.task,
        keys=c.data,
        most_new_tokens=c.batch.generate_len if c.scenario.serves else None,
    )
    return load_prompts(c.data.name, request)


def tokenizer(plan: Plan) -> object | None:
    """Return the target's tokenizer; None where the data needs none."""
    if CORPORA[plan.config.data.name].facts.is_noise:
        return None
    if plan.target.folder is None:
        raise UserError(
            f"data={plan.config.data.name} needs the target's tokenizer, and target.weights=random loads none; "
            "use data=random"
        )
    folder = plan.target.folder
    return shared.SHARED.fact(("tokenizer", folder, plan.target.fingerprint), lambda: load_tokenizer(folder))


def estimate(plan: Plan, num_rows: int, context_len: int) -> Memory:
    """Estimate the memory that the work takes on each device; with several ranks, on that of rank 0.

    To serve requests, `num_rows` slots take part in rounds while one more row is prefilled.
    """
    held = plan.held(num_rows, context_len)
    if plan.predicts:
        return held
    workspace, caches = memory.workspace_bytes(plan.device), held.target_kv + held.draft_kv
    if not plan.config.scenario.serves:
        found = _footprint(plan, num_rows, context_len)
        captured = found.of_rounds if plan.config.hardware.captures else 0
        return replace(held, transient=found.peak - caches + workspace, captured=captured)
    slots, single = _footprint(plan, num_rows, context_len, prefills=False), _footprint(plan, 1, context_len)
    one = plan.held(1, context_len)
    held = replace(held, target_kv=held.target_kv + one.target_kv, draft_kv=held.draft_kv + one.draft_kv)
    transient = single.peak - one.target_kv - one.draft_kv + workspace
    if plan.config.hardware.captures:  # captured graphs have memory of their own
        return replace(held, transient=transient, captured=slots.of_rounds)
    return replace(held, transient=transient + slots.peak - caches + workspace)  # a round may come between two chunks


def _footprint(plan: Plan, num_rows: int, context_len: int, prefills: bool = True) -> Footprint:
    on_cpu = plan.device.type == "cpu"
    attention = UniformAttention() if on_cpu else BACKENDS[plan.config.attention].work()

    def load(model: Model) -> Transformer:
        part = Share(0, model.num_ranks, 0, plan.num_ranks)
        return _without_weights(model, plan, attention, part)

    audited = plan.is_audited and plan.config.scenario.audits
    return footprint(_engine(plan, load), num_rows, context_len, audited, prefills)


def check_memory(plan: Plan, num_rows: int, context_len: int) -> Memory | None:
    """Raise UserError, with the largest batch that fits, if the work exceeds the memory.

    Return the estimate; None where weights and caches leave so much room that activations need no rehearsal.
    """
    shared.SHARED.keep_only(shared.keys(plan))
    available = memory.available_bytes(plan.device) + shared.SHARED.num_bytes
    if plan.device.type == "cpu":
        available //= plan.num_ranks
    available -= memory.reserved_bytes(plan.device)
    if AMPLE * plan.held(num_rows, context_len).total + SPARE <= available:
        return None
    found = estimate(plan, num_rows, context_len)
    if found.needed <= available:
        return found
    fits = largest_batch(lambda rows: estimate(plan, rows, context_len).needed, num_rows, available)
    smaller = "the target, batch.context_len, batch.prefill_chunk or hardware.dtype"
    advice = f"batch.size={fits} would fit" if fits else f"not even one row fits: choose a smaller one of {smaller}"
    parts = {"weights": found.weights, "KV cache": found.target_kv, "draft's cache": found.draft_kv}
    parts["activations"] = found.transient + found.captured
    raise UserError(
        f"batch.size={num_rows} at batch.context_len={context_len} needs about {found.needed / GIB:.2f} GiB "
        f"({', '.join(f'{name} {size / GIB:.2f}' for name, size in parts.items())}), but {available / GIB:.2f} GiB are "
        f"available{' to each rank' if plan.num_ranks > 1 else ''}; {advice}"
    )


def num_bytes(plan: Plan) -> float:
    """Return the memory that the work needs on each device, for the largest batch."""
    return estimate(plan, *plan.config.scenario.largest(plan.config.batch)).needed


def _without_weights(model: Model, plan: Plan, attention: Attention, part: Share) -> Transformer:
    """Return a share of a model, on the meta device: its weights have a shape and a type but no storage."""
    config = part.config(model.config)
    kind: Any = Transformer
    if config.is_head:
        from magicdec.models.head import Head

        kind = Head
    with torch.device("meta"):
        transformer = kind(config, attention, part).to(plan.dtype)
    for name in plan.in_bfloat16(model):
        weight = transformer.get_parameter(name)
        weight.data = weight.data.bfloat16()
    return transformer.eval().requires_grad_(False)


def _load(model: Model, plan: Plan, attention: Attention, progress: Progress) -> Transformer:
    """Load this rank's share of a model onto its device. Random weights are made there, in the run's dtype."""
    part = share(model.num_ranks, plan.config.hardware.all_reduce, plan.device)
    transformer = _without_weights(model, plan, attention, part)
    if model.folder is None:
        transformer.to_empty(device=plan.device)
        generator = torch.Generator(plan.device).manual_seed(part.rank)
        for weight in transformer.parameters():
            weight.normal_(0, 0.02, generator=generator) if weight.dim() > 1 else weight.fill_(1.0)
        for ids_V in transformer.buffers():  # of a head's tokens
            torch.arange(len(ids_V), out=ids_V)
    else:
        total = sum(weight.numel() for weight in transformer.parameters())
        with progress.task(f"loading {model.key}", total=total) as task:
            where = (model.folder, model.config, plan.dtype, plan.device)
            state = checkpoint.load(*where, task.advance, part, plan.in_bfloat16(model))
        transformer.load_state_dict(state, assign=True)
    if plan.config.hardware.compile:
        transformer.compile_layers()
    return transformer.requires_grad_(False)


def _draft_model(plan: Plan, target: Transformer, load: Callable[[Model], Transformer]) -> Transformer | None:
    """Return the draft's model; None if that is the target itself, or if there is none."""
    draft = plan.config.draft
    model = load(plan.draft) if plan.draft else None
    if draft.quantization == "none":
        return model
    from magicdec.models import quantize

    model = quantize.quantized(model or target, draft.quantization, plan.device)
    if plan.config.hardware.compile:
        model.compile_layers()
    return model
