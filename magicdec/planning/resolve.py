"""From a typed configuration to the plan of a run: every `auto` resolved, every mistake found that needs no weights."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from magicdec import data
from magicdec.architectures import ModelConfig, check_ranks
from magicdec.attention import backends
from magicdec.config.checks import check_length
from magicdec.config.choices import ModelChoice
from magicdec.config.registry import BACKENDS, CORPORA, ENGINES
from magicdec.config.schema import ROWS_ON, Config
from magicdec.costmodel import comparison
from magicdec.errors import UserError
from magicdec.kernels.toolchain import triton_obstacle
from magicdec.measure.metrics import Metrics
from magicdec.measure.system import cpu_name, driver_version
from magicdec.models import checkpoint, quantize
from magicdec.models.vocabulary import check_vocabularies
from magicdec.planning.identity import identify
from magicdec.planning.prediction import curves, setup_of_run

# batch.prefill_chunk=auto: so many tokens of each row, or more where a pass would have fewer than that in all rows.
CHUNK, PASS_TOKENS_ON = 128, {"cpu": 1024, "cuda": 2048}
SERVED_CHUNK_ON = {"cpu": 256, "cuda": 2048}  # requests are prefilled one by one, while those that run wait
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Model:
    """One model of a run before its weights are loaded: where it lies and what it looks like."""

    key: str  # the configuration's key, for messages
    folder: Path | None  # None: random weights of a known architecture
    config: ModelConfig
    num_ranks: int = 1  # that divide its layers

    @property
    def fingerprint(self) -> str:
        """Return the hash of its weights for a run's id."""
        return checkpoint.fingerprint(self.folder) if self.folder else "random"


@dataclass(frozen=True)
class Plan:
    """A run whose every `auto` is resolved and whose mistakes are found; nothing large is allocated yet."""

    config: Config
    device: torch.device
    dtype: torch.dtype
    target: Model
    draft: Model | None
    device_name: str
    reasons: str  # for config.attention, and for what is slower than it could be; empty for other engines

    @property
    def fingerprints(self) -> dict[str, str]:
        """Return the hashes of the checkpoints and the text that the run reads, and what is installed of an engine that
        is not ours. A profile reads no text.
        """
        found = {m.key: m.fingerprint for m in (self.target, self.draft) if m is not None}
        if self.config.engine.name != "native":
            found["engine"] = ENGINES[self.config.engine.name].work.installed(self.config.engine)
        if self.config.scenario.name != "profile":
            found["data"] = data.fingerprint(self.config.data.name, self.config.data.path)
        return found

    @property
    def sources(self) -> Metrics:
        """Return the metric that says whether results are of trained weights or of random ones."""
        models = (self.target, self.draft)
        return {"weights/source": "random" if any(m is not None and m.folder is None for m in models) else "checkpoint"}

    @property
    def num_ranks(self) -> int:
        """Return the processes that the run takes."""
        return self.target.num_ranks

    @property
    def is_audited(self) -> bool:
        """Return whether the output is audited: with synthetic acceptance it means nothing."""
        return self.config.speculates and self.config.draft.synthetic_acceptance is None

    def doubts(self) -> list[str]:
        """Return warnings: about a GPU that PyTorch cannot use, and about a run that is predicted not to pay."""
        config = self.config
        unused = driver_version() if config.hardware.name == "auto" and self.device.type == "cpu" else ""
        if unused:
            why = f"driver {unused} is loaded, but PyTorch sees no GPU"
            return [
                f"hardware=auto: {why}: this run uses the CPU; magicdec doctor says why, and hardware=cpu silences this"
            ]
        if config.scenario.name != "compare" or config.engine.name != "native" or not config.speculates:
            return []
        if CORPORA[config.data.name].facts.own_lengths:  # not known yet
            return []
        try:
            setup = setup_of_run(config, self.device_name, self.dtype.itemsize)
            found = comparison.warning(setup, config.gammas, curves(config), config.draft.synthetic_acceptance)
        except UserError:  # nothing to predict with: then there is nothing to tell
            return []
        return [found] if found else []


