"""Estimate how long a run will take, from earlier attempts or by the cost model."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from statistics import median
from typing import Any

import torch

from magicdec.config.registry import DRAFTS
from magicdec.config.scenario_settings import Compare
from magicdec.costmodel.hardware import device_in
from magicdec.costmodel.prediction import predict
from magicdec.costmodel.roofline import step_time
from magicdec.costmodel.round import Setup
from magicdec.errors import UserError
from magicdec.measure.ceilings import matmul_rate, read_bandwidth
from magicdec.planning.acceptances import curves
from magicdec.planning.resolved import Plan
from magicdec.planning.setup import setup_of
from magicdec.planning.shared import prefill_key

_prefilled: set[Hashable] = set()  # prefills of the runs that this process has listed


def seconds(plan: Plan, attempts: Iterable[Mapping[str, Any]]) -> float | None:
    """Return how long a run will take: the median of its finished attempts, else a prediction, else
    None.

    A prefill that an earlier run shares takes no time.
    """
    config = plan.config
    if not config.compares_natively:
        return _earlier(attempts)
    key = prefill_key(plan, 0)
    is_shared = config.sweep.share == "prefill" and plan.num_ranks == 1 and key in _prefilled
    _prefilled.add(key)
    if measured := _earlier(attempts):
        return measured
    try:
        prefill, decoding = predicted_seconds(plan)
    except UserError:  # a draft or a machine that has no cost model
        return None
    return decoding if is_shared else prefill + decoding


def _earlier(attempts: Iterable[Mapping[str, Any]]) -> float | None:
    durations = [
        attempt["duration_s"]
        for attempt in attempts
        if attempt.get("status") == "done" and "duration_s" in attempt
    ]
    return median(durations) if durations else None


def predicted_seconds(plan: Plan) -> tuple[float, float]:
    """Predict the seconds of all prefills, and those of all repeats both ways. Raise UserError
    without a cost model.

    Loading, the audit and the profile are left out.
    """
    config = plan.config
    if not config.speculates:  # ngram reads no more than the target
        plan = replace(plan, config=replace(config, draft=DRAFTS["ngram"].facts()))
    bandwidth, rate = (
        (None, None) if device_in(plan.device_name) else _measured(plan.device, plan.dtype)
    )
    batch, scenario = config.batch, config.settings(Compare)
    setup = setup_of(plan, bandwidth, rate)
    setup = setup.at(context=batch.context_len + batch.generate_len // 2)
    plain = batch.generate_len * setup.target_time.total
    prediction = (
        predict(setup, plan.config.gammas, None, curves(plan.config)) if config.speculates else None
    )
    fast = plain / (prediction.best.speedup or 1.0) if prediction else 0.0
    repeats = 5 if scenario.repeats == "auto" else scenario.repeats
    return batch.num_batches * _prefill(setup, plan), batch.num_batches * repeats * (plain + fast)


def _prefill(setup: Setup, plan: Plan) -> float:
    """Predict the seconds of the passes of a prefill."""
    length = plan.config.batch.context_len
    chunk = int(plan.config.batch.prefill_chunk)
    passes = (
        setup.target_pass._replace(
            query_tokens=min(chunk, length - start),
            cached_tokens=start,
            logit_tokens=1,
            chooses=False,
        )
        for start in range(0, length, chunk)
    )
    return sum(step_time(step, setup.hardware).total for step in passes)


@cache
def _measured(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Return what the machine achieves: GB/s and TFLOP/s."""
    return read_bandwidth(device) / 1e9, matmul_rate(device, dtype) / 1e12
