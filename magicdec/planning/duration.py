"""Estimate how long a run will take, from earlier attempts or by the cost model."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from magicdec.config.registry import DRAFTS
from magicdec.config.scenario_settings import Compare
from magicdec.costmodel.prediction import halfway, predict_generation
from magicdec.costmodel.round import Setup, prefill_s
from magicdec.errors import UserError
from magicdec.planning.acceptances import curves
from magicdec.planning.resolved import Plan
from magicdec.planning.setup import measured_rates, setup_of
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
    batch, scenario = config.batch, config.settings(Compare)
    prompts = setup_of(plan, *measured_rates(plan))
    setup = halfway(prompts, batch.generate_len)
    plain = batch.generate_len * setup.target_time.total
    fast = plain / _speedup_wall(plan, prompts) if config.speculates else 0.0
    repeats = 5 if scenario.repeats == "auto" else scenario.repeats
    models = [(setup.target, setup.ranks)]
    if config.speculates and setup.draft.own_model is not None:
        models.append((setup.draft_model, setup.draft_ranks))
    chunk = int(batch.prefill_chunk)
    prefill = sum(
        prefill_s(setup, model, ranks, batch.context_len, rows=setup.batch, chunk=chunk)
        for model, ranks in models
    )
    return batch.num_batches * prefill, batch.num_batches * repeats * (plain + fast)


def _speedup_wall(plan: Plan, prompts: Setup) -> float:
    """Return the speedup of a whole batch at the best gamma; 1 where no acceptance is known."""
    config = plan.config
    alpha, generate_len = config.draft.drawn_alpha, config.batch.generate_len
    prediction = predict_generation(prompts, config.gammas, alpha, curves(config), generate_len)
    return prediction.speedup_wall(prediction.best) or 1.0
