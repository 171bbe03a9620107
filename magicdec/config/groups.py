"""The general groups of the configuration and the rules of their values, as frozen pydantic
dataclasses.

A class is a group, a field a key; conf/ explains them and holds the values that a run starts from.
The groups cache, draft and engine have a class for each option, in the option's own module
(magicdec/config/registry.py); the group scenario has one for each scenario (scenario_settings.py).
"""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from magicdec.inputs.rules import (
    LARGEST,
    STRICT,
    Count,
    FileName,
    ProjectName,
    must,
    within,
)

# batch.size=auto. With fewer rows a small model is bound by its weights (CPU) or by latency (GPU),
# not by its KV cache.
ROWS_ON = {"cpu": 24, "cuda": 64}

Cost = Annotated[float, Field(ge=0), within(0, 1e12)]
Figure = Annotated[float, Field(gt=0), within(1e-9, 1e12)]
# The share of a datasheet's rate; with less than a millionth, predictions would not stay finite.
Achieved = Annotated[float, Field(ge=1e-6, le=1), must("must be from 1e-06 to 1")]
Tolerance = Annotated[float, Field(ge=0, lt=1), must("must be at least 0 and below 1")]
AutoOrCount = Annotated[
    Literal["auto"] | Count, must(f"must be auto or a whole number from 1 to {LARGEST:,}")
]


@dataclass(frozen=True, config=STRICT)
class Efficiency:
    """The share of a datasheet that a machine achieves, and the other costs of a step."""

    bandwidth_fraction: Achieved = 0.9  # of the memory's bandwidth, streaming weights and KV
    matmul_fraction: Achieved = 0.7  # of the bf16 rate, by a matmul of many rows
    matmul_half_rows: Cost = 16.0  # rows at which a matmul achieves half of that: a tile
    attention_fraction: Achieved = 1.0  # of a matmul's rate, by the attention of a few query rows
    overlap: Achieved = 1.0  # of the shorter of memory and arithmetic, hidden behind the longer
    layer_overhead_us: Cost = 60.0  # a layer's kernel launches and gaps
    step_overhead_us: Cost = 0.0  # of a forward pass around its layers: tables, logits, the host
    expert_overhead_us: Cost = 0.0  # of each expert that a matmul touches
    round_overhead_us: Cost = 700.0  # accept, commit and the host, per round
    allreduce_hop_us: Cost = 5.0  # latency of each of log2(ranks) hops
    allreduce_bandwidth_fraction: Achieved = 0.3  # of the link's, at a decode step's megabyte


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
        Count,
        must(
            f"must be at least 2 (the first new token comes from the prefill), at most {LARGEST:,}",
            lambda value: value >= 2,
        ),
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
    jobs_per_task: Annotated[
        Count | None, must(f"must be a whole number from 1 to {LARGEST:,}, or null")
    ]
