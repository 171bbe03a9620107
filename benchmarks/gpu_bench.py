"""The shared part of the points of benchmarks/gpu.py: the sizes of everything, and the large
model.
"""

import gc
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from gpu_kernels import SAMPLED
from gpu_store import Record, Store

from magicdec.config.load import compose
from magicdec.costmodel.comparison import predicted_metrics
from magicdec.costmodel.round import Setup
from magicdec.engine.native import Batch, NativeEngine, warm_up
from magicdec.errors import UserError
from magicdec.measure import memory_use
from magicdec.measure.ceilings import matmul_rate, read_bandwidth
from magicdec.measure.footprint import largest_batch
from magicdec.measure.metrics import Metrics
from magicdec.planning import build, fits
from magicdec.planning.resolve import DTYPES, resolve
from magicdec.planning.resolved import Plan
from magicdec.planning.setup import setup_of
from magicdec.scenarios import checked_memory, compare, peer
from magicdec.tracking.progress import progress
from magicdec.tracking.store import Run
from magicdec.units import GIB
from magicdec.verification.sampling import Sampling


@dataclass(frozen=True)
class Sizes:
    """The sizes of everything. What comes first matters most."""

    device: str = "cuda"
    dtype: str = "bfloat16"
    target: tuple[str, ...] = ("target=llama-3.1-8b",)
    cells: tuple[tuple[int, int], ...] = (
        (24, 32768),
        (8, 100_000),
        (192, 4096),
        (96, 8192),
        (48, 16384),
    )
    budgets: tuple[int, ...] = (512, 256, 2049)
    policy_rows: float = 0.6  # of the first cell: two policies keep more than the cache itself
    gammas: tuple[int, ...] = (4, 2, 3, 6)
    prefill: tuple[int, int] = (4, 16384)
    pass_tokens: tuple[int, ...] = (16384, 2048)  # of all rows
    sampling: Sampling = SAMPLED
    kernel_contexts: tuple[int, ...] = (4096, 16384, 32768, 100_000)
    kernel_tokens: tuple[int, ...] = (1, 2, 4, 5, 8)
    kernel_bytes: int = 4 << 30  # keys and values of the layer that is timed
    ceiling_bytes: int = 4 << 30
    matmul: int = 8192
    pair_context: int = 8320
    pair_batches: tuple[int, ...] = (1, 8, 32, 64)  # as many as there is text for
    new_tokens: int = 96
    repeats: int = 10
    # All that are marked gpu, and the few of them that come first. Other modules may need more than
    # a GPU machine has.
    tests: tuple[tuple[str, str], ...] = (
        ("tests/engine/test_gpu.py", "streaming or quest"),
        ("tests/attention/test_triton.py", "bfloat or dtype1"),
        ("tests/attention/test_flash.py", "128"),
        ("tests/verification/test_truncation.py", ""),
        ("tests/serving/test_lossless.py", "streaming"),
        ("tests/attention/test_flashinfer.py", ""),
        ("tests/attention/test_varlen.py", ""),
        ("tests/measure/test_gpu.py", ""),
        ("tests/commands/test_doctor.py", ""),
    )


TINY = ("vocab_size=128", "hidden_size=32", "intermediate_size=64", "num_layers=2")
TINY += ("num_heads=4", "num_kv_heads=2", "head_dim=8")
REHEARSAL = Sizes(
    device="cpu",
    dtype="float32",
    target=("target=llama-3.1-8b", *(f"target.architecture.{size}" for size in TINY)),
    cells=((2, 256),),
    budgets=(32, 64),
    gammas=(2, 3),
    prefill=(2, 128),
    pass_tokens=(128, 64),
    kernel_contexts=(256,),
    kernel_tokens=(1, 4),
    kernel_bytes=1 << 20,
    ceiling_bytes=1 << 20,
    matmul=128,
    pair_context=256,
    pair_batches=(1, 2),
    new_tokens=16,
    repeats=1,
    tests=(("tests/engine/test_gpu.py", "streaming"),),
)


def cell_name(batch: int, context: int, budget: int | None = None, gamma: int | None = None) -> str:
    """Return the key of a cell, or its beginning."""
    parts = [
        f"{batch} x {context}",
        *([f"budget {budget}"] if budget else []),
        *([f"gamma {gamma}"] if gamma else []),
    ]
    return ", ".join(parts)


