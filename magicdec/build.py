"""From a typed configuration to the objects of a run: the only place that constructs.

Everything that can be checked without loading weights is checked first.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from magicdec.attention import choice
from magicdec.attention.base import Attention
from magicdec.cache.draft_cache import CACHES
from magicdec.config import BatchConfig, Config, DraftConfig, ModelChoice
from magicdec.data import Prompts, load_prompts
from magicdec.data.tokenizer import load_tokenizer
from magicdec.drafts.base import DRAFTS
from magicdec.engines import vllm
from magicdec.engines.native import NativeEngine
from magicdec.engines.peer import Peer, PeerSpec
from magicdec.errors import UserError
from magicdec.measure import memory
from magicdec.measure.footprint import Footprint, UniformAttention, footprint, largest_batch
from magicdec.measure.memory import GIB
from magicdec.measure.metrics import Metrics
from magicdec.models import checkpoint, quantize
from magicdec.models.config import ModelConfig
from magicdec.models.parallel import Share, check_divides, replicates, share
from magicdec.models.transformer import Transformer
from magicdec.tracking.progress import Progress
from magicdec.verification.sampling import Sampling

log = logging.getLogger(__name__)

# batch.size=auto. With fewer rows a small model is bound by its weights (CPU) or by latency (GPU), not by its KV cache.
ROWS_ON = {"cpu": 24, "cuda": 64}
# batch.prefill_chunk=auto: of every row of a batch, or of a request that is served, which is prefilled by itself.
BATCH_CHUNK, REQUEST_CHUNK_ON = 128, {"cpu": 256, "cuda": 2048}
# Keys of `draft` that are no draft's own to read.
OTHER_DRAFT_KEYS = ("name", "gamma", "synthetic_acceptance", "model", "tensor_parallel", "quantization", "cache")
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
        """What names its weights in a run's id."""
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
    why_attention: str  # why config.attention.name was chosen, for the log; empty where the engine has its own

    @property
    def fingerprints(self) -> dict[str, str]:
        """Of the checkpoints that the run loads."""
        return {m.key: m.fingerprint for m in (self.target, self.draft) if m is not None}

    @property
    def sources(self) -> Metrics:
        """What says in results whether they are of models that know anything."""
        models = (self.target, self.draft)
        return {"weights/source": "random" if any(m is not None and m.folder is None for m in models) else "checkpoint"}

    @property
    def num_ranks(self) -> int:
        """Processes that the run takes."""
        return self.target.num_ranks

    @property
    def num_bytes(self) -> int:
        """The memory that the run will take of each device, at the largest point of a profile."""
        batch, scenario = self.config.batch, self.config.scenario
        if scenario.name == "profile":
            return estimate(self, max(scenario.batch_sizes), max(scenario.context_lens)).total
        return estimate(self, int(batch.size), batch.context_len).total


def plan(config: Config) -> Plan:
    """Resolve `auto`, read the checkpoints' configs, and check everything that needs no weights."""
    device, dtype = _device(config)
    batch = config.batch
    if batch.size == "auto":
        batch = replace(batch, size=ROWS_ON[device.type])
    if batch.prefill_chunk == "auto":
        is_served = config.scenario.name == "serve"
        batch = replace(batch, prefill_chunk=REQUEST_CHUNK_ON[device.type] if is_served else BATCH_CHUNK)
    hardware = replace(config.hardware, device=device.type, dtype=str(dtype).removeprefix("torch."))
    if hardware.compile == "auto":
        hardware = replace(hardware, compile=device.type == "cuda")
    config = replace(config, batch=batch, hardware=hardware)
    target = _model("target", config.target)
    draft = None
    if config.draft.name != "none" and DRAFTS[config.draft.name].needs_model:
        assert config.draft.model is not None  # validated
        draft = _model("draft.model", config.draft.model)
        checkpoint.check_vocabularies(target.config, draft.config, target.folder, draft.folder)
    if config.draft.name != "none":
        quantize.check(config.draft.quantization)
        DRAFTS[config.draft.name].check(target.config, config.draft.num_layers)
        if CACHES[config.cache.policy].needs_target and config.draft.name == "model":
            raise UserError(
                f"cache.policy={config.cache.policy} lives on the target's own cache, which an independent draft has "
                "no use for; choose draft=self or draft=layer_skip"
            )
    _check_length(config, target, draft)
    target, draft = _divided(config, target, draft)
    if draft is not None:
        config = replace(config, draft=replace(config.draft, tensor_parallel=draft.num_ranks))
    why = ""
    if config.engine.name == "native":
        name, why = _attention(config, device, dtype, [target, draft] if draft else [target])
        config = replace(config, attention=replace(config.attention, name=name))
    elif config.engine.name == "vllm":
        vllm.check(vllm.python(config.engine.python))
    elif hardware.compile and device.type == "cpu":
        raise UserError("hardware.compile=true: engine=transformers compiles on GPUs only; set it to false")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return Plan(config, device, dtype, target, draft, name, why)


