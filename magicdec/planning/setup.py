"""The setup that the cost model predicts for: a plan's models, caches and batch, and its
machine.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from magicdec.config.choices import DraftConfig
from magicdec.config.prediction_settings import Assumed
from magicdec.config.registry import DRAFTS
from magicdec.costmodel.hardware import CPU, Hardware, configured, device_in, unknown
from magicdec.costmodel.memory_estimate import Memory, memory
from magicdec.costmodel.round import PREFILL_CHUNK, Setup
from magicdec.costmodel.stacks import OWN_STACK
from magicdec.errors import UserError
from magicdec.measure.ceilings import matmul_rate, read_bandwidth
from magicdec.planning.recorded_routing import routing_of
from magicdec.planning.resolved import Plan


def setup_of(plan: Plan, bandwidth_gbs: float | None = None, tflops: float | None = None) -> Setup:
    """Return the setup to predict for. For a run, that is this software on the run's own device.

    `bandwidth_gbs` and `tflops` are measured figures for a device without a known datasheet.
    Raise UserError if there is nothing to predict with.
    """
    config, h = plan.config, plan.config.hardware
    stack = None
    if not plan.predicts:
        listed, stack = device_in(plan.device_name), OWN_STACK
        unlisted = CPU if h.device == "cpu" else plan.device_name
        h = replace(
            h,
            name=listed.name if listed else unlisted,
            bandwidth_gbs=h.bandwidth_gbs or (None if listed else bandwidth_gbs),
            tflops=h.tflops or (None if listed else tflops),
        )
    match_share = None
    if isinstance(config.scenario, Assumed):
        stack = config.scenario.stack or stack
        match_share = config.scenario.match_share
    hardware = configured(
        h.name, h.tensor_parallel, h.bandwidth_gbs, h.tflops, h.memory_gib, h.efficiency, stack
    )
    searches = config.scenario.searches  # with drafts of its own
    if not searches and not config.speculates:
        raise UserError(
            "draft=none: there is no speculation to predict; choose draft=self or draft=model"
        )
    setup = _setup(plan, hardware, DRAFTS["self"].facts() if searches else config.draft)
    changes: dict[str, Any] = {} if match_share is None else {"match_share": match_share}
    if isinstance(config.scenario, Assumed) and config.scenario.routing is not None:
        changes["routing"] = routing_of(config.scenario.routing, config.runs_dir, setup.target)
    return replace(setup, **changes)


def measured_rates(
    plan: Plan, bandwidth_gbs: float | None = None
) -> tuple[float | None, float | None]:
    """Return the GB/s, which may be known, and the TFLOP/s that the plan's device reaches, measured
    once in a process; nothing for a device with a datasheet.
    """
    if device_in(plan.device_name):
        return None, None
    return bandwidth_gbs or _gb_per_s(plan.device), _tflops(plan.device, plan.dtype)


@cache
def _gb_per_s(device: torch.device) -> float:
    return read_bandwidth(device) / 1e9


@cache
def _tflops(device: torch.device, dtype: torch.dtype) -> float:
    return matmul_rate(device, dtype) / 1e12


def held(plan: Plan, num_rows: int, context_len: int) -> Memory:
    """Return the weights and caches that a device holds for a batch of `num_rows`; for a
    prediction, as serving engines hold them.
    """
    config = plan.config
    # Without a draft: a lookup, which needs no memory of its own.
    draft = config.draft if config.speculates else DRAFTS["ngram"].facts()
    machine = (
        setup_of(plan).hardware if plan.predicts else unknown(plan.device_name, plan.num_ranks)
    )
    setup = _setup(plan, machine, draft).at(batch=num_rows, context=context_len)
    # Where states are replayed, those of one gamma are counted, which is more than is kept.
    recurrence = plan.target.config.recurrence
    keeps_all = not plan.predicts and recurrence is not None and recurrence.rollback == "keep"
    gammas = config.gammas if keeps_all else ()
    return memory(setup, max(config.gammas), config.batch.generate_len, gammas)


def _setup(plan: Plan, hardware: Hardware, draft: DraftConfig) -> Setup:
    config = plan.config
    chunk = config.batch.prefill_chunk
    return Setup(
        target=plan.target.config,
        hardware=hardware,
        batch=int(config.batch.size),
        context=config.batch.context_len,
        draft=draft,
        cache=config.cache,
        target_name=config.target.name,
        target_path=config.target.path,
        element_bytes=plan.dtype.itemsize,
        stored_weight_bytes=plan.weight_bytes,
        prefill_chunk=PREFILL_CHUNK if chunk == "auto" else chunk,
        is_served=plan.predicts or not config.engine.has_our_drafts,
    )
