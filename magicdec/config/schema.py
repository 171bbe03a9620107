"""The general groups of the configuration and the rules of their values, as frozen pydantic
dataclasses.

A class is a group, a field a key; conf/ explains them and holds the values that a run starts from.
The groups cache, draft and engine have a class for each option, in the option's own module
(magicdec/config/registry.py); the group scenario has one for each scenario, below.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, TypeVar, get_args, get_type_hints

from pydantic import Field
from pydantic.dataclasses import dataclass
from typing_extensions import override

from magicdec.config.choices import CacheConfig, ModelChoice
from magicdec.config.registry import AttentionName, Cache, Data, Draft, Engine
from magicdec.errors import UserError
from magicdec.inputs.plugins import option_folders
from magicdec.inputs.rules import (
    STRICT,
    Count,
    Counts,
    FileName,
    Fraction,
    Percentage,
    ProjectName,
    Share,
    is_file_name,
    must,
)

# In an installation conf/ is in the package, in a checkout next to it.
PLACES = [folder / "conf" for folder in Path(__file__).resolve().parents[1:3]]
CONF = next(place for place in PLACES if place.is_dir())


def own_folders() -> list[Path]:
    """Return the folders with a user's own options: ./conf of the working directory, and those of
    installed plugins.
    """
    here = Path("conf").resolve()
    return ([here] if here.is_dir() and here != CONF else []) + option_folders()


def option_file(group: str, name: str) -> Path | None:
    """Return the file of an option, as in conf/cache/streaming.yaml; None if there is none."""
    files = (folder / group / f"{name}.yaml" for folder in (CONF, *own_folders()))
    return next((file for file in files if file.is_file()), None) if is_file_name(name) else None


def check_is_read(group: str, name: str, file: Path, key: str) -> None:
    """Raise UserError where an option to be written as `file` would never be read: another one
    takes precedence.
    """
    first = option_file(group, name)
    if first is not None and first.resolve() != file.resolve():
        raise UserError(
            f"{key}: {group}={name} is an option already ({first}), which is read first; choose"
            " another name"
        )


# batch.size=auto. With fewer rows a small model is bound by its weights (CPU) or by latency (GPU),
# not by its KV cache.
ROWS_ON = {"cpu": 24, "cuda": 64}

Cost = Annotated[float, Field(ge=0)]
Figure = Annotated[float, Field(gt=0)]
SomeCounts = Annotated[Counts, Field(min_length=1)]
Tolerance = Annotated[float, Field(ge=0, lt=1), must("must be at least 0 and below 1")]
AutoOrCount = Annotated[Literal["auto"] | Count, must("must be auto or at least 1")]


@dataclass(frozen=True, config=STRICT)
class Efficiency:
    """The share of a datasheet that a machine achieves, and the other costs of a step."""

    bandwidth_fraction: Fraction = 0.9  # of the memory's bandwidth, streaming weights and KV
    matmul_fraction: Fraction = 0.7  # of the bf16 rate, by a matmul of many rows
    matmul_half_rows: Cost = 16.0  # rows at which a matmul achieves half of that: a tile
    attention_fraction: Fraction = 1.0  # of a matmul's rate, by the attention of a few query rows
    overlap: Fraction = 1.0  # of the shorter of memory and arithmetic, hidden behind the longer
    layer_overhead_us: Cost = 60.0  # a layer's kernel launches and gaps
    step_overhead_us: Cost = 0.0  # of a forward pass around its layers: tables, logits, the host
    expert_overhead_us: Cost = 0.0  # of each expert that a matmul touches
    round_overhead_us: Cost = 700.0  # accept, commit and the host, per round
    allreduce_hop_us: Cost = 5.0  # latency of each of log2(ranks) hops
    allreduce_bandwidth_fraction: Fraction = 0.3  # of the link's, at a decode step's megabyte


@dataclass(frozen=True, config=STRICT)
class HardwareConfig:
    """The machine, and its figures."""

    name: str
    device: Literal["auto", "cpu", "cuda"]
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    tensor_parallel: Count
    all_reduce: Literal["auto", "nccl", "symmetric"]
    cuda_graphs: bool
    compile: Annotated[bool | Literal["auto"], must("must be auto, true or false")]
    memory_gib: Figure | None = None
    bandwidth_gbs: Figure | None = None
    tflops: Figure | None = None
    efficiency: Efficiency | None = None

    @property
    def captures(self) -> bool:
        """Return whether rounds are captured as CUDA graphs; `device` must be resolved."""
        return self.cuda_graphs and self.device == "cuda"


@dataclass(frozen=True, config=STRICT)
class BatchConfig:
    """The amount of work: rows, prompt length, tokens to generate."""

    size: AutoOrCount
    context_len: Count
    # At least 2: the first new token comes from the prefill.
    generate_len: Annotated[
        int, Field(ge=2), must("must be at least 2 (the first new token comes from the prefill)")
    ]
    num_batches: Count
    prefill_chunk: AutoOrCount


@dataclass(frozen=True, config=STRICT)
class SamplingConfig:
    """The choice of a token. temperature 0 is greedy; top_k and top_p None keep everything."""

    # Logits over a temperature near 0 would leave float32.
    temperature: Annotated[
        float,
        must(
            "must be 0 (greedy) or from 0.0001 to 10,000",
            lambda value: value == 0 or 1e-4 <= value <= 1e4,
        ),
    ] = 0.0
    top_k: Annotated[
        int | None, Field(ge=1, lt=1 << 31), must("must be at least 1 and below 2^31")
    ] = None
    # Less than that is 0 in float32, which keeps no token at all.
    top_p: Annotated[float | None, Field(ge=1e-30, le=1), must("must be from 1e-30 to 1")] = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63), must("must be at least 0 and below 2^63")] = 0
    ignore_eos: bool = False

    @property
    def greedy(self) -> bool:
        """Return whether the largest logit decides."""
        return self.temperature == 0.0


class Needs:
    """The needs of a kind of run, with those of most as defaults."""

    predicts: ClassVar[bool] = False  # it loads no weights, and measures nothing
    searches: ClassVar[bool] = False  # for drafts and caches of its own
    reads_text: ClassVar[bool] = True
    measures_acceptance: ClassVar[bool] = True
    prefills_batches: ClassVar[bool] = False  # those of the data, which jobs of a sweep share
    serves: ClassVar[bool] = False  # requests that come and go
    audits: ClassVar[bool] = False  # the logits of what was written
    stores_units: ClassVar[bool] = False  # parts of the work, each when it ends
    # Its result depends on other runs in the store, so that no sweep skips it.
    reads_store: ClassVar[bool] = False
    # Keys of its own that name a file, whose content decides the result.
    files: ClassVar[tuple[str, ...]] = ()
    # Keys of its own that replace general ones.
    at: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def key_of(self, general: str) -> str:
        """Return the key that this scenario has in place of a general one, or the general one."""
        return self.at.get(general, general)

    def largest(self, batch: BatchConfig) -> tuple[int, int]:
        """Return the rows and the context of the largest batch; `batch.size` is resolved."""
        return int(batch.size), self.longest(batch)

    def longest(self, batch: BatchConfig) -> int:
        """Return the longest context."""
        return batch.context_len


# Of scenarios that measure a grid.
GRID = MappingProxyType(
    {
        "batch.size": "scenario.batch_sizes",
        "batch.context_len": "scenario.context_lens",
        "draft.gamma": "scenario.gammas",
    }
)


@dataclass(frozen=True, config=STRICT)
class Compare(Needs):
    """Speculative next to autoregressive decoding of the same prompts."""

    prefills_batches: ClassVar[bool] = True
    audits: ClassVar[bool] = True
    stores_units: ClassVar[bool] = True

    name: Literal["compare"]
    repeats: AutoOrCount
    profile_repeats: Count
    precision: Percentage = 0.02
    max_minutes: Figure = 10.0


@dataclass(frozen=True, config=STRICT)
class Profile(Needs):
    """The times of a round's parts over a grid."""

    reads_text: ClassVar[bool] = False
    measures_acceptance: ClassVar[bool] = False
    stores_units: ClassVar[bool] = True
    files: ClassVar[tuple[str, ...]] = ("forward",)
    at: ClassVar[Mapping[str, str]] = GRID

    name: Literal["profile"]
    profile_repeats: Count
    batch_sizes: SomeCounts
    context_lens: SomeCounts
    gammas: SomeCounts
    expected_alpha: Share | None = None
    forward: str | None = None

    @override
    def largest(self, batch: BatchConfig) -> tuple[int, int]:
        return max(self.batch_sizes), self.longest(batch)

    @override
    def longest(self, batch: BatchConfig) -> int:
        return max(self.context_lens)


