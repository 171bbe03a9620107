"""The schema of every group in conf/, with the rules of single values.

A class is a group, a field a key; conf/ explains them and holds the values that a run starts from. The groups draft,
cache and engine have a class for each of their options: see magicdec/registry.py.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from omegaconf import MISSING

from magicdec import plugins
from magicdec.drafting import DraftConfig, ModelChoice
from magicdec.policies import CacheConfig
from magicdec.registry import DRAFTS, ENGINES, POLICIES, EngineConfig, Registry
from magicdec.rules import NAMES, POSITIVE, SHARES, SIZES, above, at_least, one_of, ruled

# In an installation conf/ is in the package, in a checkout next to it.
CONF = next(path for folder in Path(__file__).resolve().parents[1:3] if (path := folder / "conf").is_dir())


def own_folders() -> list[Path]:
    """Return the folders with a user's own options: ./conf of the working directory, and those of installed plugins."""
    here = Path("conf").resolve()
    return ([here] if here.is_dir() and here != CONF else []) + plugins.option_folders()


def option_file(group: str, name: str) -> Path | None:
    """Return the file of an option, as in conf/cache/streaming.yaml; None if there is none."""
    files = (folder / group / f"{name}.yaml" for folder in (CONF, *own_folders()))
    return next((file for file in files if file.is_file()), None)


# batch.size=auto. With fewer rows a small model is bound by its weights (CPU) or by latency (GPU), not by its KV cache.
ROWS_ON = {"cpu": 24, "cuda": 64}
AUTO_GAMMAS = (1, 2, 3, 5, 8)  # what draft.gamma=auto chooses among: a captured round each


def _fraction(default: float) -> Any:
    return ruled(default, lambda value: 0 < value <= 1, "must be above 0 and at most 1")


@dataclass(frozen=True)
class Efficiency:
    """The share of a datasheet that a machine achieves, and the other costs of a step."""

    bandwidth_fraction: float = _fraction(0.9)  # of the memory's bandwidth, streaming weights and KV
    matmul_fraction: float = _fraction(0.7)  # of the bf16 rate, by a matmul of many rows
    matmul_half_rows: float = at_least(0, 16.0)  # rows at which a matmul achieves half of that: a tensor core's tile
    attention_fraction: float = _fraction(1.0)  # of a matmul's rate, by the attention of a few query rows
    overlap: float = _fraction(1.0)  # of the shorter of memory and arithmetic, hidden behind the longer
    layer_overhead_us: float = at_least(0, 60.0)  # a layer's kernel launches and gaps
    step_overhead_us: float = at_least(0, 0.0)  # what a forward pass takes around its layers: tables, logits, the host
    round_overhead_us: float = at_least(0, 700.0)  # accept, commit and the host, per round
    allreduce_hop_us: float = at_least(0, 5.0)  # latency of each of log2(ranks) hops
    allreduce_bandwidth_fraction: float = _fraction(0.3)  # of the link's, at the megabyte or so of a decode step


@dataclass(frozen=True)
class HardwareConfig:
    """The machine, and its figures."""

    name: str = MISSING
    device: str = one_of("auto", "cpu", "cuda", default=MISSING)
    dtype: str = one_of("auto", "float32", "bfloat16", "float16", default=MISSING)
    tensor_parallel: int = at_least(1, default=MISSING)
    all_reduce: str = one_of("auto", "nccl", "symmetric", default=MISSING)
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
    """The amount of work: rows, prompt length, tokens to generate."""

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
    """The source of prompts."""

    name: str = MISSING
    path: str | None = None
    task: str | None = None
    seed: int = at_least(0, default=0)
    save_prompts: bool = False


@dataclass(frozen=True)
class SamplingConfig:
    """The choice of a token."""

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
    """The backend of attention."""

    name: str = one_of("auto", "sdpa", "cpp", "triton", "flash", "flashinfer", default=MISSING)


@dataclass(frozen=True)
class ScenarioConfig:
    """The kind of run, and its settings."""

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
    """The mode, project and names under which Weights & Biases logs a run."""

    mode: str = one_of("offline", "online", "disabled", default=MISSING)
    project: str = MISSING
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SweepConfig:
    """The settings of a multirun."""

    name: str | None = None
    fail_fast: bool = MISSING
    figures: bool = MISSING
    dry_run: bool = MISSING
    objective: str = MISSING


@dataclass(frozen=True)
class Config:
    """A whole run."""

    target: ModelChoice
    draft: DraftConfig
    cache: CacheConfig
    hardware: HardwareConfig
    batch: BatchConfig
    data: DataConfig
    sampling: SamplingConfig
    attention: AttentionConfig
    engine: EngineConfig
    scenario: ScenarioConfig
    wandb: WandbConfig
    sweep: SweepConfig
    tracker: Any = field(default=MISSING, metadata=NAMES)
    plugins: list[str] = field(default_factory=list)
    runs_dir: str = MISSING
    resume: bool | str = ruled(
        MISSING, lambda value: value in (True, False, "any_version"), "must be true, false or any_version"
    )

    @property
    def speculates(self) -> bool:
        """Return whether the run has a draft."""
        return self.draft.name != "none"

    @property
    def gammas(self) -> tuple[int, ...]:
        """Return the gammas that a run may use: for auto all that fit into the budgets; (0,) without a draft."""
        if not self.speculates:
            return (0,)
        if self.draft.gamma != "auto":
            return (int(self.draft.gamma),)
        least = min((cache.budget for cache in self.budgeted.values()), default=math.inf)
        return tuple(gamma for gamma in AUTO_GAMMAS if gamma < least) or AUTO_GAMMAS[:1]

    @property
    def budgeted(self) -> dict[str, CacheConfig]:
        """Return the caches whose `budget` bounds what the draft reads, by key."""
        caches = self.draft.caches(self.cache) if self.speculates else {}
        return {key: cache for key, cache in caches.items() if cache.has_budget}

    @property
    def models(self) -> dict[str, ModelChoice]:
        """Return the models of a run by the keys that choose them."""
        return {"target": self.target} | ({"draft.model": self.draft.model} if self.draft.model else {})


# Groups whose options have keys of their own, by their key in the configuration.
REGISTRIES: dict[str, Registry[Any]] = {"cache": POLICIES, "draft": DRAFTS, "draft.cache": POLICIES, "engine": ENGINES}


def known_keys(schema: type = Config, prefix: str = "") -> Iterator[str]:
    """Yield every key of the configuration, dotted; those of all options."""
    own = REGISTRIES[prefix[:-1]].own_fields() if prefix[:-1] in REGISTRIES else {}
    hints = get_type_hints(schema) | {name: entry.type for name, entry in own.items()}
    for name, hint in hints.items():
        yield prefix + name
        for kind in (hint, *get_args(hint)):
            if is_dataclass(kind) and isinstance(kind, type):
                yield from known_keys(kind, f"{prefix}{name}.")