def resolve(config: Config) -> Plan:
    """Return the plan of a configuration. Raise UserError for mistakes that can be found without weights."""
    device, dtype = _device(config)
    batch = config.batch
    if batch.size == "auto":
        batch = replace(batch, size=ROWS_ON[device.type])
    if batch.prefill_chunk == "auto":
        served = config.scenario.name == "serve"
        chunk = SERVED_CHUNK_ON[device.type] if served else PASS_TOKENS_ON[device.type] // int(batch.size)
        batch = replace(batch, prefill_chunk=max(CHUNK, chunk))
    in_the_way = triton_obstacle() if device.type == "cuda" and config.hardware.compile else None
    decided: dict[str, Any] = {"device": device.type, "dtype": str(dtype).removeprefix("torch.")}
    if config.hardware.compile == "auto":
        decided["compile"] = device.type == "cuda" and in_the_way is None
    elif in_the_way:
        raise UserError(f"hardware.compile=true: Triton {in_the_way}; or set hardware.compile=false")
    hardware = replace(config.hardware, **decided)
    choice, target = _model("target", config.target)
    config = replace(config, batch=batch, hardware=hardware, target=choice)
    draft = None
    if config.draft.needs_model:
        assert config.draft.model is not None, "validate has checked"
        choice, draft = _model("draft.model", config.draft.model)
        config = replace(config, draft=replace(config.draft, model=choice))
        check_vocabularies(target.config, draft.config, target.folder, draft.folder)
    quantize.check(config.draft.quantization, device)
    config.draft.check(target.config)
    _check_length(config, target, draft)
    target, draft = _divided(config, target, draft)
    if draft is not None:
        config = replace(config, draft=replace(config.draft, tensor_parallel=draft.num_ranks))
    reasons = []
    if config.engine.name == "native":
        backend: Any  # one of the options
        backend, why = _attention(config, device, dtype, [target, draft] if draft else [target])
        config = replace(config, attention=backend)
        reasons = [why, *([f"hardware.compile=false: Triton {in_the_way}"] if in_the_way else [])]
    else:
        ENGINES[config.engine.name].work.check(config)
    return Plan(config, device, dtype, target, draft, _device_name(device), "; ".join(reasons))


def _device(config: Config) -> tuple[torch.device, torch.dtype]:
    name = config.hardware.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"hardware.device=cuda (hardware={config.hardware.name}), but PyTorch sees no CUDA device here; "
            "use hardware=cpu or hardware=auto"
        )
    dtype = config.hardware.dtype
    if dtype == "auto":
        dtype = "float32" if name == "cpu" else "bfloat16"
    ranks, devices = config.hardware.tensor_parallel, torch.cuda.device_count()
    if name == "cuda" and ranks > devices:
        raise UserError(f"hardware.tensor_parallel={ranks}: there are {devices} GPUs here, and each rank takes one")
    return torch.device(name), DTYPES[dtype]


def _device_name(device: torch.device) -> str:
    """Return the name of the device; of a CPU, with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"


def _model(key: str, choice: ModelChoice) -> tuple[ModelChoice, Model]:
    """Return the choice with what its checkpoint says, and the model."""
    choice, folder = identify(key, choice, loads=choice.weights == "checkpoint")
    assert choice.architecture is not None, "identify has read it"
    return choice, Model(key, folder if choice.weights == "checkpoint" else None, choice.architecture)


def _divided(config: Config, target: Model, draft: Model | None) -> tuple[Model, Model | None]:
    """Return the models with the ranks that share them."""
    ranks = config.hardware.tensor_parallel
    drafters = (config.draft.tensor_parallel or ranks) if draft else ranks
    check_ranks(target.config, ranks, draft.config if draft else None, drafters)
    target = drafter = replace(target, num_ranks=ranks)
    if draft is not None:
        draft = drafter = replace(draft, num_ranks=drafters)
    for key, cache in config.budgeted.items():
        cache.check(drafter.config, drafters, config.draft.shares_target and key == "cache", key)
    return target, draft


def _attention(config: Config, device: torch.device, dtype: torch.dtype, models: list[Model]) -> tuple[str, str]:
    """Return the backend's name, and why it was chosen."""
    name, why = backends.choose(config.attention, device, dtype, [model.config.head_dim for model in models])
    if config.hardware.cuda_graphs and not BACKENDS[name].facts.captured:
        raise UserError(
            f"hardware.cuda_graphs=true: attention={name} plans on the host, which no graph can capture; set "
            "hardware.cuda_graphs=false"
        )
    return name, why


def _check_length(config: Config, target: Model, draft: Model | None) -> None:
    check_length(config, target.config.max_position_embeddings)
    length = config.batch.context_len + config.batch.generate_len
    if draft is None or length <= draft.config.max_position_embeddings:
        return
    trained = draft.config.max_position_embeddings
    key = config.draft.own_cache_key
    cache = config.draft.caches(config.cache)[key]
    if not cache.bounds_positions:
        raise UserError(
            f"{key}.policy={cache.policy} shows the draft {length} tokens, but it was trained for {trained}; "
            f"use {key}.policy=streaming, which hides the distance"
        )
    slots = config.draft.round_slots(max(config.gammas))
    if cache.budget + slots >= trained:
        raise UserError(
            f"{key}.budget={cache.budget} and the {slots} tokens of a round (draft.gamma={max(config.gammas)}) do not "
            f"fit into the draft's trained context of {trained} tokens; {key}.budget={(trained - slots) // 2} would"
        )