@dataclass(frozen=True, config=STRICT)
class Verify(Needs):
    """A schedule of gammas next to every fixed gamma over a grid."""

    files: ClassVar[tuple[str, ...]] = ("file",)
    at: ClassVar[Mapping[str, str]] = GRID

    name: Literal["verify"]
    file: str | None
    steps: Literal["predicted", "measured"]
    batch_sizes: SomeCounts
    context_lens: SomeCounts
    gammas: SomeCounts
    repeats: Count
    tolerance: Tolerance

    @override
    def longest(self, batch: BatchConfig) -> int:
        return max(self.context_lens)


@dataclass(frozen=True, config=STRICT)
class Assumed(Needs):
    """An assumed acceptance: alpha itself, or what an engine reported at a gamma of its own."""

    predicts: ClassVar[bool] = True
    reads_text: ClassVar[bool] = False
    measures_acceptance: ClassVar[bool] = False
    reads_store: ClassVar[bool] = True

    alpha: Share | None
    acceptance_rate: Share | None
    acceptance_length: Annotated[float | None, Field(ge=1), must("must be at least 1, or null")]
    acceptance_gamma: Count | None
    stack: str | None
    match_share: Share | None
    routing: str | None

    def mistakes(self) -> Iterator[str]:
        """Yield what contradicts itself."""
        given = [
            key
            for key in ("alpha", "acceptance_rate", "acceptance_length")
            if getattr(self, key) is not None
        ]
        if len(given) > 1:
            yield f"scenario.{given[0]} and scenario.{given[1]} say the same thing twice; give one"
        reported = [key for key in given if key != "alpha"]
        if reported and self.acceptance_gamma is None:
            yield (
                f"scenario.{reported[0]} needs scenario.acceptance_gamma: how many tokens were"
                " proposed per round when it was measured (vLLM's num_speculative_tokens)"
            )
        if self.acceptance_gamma is not None and not reported:
            yield (
                "scenario.acceptance_gamma has no effect without scenario.acceptance_rate or"
                " acceptance_length"
            )
        if (
            self.length is not None
            and self.acceptance_gamma
            and self.length > self.acceptance_gamma + 1
        ):
            most = self.acceptance_gamma + 1
            yield (
                f"scenario.acceptance_length={self.length} is above scenario.acceptance_gamma + 1 ="
                f" {most}"
            )

    @property
    def length(self) -> float | None:
        """Return the reported tokens per round, bonus token included; None where nothing was
        reported.
        """
        if self.acceptance_rate is not None and self.acceptance_gamma is not None:
            return 1 + self.acceptance_gamma * self.acceptance_rate
        return self.acceptance_length


