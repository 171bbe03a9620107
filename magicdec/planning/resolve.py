"""Resolve a typed configuration into a plan: decide every `auto`, and find every mistake that needs
no weights.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from magicdec.architectures.model_config import check_ranks
from magicdec.attention import backends
from magicdec.config.checks import check_length
from magicdec.config.choices import ModelChoice
from magicdec.config.groups import ROWS_ON, BatchConfig
from magicdec.config.registry import BACKENDS, CORPORA, ENGINES
from magicdec.config.schema import Config
from magicdec.errors import UserError
from magicdec.kernels.toolchain import triton_obstacle
from magicdec.measure.system import cpu_name
from magicdec.models import description
from magicdec.planning.as_draft import check_kind
from magicdec.planning.compatibility import (
    check_draft,
    check_lengths,
    check_modules,
    check_vocabulary,
)
from magicdec.planning.identity import identify, taking_back
from magicdec.planning.resolved import Plan, PlannedModel

# batch.prefill_chunk=auto: CHUNK tokens of each row, or more where a pass of all rows would have
# few tokens. A GPU with room takes longer ones (fits.py).
CHUNK, PASS_TOKENS_ON = 128, {"cpu": 1024, "cuda": 2048}
# Requests are prefilled one by one while running ones wait.
SERVED_CHUNK_ON = {"cpu": 256, "cuda": 2048}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve(config: Config) -> Plan:
    """Return the plan of a run or a prediction. Raise UserError for mistakes that can be found
    without weights.
    """
    if config.engine.is_remote:
        return _remote(config)
    if config.scenario.predicts:
        return _predicted(config)
    device, dtype = _device(config)
    config = replace(config, batch=batch_on(config, device))
    config, uncompiled = _with_hardware(config, device, dtype)
    config, target, draft = _models(config, loads=True)
    check_draft(config, device, target, draft)
    if config.engine.name == "native":
        check_modules(config, target, draft)
    check_lengths(config, target, draft)
    target, draft = _divided(config, device, target, draft)
    if draft is not None:
        config = replace(config, draft=replace(config.draft, tensor_parallel=draft.num_ranks))
    plan = Plan(config, device, dtype, target, draft, _device_name(device))
    if config.engine.name != "native":
        ENGINES[config.engine.name].work.check(config)
        is_ours = config.engine.has_our_drafts
        return replace(plan, attention=_attention(plan)[0]) if is_ours else plan
    backend, why = _attention(plan)
    reasons = "; ".join(filter(None, (why, uncompiled)))
    config = replace(config, attention=backend)
    return replace(plan, config=config, attention=backend, reasons=reasons)


def _predicted(config: Config) -> Plan:
    """Return the plan of a prediction, which has no device."""
    device = torch.device("meta")
    config = replace(config, batch=batch_on(config, device))
    config, target, draft = _models(config, loads=False)
    if not config.scenario.searches:  # for drafts of its own
        check_vocabulary(target.config, draft.config if draft else None)
    check_length(config, target.config.max_position_embeddings)
    dtype = _dtype(config, config.hardware.device)
    return Plan(config, device, dtype, target, draft, config.hardware.name)


def _remote(config: Config) -> Plan:
    """Return the plan of a run whose models are elsewhere."""
    ENGINES[config.engine.name].work.check(config)
    config = replace(config, batch=batch_on(config, torch.device("cpu")))
    config, target, _ = _models(config, loads=False)
    check_length(config, target.config.max_position_embeddings)
    if not CORPORA[config.data.name].facts.is_noise:
        folder = description.locate(config.target.path or "", "target.path", weights=False)
        target = replace(target, folder=folder, reads_weights=False)
    return Plan(config, torch.device("cpu"), torch.float32, target, None, "another server")


def batch_on(config: Config, device: torch.device) -> BatchConfig:
    """Return the group `batch` without `auto`, except for what a prediction does not read."""
    batch = config.batch
    on = "cpu" if device.type == "cpu" else "cuda"
    if batch.size == "auto":
        batch = replace(batch, size=ROWS_ON[on])
    if batch.prefill_chunk == "auto" and device.type != "meta":
        chunk = SERVED_CHUNK_ON[on] if config.has_slots else PASS_TOKENS_ON[on] // int(batch.size)
        batch = replace(batch, prefill_chunk=max(CHUNK, chunk))
    return batch


def _models(config: Config, loads: bool) -> tuple[Config, PlannedModel, PlannedModel | None]:
    """Return the configuration completed from the checkpoints, the target and the independent
    draft.

    `loads` says whether a checkpoint's weights are read.
    """
    models: dict[str, PlannedModel] = {}
    for key, choice in config.models.items():
        if key != "target" and not config.draft.needs_model:
            continue
        if key != "target" and choice.path is None and choice.architecture is None:
            assumed = config.draft.assumed_model(models["target"].config)
            choice = replace(
                choice, architecture=assumed, name=config.draft.name if assumed else choice.name
            )
        is_part = config.draft.ships_with_target and key != "target" and choice.path is None
        if is_part:
            folder = models["target"].folder
            _check_part(choice, folder)
        else:
            choice, folder = identify(key, choice, loads and choice.weights == "checkpoint")
            folder = folder if loads and choice.weights == "checkpoint" else None
        choice = taking_back(key, choice)
        assert choice.architecture is not None, "identify has read it"
        models[key] = PlannedModel(key, folder, choice.architecture)
        if key == "target":
            config = replace(config, target=choice)
        else:
            check_kind(config.draft, choice.architecture)
            config = replace(config, draft=replace(config.draft, model=choice))
    return config, models["target"], models.get("draft.model")


def _check_part(choice: ModelChoice, folder: Path | None) -> None:
    """Raise UserError where the target's folder holds no model that drafts, as far as it is
    read.
    """
    assert choice.architecture is not None
    if folder is not None and choice.architecture.implementation == "native":
        raise UserError(
            "draft.model.path=null: the target's checkpoint holds no modules that predict further"
            " tokens; give the folder of some, or a target that ships with them"
        )


def _device(config: Config) -> tuple[torch.device, torch.dtype]:
    name = config.hardware.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"hardware.device=cuda (hardware={config.hardware.name}), but PyTorch sees no CUDA"
            " device here; use hardware=cpu or hardware=auto"
        )
    ranks = config.hardware.tensor_parallel
    devices = torch.cuda.device_count()
    if name == "cuda" and ranks > devices:
        raise UserError(
            f"hardware.tensor_parallel={ranks}: there are {devices} GPUs here, and each rank"
            " takes one"
        )
    return torch.device(name), _dtype(config, name)


def _dtype(config: Config, device: str) -> torch.dtype:
    dtype = config.hardware.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    return DTYPES[dtype]


def _with_hardware(config: Config, device: torch.device, dtype: torch.dtype) -> tuple[Config, str]:
    """Return the configuration with its device, dtype and compilation decided, and why nothing is
    compiled where that could be faster.
    """
    hardware = config.hardware
    decided: dict[str, Any] = {"device": device.type, "dtype": str(dtype).removeprefix("torch.")}
    obstacle = triton_obstacle() if device.type == "cuda" and hardware.compile else None
    if hardware.compile == "auto":
        decided["compile"] = device.type == "cuda" and obstacle is None
    elif obstacle:
        raise UserError(f"hardware.compile=true: Triton {obstacle}; or set hardware.compile=false")
    reason = f"hardware.compile=false: Triton {obstacle}" if obstacle else ""
    return replace(config, hardware=replace(hardware, **decided)), reason


def _attention(plan: Plan) -> tuple[str, str]:
    """Return the attention backend of our engine, and why it is this one."""
    config = plan.config
    architectures = [model.config for model in (plan.target, plan.draft) if model is not None]
    head_dims = [model.head_dim for model in architectures]
    needs = {need for model in architectures for need in model.attention_needs}
    backend, why = backends.choose(config.attention, plan.device, plan.dtype, head_dims, needs)
    if config.hardware.cuda_graphs and not BACKENDS[backend].facts.captured:
        raise UserError(
            f"hardware.cuda_graphs=true: attention={backend} plans on the host, which no graph can"
            " capture; set hardware.cuda_graphs=false"
        )
    _check_heads(plan, backend)
    return backend, why


def _check_heads(plan: Plan, backend: str) -> None:
    """Raise UserError for more KV heads of all rows than the backend takes in a pass."""
    most = BACKENDS[backend].work.most_heads
    rows, _ = plan.config.scenario.largest(plan.config.batch)
    models = [model for model in (plan.target, plan.draft) if model is not None]
    heads = max(model.config.shared_by(model.num_ranks).num_kv_heads for model in models)
    if most is not None and rows * heads > most:
        key = plan.config.scenario.key_of("batch.size")
        raise UserError(
            f"{key}={rows}: attention={backend} takes {most:,} KV heads of all rows, and each row"
            f" has {heads}; choose {key}={most // heads} or less, or attention=sdpa"
        )


def _device_name(device: torch.device) -> str:
    """Return the name of the device; for a CPU, with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"


def _divided(
    config: Config, device: torch.device, target: PlannedModel, draft: PlannedModel | None
) -> tuple[PlannedModel, PlannedModel | None]:
    """Return the models with the number of ranks that each is divided over."""
    ranks = config.hardware.tensor_parallel
    drafters = (config.draft.tensor_parallel or ranks) if draft else ranks
    check_ranks(target.config, ranks, draft.config if draft else None, drafters)
    if config.engine.name != "native":  # whose server makes its own ranks
        return target, draft
    target = drafter = replace(target, num_ranks=ranks)
    if draft is not None:
        draft = drafter = replace(draft, num_ranks=drafters)
    for key, cache in config.budgeted.items():
        cache.check(drafter.config, drafters, config.draft.shares_target and key == "cache", key)
    if config.draft.quantization != "none":
        from magicdec.models import quantize

        quantize.check_sizes(config.draft.quantization, drafter.config, drafters, device)
    return target, draft
