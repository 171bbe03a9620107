"""The configuration: the schema of every group in conf/, the rules of single values, and how it is read.

A class is a group, a field a key; conf/ explains them and holds the values that a run starts from. Hydra
and OmegaConf are known to it, load.py, explain.py and the command line only.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import MISSING

from magicdec.architectures import Efficiency, ModelConfig
from magicdec.rules import POSITIVE, SHARES, SIZES, above, at_least, one_of, ruled

CONF = Path(__file__).resolve().parents[2] / "conf"


@dataclass(frozen=True)
class ModelChoice:
    """A model: the target, or an independent draft."""

    name: str = MISSING
    path: str | None = None
    weights: str = one_of("checkpoint", "random", default="checkpoint")
    architecture: ModelConfig | None = None


@dataclass(frozen=True)
class CacheConfig:
    """What the draft keeps. `policy` is a registered cache policy."""

    policy: str = MISSING
    budget: int = 0
    num_sink: int = at_least(0, default=0)
    observation_window: int = at_least(1, default=32)
    kernel: int = ruled(5, lambda value: value >= 1 and value % 2 == 1, "must be an odd number of at least 1")
    beta: int = at_least(1, default=20)
    page_size: int = at_least(1, default=16)
    refresh: int = at_least(1, default=1)
    bits: int = ruled(4, lambda value: value in (4, 8), "must be 8 or 4")
    group_size: int = at_least(1, default=32)


# batch.size=auto. With fewer rows a small model is bound by its weights (CPU) or by latency (GPU), not by its KV cache.
ROWS_ON = {"cpu": 24, "cuda": 64}
AUTO_GAMMAS = (1, 2, 3, 5, 8)  # what draft.gamma=auto chooses among: a captured round each


@dataclass(frozen=True)
class DraftConfig:
    """Who proposes. `name` is none or a registered draft."""

    name: str = MISSING
    gamma: int | str = ruled(
        0, lambda value: value == "auto" or (isinstance(value, int) and value >= 0), "must be auto or at least 1"
    )
    synthetic_acceptance: float | None = ruled(None, lambda value: 0 <= value <= 1, "must be between 0 and 1")
    model: ModelChoice | None = None
    tensor_parallel: int | None = at_least(1, default=None)
    quantization: str = one_of("none", "int8", "int4", default="none")
    num_layers: int = at_least(0, default=0)
    max_ngram: int = at_least(1, default=8)
    inner_gamma: int = at_least(0, default=0)
    cache: CacheConfig | None = None


@dataclass(frozen=True)
class HardwareConfig:
    """Where it runs, and what that can do."""

    name: str = MISSING
    device: str = one_of("auto", "cpu", "cuda", default=MISSING)
    dtype: str = one_of("auto", "float32", "bfloat16", "float16", default=MISSING)
    tensor_parallel: int = at_least(1, default=MISSING)
    cuda_graphs: bool = MISSING
    compile: bool | str = ruled(
        MISSING, lambda value: value == "auto" or isinstance(value, bool), "must be auto, true or false"
    )
    memory_gib: float | None = above(0, default=None)
    bandwidth_gbs: float | None = above(0, default=None)
    tflops: float | None = above(0, default=None)
    efficiency: Efficiency | None = None


@dataclass(frozen=True)
class BatchConfig:
    """How much is decoded."""

    size: int | str = ruled(
        MISSING, lambda value: value == "auto" or (isinstance(value, int) and value >= 1), "must be auto or at least 1"
    )
    context_len: int = at_least(1, default=MISSING)
    generate_len: int = at_least(2, default=MISSING, why="the first new token comes from the prefill")
    num_batches: int = at_least(1, default=MISSING)
    prefill_chunk: int | str = ruled(
        MISSING, lambda value: value == "auto" or (isinstance(value, int) and value >= 1), "must be auto or at least 1"
    )


@dataclass(frozen=True)
class DataConfig:
    """Where prompts come from."""

    name: str = one_of("stdlib", "text", "prompts", "pg19", "repeat", "ruler", "random", default=MISSING)
    path: str | None = None
    task: str | None = one_of("niah_single", "niah_multikey", "cwe", "vt", "qa", default=None)
    seed: int = at_least(0, default=0)
    save_prompts: bool = False


@dataclass(frozen=True)
class SamplingConfig:
    """How a token is chosen."""

    # Logits over a temperature near 0 would leave float32.
    temperature: float = ruled(
        0.0, lambda value: value == 0 or 1e-4 <= value <= 1e4, "must be 0 (greedy) or from 0.0001 to 10,000"
    )
    top_k: int | None = ruled(None, lambda value: 1 <= value < 1 << 31, "must be at least 1 and below 2^31")
    # Less than that is 0 in float32, which keeps no token at all.
    top_p: float | None = ruled(None, lambda value: 1e-30 <= value <= 1, "must be from 1e-30 to 1")
    seed: int = ruled(0, lambda value: 0 <= value < 1 << 63, "must be at least 0 and below 2^63")
    ignore_eos: bool = True


@dataclass(frozen=True)
class AttentionConfig:
    """Who computes attention."""

    name: str = one_of("auto", "sdpa", "cpp", "triton", "flash", "flashinfer", default=MISSING)


@dataclass(frozen=True)
class EngineConfig:
    """Who decodes."""

    name: str = one_of("native", "transformers", "vllm", default=MISSING)
    cache: str = one_of("static", "dynamic", default="static")
    python: str | None = None
    method: str = one_of("draft_model", "eagle", "eagle3", default="draft_model")
    time_limit_s: float = above(0, default=1800)


@dataclass(frozen=True)
class ScenarioConfig:
    """What a run does."""

    name: str = one_of("compare", "profile", "predict", "plan", "serve", default=MISSING)
    repeats: int = at_least(1, default=1)
    profile_repeats: int = at_least(1, default=1)
    batch_sizes: list[int] = field(default_factory=list, metadata=SIZES)
    context_lens: list[int] = field(default_factory=list, metadata=SIZES)
    gammas: list[int] = field(default_factory=list, metadata=SIZES)
    alpha: float | None = ruled(None, lambda value: 0 <= value <= 1, "must be between 0 and 1")
    critical_batches: list[int] = field(default_factory=list, metadata=SIZES)
    drafts: list[str] = field(default_factory=list)
    policies: list[str] = field(default_factory=list)
    latency_ms: float | None = above(0, default=None)
    experiment: str | None = None
    concurrencies: list[int] = field(default_factory=list, metadata=SIZES)
    rates: list[float] = field(default_factory=list, metadata=POSITIVE)
    num_requests: int = at_least(1, default=1)
    length_shares: list[float] = field(default_factory=list, metadata=SHARES)
    first_token_ms: float | None = above(0, default=None)


@dataclass(frozen=True)
class WandbConfig:
    """What Weights & Biases is told."""

    mode: str = one_of("offline", "online", "disabled", default=MISSING)
    project: str = MISSING
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SweepConfig:
    """How a multirun goes about its jobs."""

    name: str | None = None
    fail_fast: bool = MISSING
    figures: bool = MISSING
    dry_run: bool = MISSING
    objective: str = MISSING


@dataclass(frozen=True)
class Config:
    """A whole run."""

    target: ModelChoice = field(default_factory=ModelChoice)
    draft: DraftConfig = field(default_factory=DraftConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    scenario: ScenarioConfig = field(default_factory=ScenarioConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    runs_dir: str = MISSING
    resume: bool | str = ruled(
        MISSING, lambda value: value in (True, False, "any_version"), "must be true, false or any_version"
    )
    sweep: SweepConfig = field(default_factory=SweepConfig)

    @property
    def gammas(self) -> tuple[int, ...]:
        """Return the gammas that a run may use: for auto all that fit into the budgets; (0,) without a draft."""
        if self.draft.name == "none":
            return (0,)
        if self.draft.gamma != "auto":
            return (int(self.draft.gamma),)
        least = min((cache.budget for cache in self.budgeted.values()), default=math.inf)
        return tuple(gamma for gamma in AUTO_GAMMAS if gamma < least) or AUTO_GAMMAS[:1]

    @property
    def budgeted(self) -> dict[str, CacheConfig]:
        """Return the caches whose `budget` bounds what the draft reads, by key: full ignores it, ngram has no cache."""
        caches: dict[str, CacheConfig] = {}
        if self.draft.name not in ("none", "ngram"):
            caches["cache"] = self.cache
        if self.draft.name == "hierarchical" and self.draft.cache is not None:
            caches["draft.cache"] = self.draft.cache
        return {key: cache for key, cache in caches.items() if cache.policy != "full"}