@dataclass(frozen=True, config=STRICT)
class Predict(Assumed):
    """A prediction by the cost model."""

    name: Literal["predict"]
    gammas: SomeCounts
    critical_batches: Annotated[
        Counts, must("must be a smaller and a larger batch", lambda b: len(b) == 2 and b[0] < b[1])
    ]


@dataclass(frozen=True, config=STRICT)
class Search(Assumed):
    """A search for the best configuration by the cost model."""

    searches: ClassVar[bool] = True

    name: Literal["plan"]
    drafts: Annotated[list[str], Field(min_length=1)]
    policies: Annotated[list[str], Field(min_length=1)]
    gammas: SomeCounts
    batch_sizes: Counts
    context_lens: Counts
    workload: Annotated[
        list[list[Count]],
        must(
            "must hold pairs of prompt and output tokens, as in [[4000,500]]",
            lambda v: all(len(p) == 2 for p in v),
        ),
    ]
    latency_ms: Figure | None
    schedule: Literal["vllm", "vllm_by_context", "sglang", "tensorrt_llm", "llamacpp"] | None
    tolerance: Tolerance
    least_gamma: Literal[0, 1]
    save_as: FileName


@dataclass(frozen=True, config=STRICT)
class Serve(Needs):
    """Requests that come and go."""

    serves: ClassVar[bool] = True
    stores_units: ClassVar[bool] = True

    name: Literal["serve"]
    concurrencies: Counts
    rates: Annotated[list[Figure], must("must hold numbers above 0")]
    replays: Annotated[list[Figure], must("must hold numbers above 0")]
    num_requests: Count
    length_shares: Annotated[
        list[Fraction], must("must hold numbers above 0 and at most 1"), Field(min_length=1)
    ]
    latency_ms: Figure | None
    first_token_ms: Figure | None
    slo: Literal["concurrency", "rate"] | None
    slo_percentile: Literal[50, 90, 99]
    slo_most: Figure

    @property
    def bounds(self) -> dict[str, float | None]:
        """Return the bounds of latencies, by metric."""
        return {
            "time_per_output_token_ms": self.latency_ms,
            "time_to_first_token_ms": self.first_token_ms,
        }


