"""Build the objects of a run from its plan. Nothing else constructs them."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from magicdec.architectures.modules_config import ModulesConfig, MtpModulesConfig
from magicdec.attention.base import Attention
from magicdec.config.registry import BACKENDS, CORPORA
from magicdec.data import PromptRequest, Prompts, load_prompts
from magicdec.data.tokenizer import load_tokenizer
from magicdec.engine.native import NativeEngine
from magicdec.errors import UserError, to_stderr
from magicdec.kernels import library, toolchain
from magicdec.models import checkpoint
from magicdec.models.parallel import Share, share
from magicdec.models.random_weights import draw_matrices
from magicdec.models.transformer import Transformer
from magicdec.planning import shared
from magicdec.planning.resolved import Plan, PlannedModel
from magicdec.tracking.progress import Progress

log = logging.getLogger(__name__)


def engine(plan: Plan, progress: Progress) -> NativeEngine:
    """Load the weights and assemble the engine."""
    torch.backends.cuda.matmul.allow_tf32 = False  # fp32 means fp32
    name = plan.config.attention
    log.info(plan.reasons)
    if any(
        obstacle in plan.reasons
        for obstacle in (*library.OBSTACLES, toolchain.NEEDS_C, "hardware.compile=false")
    ):
        to_stderr(f"warning: {plan.reasons}; decoding is slower without it")
    with progress.task(f"attention={name}", total=1) as task:  # cpp is compiled at its first use
        attention = BACKENDS[name].work()
        task.advance(1)

    def load(model: PlannedModel) -> Transformer:
        return shared.SHARED.model(
            shared.model_key(plan, model), lambda: _load(model, plan, attention, progress)
        )

    return assembled(plan, load)


def assembled(plan: Plan, load: Callable[[PlannedModel], Transformer]) -> NativeEngine:
    """Return the engine of a plan whose models `load` returns."""
    c = plan.config
    target = load(plan.target)
    draft_model = _draft_model(plan, target, load)
    return NativeEngine(c.batch, c.sampling, c.draft, c.cache, c.hardware, target, draft_model)


def prompts(
    plan: Plan,
    tokenizer: object | None,
    num_rows: int | None = None,
    context_len: int | None = None,
) -> Prompts:
    """Return prompts as token ids: by default as many and as long as all batches of the run
    need.
    """
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
        size_keys=(*c.scenario.row_keys, c.scenario.key_of("batch.context_len")),
        most_new_tokens=c.batch.generate_len if c.scenario.serves else None,
    )
    return load_prompts(c.data.name, request)


def warn_about(plan: Plan, prompts: Prompts) -> None:
    """Print a line for each budget that evicts nothing of the prompts that were read. They may be
    shorter than the context that the configuration names, of which it was warned before.
    """
    config = plan.config
    longest = max(map(len, prompts.tokens))
    of_context = config.budgets_of_at_least(config.scenario.longest(config.batch))
    for budget in config.budgets_of_at_least(longest):
        if budget not in of_context:
            what = f"the longest prompt, which has {longest:,} tokens"
            to_stderr(f"warning: {budget} holds all of {what}: it saves nothing")


def tokenizer(plan: Plan) -> object | None:
    """Return the target's tokenizer; None where the data needs none."""
    if CORPORA[plan.config.data.name].facts.is_noise:
        return None
    if plan.target.folder is None:
        raise UserError(
            f"data={plan.config.data.name} needs the target's tokenizer, and target.weights=random"
            " loads none; use data=random"
        )
    folder = plan.target.folder
    return shared.SHARED.fact(
        ("tokenizer", folder, plan.target.fingerprint), lambda: load_tokenizer(folder)
    )


def without_weights(
    model: PlannedModel, plan: Plan, attention: Attention, part: Share
) -> Transformer:
    """Return a share of a model, on the meta device: its weights have a shape and a type but no
    storage.
    """
    if isinstance(model.config, MtpModulesConfig):
        from magicdec.models.adapter.mtp_modules import load_mtp

        return load_mtp(None, model.config, plan.dtype, torch.device("meta"), attention)
    if isinstance(model.config, ModulesConfig):
        from magicdec.models.adapter.load_modules import without_storage

        return without_storage(model.config, plan.dtype, attention)
    config = part.config(model.config)
    kind: Any = Transformer
    if config.is_head:
        from magicdec.models.heads import HEADS

        kind = HEADS[type(config)]
    with torch.device("meta"):
        transformer = kind(config, attention, part).to(plan.dtype)
    for name in plan.in_bfloat16(model):
        weight = transformer.get_parameter(name)
        weight.data = weight.data.bfloat16()
    return transformer.eval().requires_grad_(False)


def _load(model: PlannedModel, plan: Plan, attention: Attention, progress: Progress) -> Transformer:
    """Load this rank's share of a model onto its device. Random weights are made there, in the
    run's dtype.
    """
    if isinstance(model.config, ModulesConfig):
        return _load_modules(model, model.config, plan, attention, progress)
    part = share(model.num_ranks, plan.config.hardware.all_reduce, plan.device)
    transformer = without_weights(model, plan, attention, part)
    if model.folder is None:
        transformer.to_empty(device=plan.device)
        generator = torch.Generator(plan.device).manual_seed(part.rank)
        draw_matrices(transformer.parameters(), generator)
        for weight in transformer.parameters():
            if weight.dim() == 1:
                weight.fill_(1.0)
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


def _load_modules(
    model: PlannedModel, config: ModulesConfig, plan: Plan, attention: Attention, progress: Progress
) -> Transformer:
    """Load transformers' modules onto this device."""
    from magicdec.models.adapter import load_modules
    from magicdec.models.adapter.mtp_modules import load_mtp

    if isinstance(config, MtpModulesConfig):
        with progress.task(f"loading {model.key}", total=None):
            modules = load_mtp(model.folder, config, plan.dtype, plan.device, attention)
        if plan.config.hardware.compile:
            modules.compile_layers()
        return modules
    where = (config, plan.dtype, plan.device, attention, plan.longest)
    with progress.task(f"loading {model.key}", total=None):
        if model.folder is None:
            transformer = load_modules.random(*where)
        else:
            transformer = load_modules.load(model.folder, *where)
    if plan.config.hardware.compile:
        transformer.compile_layers()
    return transformer


def _draft_model(
    plan: Plan, target: Transformer, load: Callable[[PlannedModel], Transformer]
) -> Transformer | None:
    """Return the draft's model; None if that is the target itself, or if there is none."""
    draft = plan.config.draft
    model = load(plan.draft) if plan.draft else None
    if draft.quantization == "none":
        return model
    from magicdec.models import quantize

    exact = model or target.first_layers(draft.drafter(target.config).num_layers)
    model = quantize.quantized(exact, draft.quantization, plan.device)
    if plan.config.hardware.compile:
        model.compile_layers()
    return model