@dataclass
class Bench:
    """The sizes, the points that are known already, and what several parts need."""

    store: Store
    sizes: Sizes
    checkout: Path | None = None  # of the MagicDec authors' software

    @property
    def device(self) -> torch.device:
        """Return the device."""
        return torch.device(self.sizes.device)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that models compute in."""
        return DTYPES[self.sizes.dtype]

    def answers(self) -> bool:
        """Free what the last point has held. Return False if the device no longer answers."""
        gc.collect()  # captured graphs hold caches in a circle
        if self.device.type != "cuda":
            return True
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:  # an error on a device stays until its process ends
            return False
        return True

    @property
    def settings(self) -> list[str]:
        """Return the overrides of all runs."""
        sizes = [
            f"batch.generate_len={self.sizes.new_tokens}",
            f"scenario.profile_repeats={self.sizes.repeats}",
        ]
        return [
            f"hardware.device={self.sizes.device}",
            f"hardware.dtype={self.sizes.dtype}",
            *sizes,
        ]

    def large_settings(
        self,
        batch: int,
        context: int,
        budget: int,
        gamma: int,
        policy: str = "streaming",
        *more: str,
    ) -> list[str]:
        """Return the overrides of the large target with random weights, drafting for itself."""
        sizes = [f"batch.size={batch}", f"batch.context_len={context}", f"cache={policy}"]
        sizes += [] if policy == "full" else [f"cache.budget={budget}"]
        draft = ["draft=self", f"draft.gamma={gamma}", "draft.synthetic_acceptance=0.8"]
        return [*self.sizes.target, "target.weights=random", "data=random", *sizes, *draft, *more]

    def plan(self, *overrides: str) -> Plan:
        """Return a plan as `launch.py` would make it."""
        return resolve(compose([*self.settings, *overrides]))

    def large(
        self,
        batch: int,
        context: int,
        budget: int,
        gamma: int,
        policy: str = "streaming",
        *more: str,
    ) -> Plan:
        """Return a plan of the large target. `more` are overrides."""
        return self.plan(*self.large_settings(batch, context, budget, gamma, policy, *more))

    def run(self, *overrides: str) -> Metrics:
        """Do a run as `launch.py` would, in this process; return its metrics, and what is predicted
        of it.
        """
        plan = self.plan(*overrides)
        scenario = compare if plan.config.engine.name == "native" else peer
        estimated = checked_memory(plan)
        with TemporaryDirectory() as runs, progress() as bars:
            metrics = estimated | scenario.run(plan, Run.open(runs, "point", {}), bars).metrics
        return metrics | (compare.prediction_of(plan, metrics) if scenario is compare else {})

    @property
    def policy_cell(self) -> tuple[int, int, int, int]:
        """Return rows, context, budget and gamma of a cell that is compared over policies: some
        keep much more.
        """
        (rows, context), budget, gamma = self.cells[0], self.sizes.budgets[0], self.sizes.gammas[0]
        return max(1, int(self.sizes.policy_rows * rows)), context, budget, gamma

    @property
    def cells(self) -> list[tuple[int, int]]:
        """Return rows and context of the cells: those that were fitted to this device, once that is
        done.
        """
        stored = self.store.points("cells").get("rows", {}).get("cells", self.sizes.cells)
        return [(rows, context) for rows, context in stored]

    def fitted(self) -> list[tuple[int, int]]:
        """Return the cells with no more rows than this device holds at the largest budget and
        gamma.
        """
        available = memory_use.available_bytes(self.device) - memory_use.reserved_bytes(self.device)
        budget, gamma = max(self.sizes.budgets), max(self.sizes.gammas)

        def rows_of(rows: int, context: int) -> int:
            def needed(rows: int) -> int:
                return fits.estimate(self.large(rows, context, budget, gamma), rows, context).needed

            return max(1, largest_batch(needed, rows + 1, available))

        return [(rows_of(*cell), cell[1]) for cell in self.sizes.cells]

    @cached_property
    def engine(self) -> NativeEngine:
        """Return the engine of the large target, loaded once."""
        batch, context = self.cells[0]
        with progress() as bars:
            return build.engine(
                self.large(batch, context, self.sizes.budgets[0], self.sizes.gammas[0]), bars
            )

    def open(
        self,
        batch: int,
        context: int,
        budget: int,
        gamma: int,
        alpha: float | None,
        sampling: Sampling | None = None,
        policy: str = "streaming",
        more: tuple[str, ...] = (),
    ) -> Batch:
        """Return a batch over caches of noise, with its rounds captured. Raise UserError if it does
        not fit.
        """
        plan = self.large(batch, context, budget, gamma, policy, *more)
        predicted = fits.estimate(plan, batch, context)
        needed = predicted.needed - predicted.weights
        engine = build.assembled(plan, lambda _: self.engine.target)
        available = memory_use.available_bytes(self.device)
        if needed > available:
            raise UserError(
                f"needs {needed / GIB:.1f} GiB next to the weights, of {available / GIB:.1f}"
            )
        draft = replace(engine.draft, synthetic_acceptance=alpha)
        opened = replace(engine, draft=draft, sampling=sampling or engine.sampling).open(
            [[0] * context] * batch
        )
        opened.simulate_prefill()
        warm_up(opened)
        return opened

    @cached_property
    def ceilings(self) -> tuple[float | None, float | None]:
        """Return the GB/s and the TFLOP/s to predict with: None where the datasheet of the device
        is known.
        """
        if self.device.type == "cuda":
            return None, None
        return read_bandwidth(self.device) / 1e9, matmul_rate(self.device, self.dtype) / 1e12

    def setup(self, plan: Plan) -> Setup | None:
        """Return what the cost model predicts a plan from; None on a device without a datasheet."""
        try:
            return setup_of(plan, *self.ceilings)
        except UserError:
            return None

    def predicted(self, plan: Plan, gamma: int, alpha: float | None = None) -> Record:
        """Return what the cost model predicts for a plan on this device, by the names of a run's
        metrics.
        """
        setup = self.setup(plan)
        return (
            predicted_metrics(setup, gamma, {} if alpha is None else {"alpha": alpha})
            if setup
            else {}
        )