def estimate(plan: Plan, num_rows: int, context_len: int) -> Footprint:
    """Bytes that the run will take of each device: of rank 0's, where there are several."""
    on_cpu = plan.device.type == "cpu"
    attention = UniformAttention() if on_cpu else choice.backend(plan.config.attention.name)()

    def load(model: Model) -> Transformer:
        part = Share(0, model.num_ranks, 0, plan.num_ranks)
        return _without_weights(model, plan, attention, part)

    weightless = _engine(plan, load)
    if plan.config.scenario.name == "serve":  # a chunk of one request at a time, not of every row
        weightless = replace(weightless, prefill_chunk=-(-weightless.prefill_chunk // num_rows))
    found = footprint(weightless, num_rows, context_len, is_audited(plan))
    return replace(found, transient=found.transient + memory.workspace_bytes(plan.device))


def check_memory(plan: Plan, num_rows: int, context_len: int) -> Footprint:
    """The estimate; raises UserError, naming the largest batch that fits, where memory would not suffice."""
    available = memory.available_bytes(plan.device)
    if plan.device.type == "cpu":
        available //= plan.num_ranks
    needed = estimate(plan, num_rows, context_len)
    if needed.total <= available:
        return needed
    fits = largest_batch(lambda rows: estimate(plan, rows, context_len).total, num_rows, available)
    smaller = "the target, batch.context_len, batch.prefill_chunk or hardware.dtype"
    advice = f"batch.size={fits} would fit" if fits else f"not even one row fits: choose a smaller one of {smaller}"
    parts = {"weights": needed.weights, "KV cache": needed.target_kv, "draft's cache": needed.draft_kv}
    parts["activations"] = needed.transient
    raise UserError(
        f"batch.size={num_rows} at batch.context_len={context_len} needs about {needed.total / GIB:.2f} GiB "
        f"({', '.join(f'{name} {size / GIB:.2f}' for name, size in parts.items())}), but {available / GIB:.2f} GiB are "
        f"available{' to each rank' if plan.num_ranks > 1 else ''}; {advice}"
    )


def is_audited(plan: Plan) -> bool:
    """Whether the output is compared with the baseline's; what is sampled or synthetic has nothing to be equal to."""
    draft, sampling = plan.config.draft, plan.config.sampling
    return draft.name != "none" and draft.synthetic_acceptance is None and sampling.temperature == 0


def engine(plan: Plan, progress: Progress) -> NativeEngine:
    """Load the weights and put the engine together."""
    torch.backends.cuda.matmul.allow_tf32 = False  # fp32 means fp32
    name = plan.config.attention.name
    log.info(plan.why_attention)
    with progress.task(f"attention={name}", total=1) as task:  # cpp is compiled at its first use
        attention = choice.backend(name)()
        task.advance(1)
    return _engine(plan, lambda model: _load(model, plan, attention, progress))


def _engine(plan: Plan, load: Callable[[Model], Transformer]) -> NativeEngine:
    c = plan.config
    target = load(plan.target)
    return NativeEngine(
        target=target,
        draft_model=_draft_model(plan, target, load),
        sampling=_sampling(c),
        generate_len=c.batch.generate_len,
        prefill_chunk=int(c.batch.prefill_chunk),
        draft_name=c.draft.name,
        gamma=max(c.gammas),
        gammas=c.gammas if c.draft.gamma == "auto" else (),
        draft_options=draft_options(c.draft),
        policy=c.cache.policy,
        cache_options=_options(c.cache, "policy"),
        ignore_eos=c.sampling.ignore_eos,
        graphs=c.hardware.cuda_graphs,
        synthetic_acceptance=c.draft.synthetic_acceptance,
    )


def _sampling(config: Config) -> Sampling:
    s = config.sampling
    return Sampling(s.temperature, s.top_k, s.top_p, s.seed)


def peer(plan: Plan) -> Peer:
    """Another engine, with its models loaded."""
    c, s = plan.config, plan.config.sampling
    gamma = max(c.gammas)
    longest = plan.target.config.max_position_embeddings
    spec = PeerSpec(
        target=str(plan.target.folder),
        dtype=c.hardware.dtype,
        device=plan.device.type,
        num_rows=int(c.batch.size),
        max_len=min(longest, c.batch.context_len + c.batch.generate_len + gamma + 1),
        sampling=_sampling(c),
        eos_token_ids=() if s.ignore_eos else tuple(plan.target.config.eos_token_ids),
        draft_name=c.draft.name,
        draft=str(plan.draft.folder) if plan.draft else None,
        gamma=gamma,
        max_ngram=c.draft.max_ngram,
        num_layers=c.draft.num_layers,
        compile=bool(c.hardware.compile),  # auto is resolved
        graphs=c.hardware.cuda_graphs and plan.device.type == "cuda",
    )
    if c.engine.name == "transformers":
        from magicdec.engines.transformers import TransformersPeer  # here, because generate takes seconds to import

        return TransformersPeer(spec, c.engine.cache)
    models = [model.config for model in (plan.target, plan.draft) if model is not None]
    kv_bytes = sum(memory.kv_bytes(model, 1, plan.dtype) for model in models)
    return vllm.VllmPeer(spec, vllm.python(c.engine.python), c.engine.method, kv_bytes, c.engine.time_limit_s)


def prompts(
    plan: Plan, tokenizer: object | None, num_rows: int | None = None, context_len: int | None = None
) -> Prompts:
    """Prompts as token ids: for every batch of the run, unless told how many and how long."""
    c = plan.config
    return load_prompts(
        c.data.name,
        tokenizer=tokenizer,
        num_rows=int(c.batch.size) * c.batch.num_batches if num_rows is None else num_rows,
        context_len=c.batch.context_len if context_len is None else context_len,
        seed=c.data.seed,
        path=c.data.path,
        task=c.data.task,
        vocab_size=plan.target.config.vocab_size,
    )


def tokenizer(plan: Plan) -> object | None:
    """The target's tokenizer; None where random data needs none."""
    if plan.config.data.name == "random":
        return None
    if plan.target.folder is None:
        raise UserError(
            f"data={plan.config.data.name} needs the target's tokenizer, and target.weights=random loads none; "
            "use data=random"
        )
    return load_tokenizer(plan.target.folder)


def draft_options(draft: DraftConfig) -> dict[str, Any]:
    """The keys of `draft` that a draft reads itself; those of a hierarchical draft's inner cache by their own names."""
    options = _options(draft, *OTHER_DRAFT_KEYS)
    if draft.cache is None:
        return options
    return options | {"inner_policy": draft.cache.policy, "inner_cache_options": _options(draft.cache, "policy")}


def _options(group: object, *others: str) -> dict[str, Any]:
    """The keys of a group that a draft or a policy reads itself: all but `others`."""
    return {f.name: getattr(group, f.name) for f in fields(group) if f.name not in others}  # type: ignore[arg-type]


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


def _model(key: str, choice: ModelChoice) -> Model:
    if choice.weights == "random":
        if choice.architecture is not None:
            return Model(key, None, choice.architecture.to_model_config())
        if choice.path is None:
            raise UserError(f"{key}.weights=random needs {key}.architecture or {key}.path")
        folder = checkpoint.locate(choice.path, f"{key}.path", weights=False)
        return Model(key, None, checkpoint.read_config(folder))
    if choice.path is None:
        raise UserError(f"{key}.path is not set; give a local Hugging Face folder or a hub id such as org/name")
    folder = checkpoint.locate(choice.path, f"{key}.path")
    return Model(key, folder, checkpoint.read_config(folder))


def _divided(config: Config, target: Model, draft: Model | None) -> tuple[Model, Model | None]:
    """The models with the ranks that share them."""
    ranks = config.hardware.tensor_parallel
    check_divides(target.config, ranks, "hardware.tensor_parallel")
    target, drafter, drafters = replace(target, num_ranks=ranks), target, ranks
    if draft is not None:
        drafters = config.draft.tensor_parallel or ranks
        if ranks % drafters:
            raise UserError(
                f"draft.tensor_parallel={drafters}: must divide the target's hardware.tensor_parallel={ranks}"
            )
        check_divides(draft.config, drafters, "draft.tensor_parallel")
        draft = drafter = replace(draft, num_ranks=drafters)
    policy = CACHES[config.cache.policy]
    has_cache = config.draft.name != "none" and DRAFTS[config.draft.name].has_cache
    if has_cache and policy.selects != "never" and replicates(drafter.config, drafters):
        raise UserError(
            f"cache.policy={config.cache.policy} chooses by the attention of all queries of a KV head, which more "
            f"ranks ({drafters}) than KV heads ({drafter.config.num_kv_heads}) divide; choose cache=streaming"
        )
    return target, draft


def _attention(config: Config, device: torch.device, dtype: torch.dtype, models: list[Model]) -> tuple[str, str]:
    """Which backend, and why."""
    name, why = choice.choose(config.attention.name, device, dtype, [model.config.head_dim for model in models])
    if config.hardware.cuda_graphs and not choice.backend(name).captured:
        raise UserError(
            f"hardware.cuda_graphs=true: attention={name} plans on the host, which no graph can capture; set "
            "hardware.cuda_graphs=false"
        )
    return name, why


def _check_length(config: Config, target: Model, draft: Model | None) -> None:
    b: BatchConfig = config.batch
    length = b.context_len + b.generate_len
    longest = target.config.max_position_embeddings
    if length > longest:
        raise UserError(
            f"batch.context_len={b.context_len} + batch.generate_len={b.generate_len} = {length} exceeds the target's "
            f"maximum of {longest} tokens; batch.context_len={longest - b.generate_len} would fit"
        )
    if draft is None or length <= draft.config.max_position_embeddings:
        return
    trained = draft.config.max_position_embeddings
    hierarchical = config.draft.name == "hierarchical" and config.draft.cache is not None
    key, cache = ("draft.cache", config.draft.cache) if hierarchical else ("cache", config.cache)
    assert cache is not None
    if not CACHES[cache.policy].bounds_positions:
        raise UserError(
            f"{key}.policy={cache.policy} shows the draft {length} tokens, but it was trained for {trained}; "
            f"use {key}.policy=streaming, which hides the distance"
        )
    if cache.budget + max(config.gammas) + 1 >= trained:
        raise UserError(
            f"{key}.budget={cache.budget} + draft.gamma={max(config.gammas)} does not fit into the draft's "
            f"trained context of {trained} tokens; {key}.budget={trained // 2} would"
        )


def _without_weights(model: Model, plan: Plan, attention: Attention, part: Share) -> Transformer:
    """A share of a model, on the meta device: its weights have a shape and a type but no storage."""
    with torch.device("meta"):
        return Transformer(part.config(model.config), attention, part).to(plan.dtype).eval().requires_grad_(False)


def _load(model: Model, plan: Plan, attention: Attention, progress: Progress) -> Transformer:
    """This rank's share of a model, on its device. Random weights are made there, in the run's own dtype."""
    part = share(model.num_ranks)
    transformer = _without_weights(model, plan, attention, part)
    if model.folder is None:
        transformer.to_empty(device=plan.device)
        generator = torch.Generator(plan.device).manual_seed(part.rank)
        for weight in transformer.parameters():
            weight.normal_(0, 0.02, generator=generator) if weight.dim() > 1 else weight.fill_(1.0)
    else:
        total = sum(weight.numel() for weight in transformer.parameters())
        with progress.task(f"loading {model.key}", total=total) as task:
            state = checkpoint.load(model.folder, model.config, plan.dtype, plan.device, task.advance, part)
        transformer.load_state_dict(state, assign=True)
    if plan.config.hardware.compile:
        transformer.compile_layers()
    return transformer.requires_grad_(False)


def _draft_model(plan: Plan, target: Transformer, load: Callable[[Model], Transformer]) -> Transformer | None:
    """The model that drafts; None where it is the target as it stands, or there is none."""
    draft = plan.config.draft
    model = load(plan.draft) if plan.draft else None
    if draft.name == "none" or draft.quantization == "none":
        return model
    model = quantize.quantized(model or target, draft.quantization, plan.device)
    if plan.config.hardware.compile:
        model.compile_layers()
    return model


def cpu_name() -> str:
    """The processor's name, as the operating system tells it."""
    import platform

    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