S = TypeVar("S", Compare, Profile, Verify, Predict, Search, Serve)
Scenario = Annotated[
    Compare | Profile | Verify | Predict | Search | Serve, Field(discriminator="name")
]
# Their classes by name.
SCENARIOS: dict[str, type] = {
    get_args(get_type_hints(kind)["name"])[0]: kind for kind in S.__constraints__
}


@dataclass(frozen=True, config=STRICT)
class WandbConfig:
    """The mode, project and names under which Weights & Biases logs a run."""

    mode: Literal["offline", "online", "disabled"]
    project: ProjectName
    entity: str | None = None
    group: str | None = None
    tags: list[str] = Field(default_factory=list)


@dataclass(frozen=True, config=STRICT)
class SweepConfig:
    """The settings of a multirun."""

    name: FileName
    fail_fast: bool
    figures: bool
    dry_run: bool
    objective: str
    share: Literal["prefill", "weights", "none"]
    turns: bool
    jobs_per_task: Annotated[int | None, Field(ge=1), must("must be at least 1, or null")]


@dataclass(frozen=True, config=STRICT)
class Config:
    """A whole run."""

    target: ModelChoice
    draft: Draft
    cache: Cache
    hardware: HardwareConfig
    batch: BatchConfig
    data: Data
    sampling: SamplingConfig
    attention: AttentionName
    engine: Engine
    scenario: Scenario
    wandb: WandbConfig
    sweep: SweepConfig
    tracker: Annotated[str | list[str], must("must be a name or a list of names, as in [a,b]")]
    plugins: list[str]
    runs_dir: str
    resume: Annotated[
        bool | Literal["any_version", "noisy"], must("must be true, false, any_version or noisy")
    ]

    def settings(self, kind: type[S]) -> S:
        """Return the group `scenario`, which must be of this kind."""
        assert isinstance(self.scenario, kind), f"scenario={self.scenario.name}"
        return self.scenario

    @property
    def reads_text(self) -> bool:
        """Return whether the run reads the data: a server cannot be profiled without prompts."""
        is_asked = self.engine.name != "native" and not self.scenario.predicts
        return self.scenario.reads_text or is_asked

    @property
    def speculates(self) -> bool:
        """Return whether the run has a draft."""
        return self.draft.name != "none"

    @property
    def stores_units(self) -> bool:
        """Return whether the parts of a run are stored one by one, so that others can be added."""
        return self.scenario.stores_units

    @property
    def compares_natively(self) -> bool:
        """Return whether our own engine decodes both ways, which the cost model can predict."""
        return isinstance(self.scenario, Compare) and self.engine.name == "native"

    @property
    def gammas(self) -> tuple[int, ...]:
        """Return the gammas that a run may use."""
        return self.draft.gammas(self.cache)

    @property
    def budgeted(self) -> dict[str, CacheConfig]:
        """Return the caches whose `budget` bounds what the draft reads, by key."""
        return self.draft.budgeted(self.cache)

    @property
    def models(self) -> dict[str, ModelChoice]:
        """Return the models of a run by the keys that choose them."""
        return {"target": self.target} | (
            {"draft.model": self.draft.model} if self.draft.model else {}
        )
