"""The shared part of benchmarks/gpu.py: the sizes of everything, the stored points, and the large model."""

import gc
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from gpu_page import short

from magicdec.config.load import compose
from magicdec.engine.native import Batch, NativeEngine, warm_up
from magicdec.errors import UserError
from magicdec.measure import memory
from magicdec.planning import build
from magicdec.planning.resolve import DTYPES, Plan, resolve
from magicdec.scenarios import OUT_OF_MEMORY
from magicdec.tracking.progress import progress
from magicdec.units import GIB

Record = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """The sizes of everything."""

    device: str = "cuda"
    dtype: str = "bfloat16"
    target: tuple[str, ...] = ("target=llama-3.1-8b",)
    cells: tuple[tuple[int, int], ...] = ((24, 32768), (192, 4096), (96, 8192), (48, 16384), (8, 100_000))
    budgets: tuple[int, ...] = (256, 512, 2049)
    gammas: tuple[int, ...] = (2, 3, 4, 6)
    kernel_contexts: tuple[int, ...] = (4096, 16384, 32768, 100_000)
    kernel_tokens: tuple[int, ...] = (1, 2, 4, 8)
    kernel_bytes: int = 4 << 30  # keys and values of the layer that is timed
    ceiling_bytes: int = 4 << 30
    matmul: int = 8192
    pair_context: int = 8320
    pair_batches: tuple[int, ...] = (1, 8, 32, 128)
    new_tokens: int = 96
    repeats: int = 10
    tests: tuple[str, ...] = (  # all that are marked gpu; the others' modules may need more than a GPU machine has
        "tests/engine/test_gpu.py",
        "tests/attention/test_triton.py",
        "tests/attention/test_flash.py",
        "tests/attention/test_flashinfer.py",
        "tests/measure/test_gpu.py",
    )

    def within(self, num_bytes: int) -> "Sizes":
        """Return the same sizes with as many rows as a card of this memory holds: the cells are those of an H200."""
        rows_share = min(1.0, (num_bytes / GIB - WEIGHTS_GIB) / (H200_GIB - WEIGHTS_GIB))
        return replace(self, cells=tuple((max(1, int(rows * rows_share)), context) for rows, context in self.cells))


H200_GIB = 139
WEIGHTS_GIB = 20  # of the large model, with what is not its cache


TINY = [
    "vocab_size=128",
    "hidden_size=32",
    "intermediate_size=64",
    "num_layers=2",
    "num_heads=4",
    "num_kv_heads=2",
    "head_dim=8",
]
REHEARSAL = Sizes(
    device="cpu",
    dtype="float32",
    target=("target=llama-3.1-8b", *(f"target.architecture.{size}" for size in TINY)),
    cells=((2, 256),),
    budgets=(32, 64),
    gammas=(2, 3),
    kernel_contexts=(256,),
    kernel_tokens=(1, 4),
    kernel_bytes=1 << 20,
    ceiling_bytes=1 << 20,
    matmul=128,
    pair_context=256,
    pair_batches=(1, 2),
    new_tokens=8,
    repeats=1,
    tests=("tests/engine/test_gpu.py",),
)


class OutOfTime(Exception):
    """The end of the time; the next call measures the rest."""


class DeviceLost(Exception):
    """The failure of the device for this process."""


@dataclass
class Bench:
    """The folder of results, and what several parts need."""

    folder: Path
    sizes: Sizes
    deadline: float = float("inf")
    commit: str = ""

    @property
    def seconds_left(self) -> float:
        """Return the time until no other point is started."""
        return self.deadline - time.monotonic()

    @property
    def device(self) -> torch.device:
        """Return the device."""
        return torch.device(self.sizes.device)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that models compute in."""
        return DTYPES[self.sizes.dtype]

    def points(self, part: str) -> dict[str, Record]:
        """Return the stored points of a part."""
        path = self.folder / f"{part}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def point(self, part: str, key: str, measure: Callable[[], Record]) -> Record:
        """Return a stored point, or measure and store it. A failure is stored with its reason."""
        known = self.points(part)
        if key in known:
            return known[key]
        if self.seconds_left < 0:
            raise OutOfTime
        try:
            found = measure()
        except (OutOfTime, DeviceLost):  # of a point that this one asks for
            raise
        except UserError as error:
            found = {"skipped": str(error)}
        except Exception as error:
            message = (str(error).splitlines() or [""])[0]
            if any(words in str(error) for words in OUT_OF_MEMORY):
                found = {"skipped": f"out of memory ({message})"}
            else:
                traceback.print_exc()
                found = {"failed": f"{type(error).__name__}: {message}"}
        self._store(part, known | {key: found | {"commit": self.commit}})
        print(f"{part} {key}: {short(found)}", flush=True)
        if not self._clean():
            raise DeviceLost
        return found

    def retry(self) -> None:
        """Delete the points that were skipped or have failed."""
        for path in self.folder.glob("?.json"):
            known = self.points(path.stem)
            self._store(path.stem, {k: v for k, v in known.items() if not {"skipped", "failed"} & v.keys()})

    def _store(self, part: str, points: dict[str, Record]) -> None:
        temporary = self.folder / f".{part}.json"
        temporary.write_text(json.dumps(points, indent=1) + "\n")
        temporary.replace(self.folder / f"{part}.json")

    def _clean(self) -> bool:
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

    def plan(self, *overrides: str) -> Plan:
        """Return a plan as `launch.py` would make it."""
        settings = [f"hardware.device={self.sizes.device}", f"hardware.dtype={self.sizes.dtype}"]
        settings += [f"batch.generate_len={self.sizes.new_tokens}", f"scenario.profile_repeats={self.sizes.repeats}"]
        return resolve(compose([*settings, *overrides]))

    def large(self, batch: int, context: int, budget: int, gamma: int, alpha: float = 0.8) -> Plan:
        """Return a plan of the large target with random weights, drafting for itself."""
        sizes = [f"batch.size={batch}", f"batch.context_len={context}", f"cache.budget={budget}"]
        draft = ["draft=self", f"draft.gamma={gamma}", f"draft.synthetic_acceptance={alpha}"]
        return self.plan(*self.sizes.target, "target.weights=random", "data=random", *sizes, *draft)

    @cached_property
    def engine(self) -> NativeEngine:
        """Return the engine of the large target, loaded once."""
        batch, context = self.sizes.cells[0]
        with progress() as bars:
            return build.engine(self.large(batch, context, self.sizes.budgets[0], self.sizes.gammas[0]), bars)

    def open(self, batch: int, context: int, budget: int, gamma: int, alpha: float) -> Batch:
        """Return a batch over caches of noise. Raise UserError if it does not fit next to the weights."""
        predicted = build.estimate(self.large(batch, context, budget, gamma), batch, context)
        needed = predicted.total - predicted.weights
        engine, available = self.engine, memory.available_bytes(self.device)
        if needed > available:
            raise UserError(f"needs {needed / GIB:.1f} GiB next to the weights, of {available / GIB:.1f}")
        draft = replace(engine.draft, synthetic_acceptance=alpha)
        opened = replace(engine, gamma=gamma, draft=draft, cache=replace(engine.cache, budget=budget)).open(
            [[0] * context] * batch
        )
        opened.simulate_prefill()
        warm_up(opened)
        return opened
