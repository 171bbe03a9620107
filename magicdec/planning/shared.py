"""Weights and prefilled prompts that the jobs of a sweep share: what one job of a process leaves,
the next one takes.

A job finds them by everything that they depend on, and makes what it does not find. What it does
not need is freed before it allocates memory of its own, so that no more is held than one job takes.

B rows, E hidden size.
"""

import gc
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from magicdec.measure import memory_use

if TYPE_CHECKING:  # a prediction does not wait for the modules of an engine
    from magicdec.models.kv_cache import KVCache
    from magicdec.models.transformer import Transformer
    from magicdec.planning.resolved import Plan, PlannedModel

T = TypeVar("T")


@dataclass(frozen=True)
class Prefilled:
    """A batch of prompts in the target's cache, the hidden states of their last tokens, and the
    time that it took.
    """

    cache: "KVCache"
    last_BE: Tensor
    seconds: float


class Shared:
    """Models and prefilled batches that the jobs of this process keep, as far as `sweep.share`
    allows.
    """

    def __init__(self) -> None:
        self._level = "none"
        self._kept = dict[Hashable, Any]()
        self._facts = dict[Hashable, Any]()
        self._num_jobs = 0

    def begin(self, level: str) -> None:
        """Begin a job with its `sweep.share`; `none` also for a run outside of sweeps."""
        self._level = level
        if level == "none":
            self.clear()
        if self._num_jobs:
            gc.collect()  # what the last job left: its rounds and its decoder refer to each other
        self._num_jobs += 1

    @property
    def keeps_prefills(self) -> bool:
        """Return whether the next job may take over this one's prefilled prompts."""
        return self._level == "prefill"

    def clear(self) -> None:
        """Keep nothing, as after a job that has failed."""
        self._kept.clear()
        self._facts.clear()

    def keep_only(self, keys: Iterable[Hashable]) -> None:
        """Free everything else."""
        needed = set(keys)
        self._kept = {key: value for key, value in self._kept.items() if key in needed}

    def model(self, key: Hashable, load: "Callable[[], Transformer]") -> "Transformer":
        """Return the model that is kept under this key, or load it."""
        model = self._kept.get(key) or load()
        if self._level != "none":
            self._kept[key] = model
        return model

    def fact(self, key: Hashable, find: Callable[[], T]) -> T:
        """Return what does not differ between jobs and takes next to no memory, such as what the
        machine achieves.
        """
        if key not in self._facts:
            value = find()
            if self._level == "none":
                return value
            self._facts[key] = value
        return self._facts[key]

    def prefilled(self, key: Hashable, capacity: int) -> Prefilled | None:
        """Return the prompts of this key in a cache of so many slots; None if they must be
        prefilled.
        """
        prefilled: Prefilled | None = self._kept.pop(key, None)
        if prefilled is None or prefilled.cache.capacity == capacity:
            return prefilled
        num_bytes = prefilled.cache.num_bytes * capacity // prefilled.cache.capacity
        available = memory_use.available_bytes(prefilled.cache.k_LBKSD.device)
        if available < num_bytes:  # for two caches at once
            return None
        return Prefilled(prefilled.cache.resized(capacity), prefilled.last_BE, prefilled.seconds)

    def keep(self, key: Hashable, prefilled: Prefilled, num_batches: int) -> None:
        """Keep a batch for the next job: one of several only where memory suffices for all."""
        cache = prefilled.cache
        has_room = (
            num_batches == 1
            or memory_use.available_bytes(cache.k_LBKSD.device) > cache.num_bytes * num_batches
        )
        if self.keeps_prefills and has_room:
            self._kept[key] = prefilled

    @property
    def num_bytes(self) -> int:
        """Return the memory that is kept."""
        caches = [value.cache for value in self._kept.values() if isinstance(value, Prefilled)]
        models = [value for value in self._kept.values() if not isinstance(value, Prefilled)]
        weights = {
            weight.data_ptr(): weight.nbytes for model in models for weight in model.parameters()
        }
        return sum(weights.values()) + sum(cache.num_bytes for cache in caches)


SHARED = Shared()


def model_key(plan: "Plan", model: "PlannedModel") -> Hashable:
    """Return everything that a loaded model depends on."""
    hardware = plan.config.hardware
    settings = (
        plan.dtype,
        plan.device,
        plan.config.attention,
        hardware.compile,
        hardware.all_reduce,
    )
    remarks = tuple(model.config.remarks_on(plan.longest))  # a table that depends on the length
    return (model.fingerprint, model.config, model.num_ranks, remarks, *settings)


def prefill_key(plan: "Plan", first: int) -> Hashable:
    """Return everything that a prefilled batch depends on; `first` is the number of its first
    prompt.
    """
    batch = plan.config.batch
    shape = (first, batch.size, batch.num_batches, batch.context_len, batch.prefill_chunk)
    return (*shape, repr(plan.config.data), plan.fingerprints["data"], model_key(plan, plan.target))


def keys(plan: "Plan") -> set[Hashable]:
    """Return the keys of everything that a run can take over."""
    models = {model_key(plan, model) for model in (plan.target, plan.draft) if model is not None}
    # A draft that listens needs the target's hidden states, which are not kept.
    if not plan.config.scenario.prefills_batches or plan.config.draft.listens:
        return models
    rows = int(plan.config.batch.size)
    return models | {
        prefill_key(plan, rows * number) for number in range(plan.config.batch.num_batches)
    }
