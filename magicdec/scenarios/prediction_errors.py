"""The predictions of the formula and the cost model for a run that has been measured, and their
errors.
"""

import logging
from collections.abc import Mapping
from typing import Any

from magicdec.costmodel.acceptance import task_of
from magicdec.costmodel.comparison import limit_metrics, predicted_metrics, published
from magicdec.costmodel.prediction import halfway
from magicdec.costmodel.speedup import batch_speedup, round_time
from magicdec.costmodel.speedup import speedup as formula_speedup
from magicdec.errors import UserError
from magicdec.measure.metrics import Metrics
from magicdec.planning.resolved import Plan
from magicdec.planning.setup import measured_rates, setup_of

# What is predicted of a generation; the rest is predicted of steps.
SPEEDUPS = ("predicted/speedup", "predicted/pays", "predicted/break_even_alpha")
log = logging.getLogger(__name__)


def prediction_metrics(plan: Plan, results: Mapping[str, Any]) -> Metrics:
    """Return `formula/*`, `predicted/*`, `limit/*` and `published/*` for the results of a run with
    a draft.
    """
    gamma = results.get("gamma")
    if not gamma:
        return {}
    return _formula(plan, results, gamma) | _by_cost_model(plan, results, gamma)


def _formula(plan: Plan, results: Mapping[str, Any], gamma: int) -> Metrics:
    """Return the speedup by the paper's formula, from the measured times and acceptance: for a row
    and, where all rows become equally long, in wall-clock time for the batch, which waits for its
    slowest row.
    """
    if "alpha" not in results or "speedup" not in results:
        return {}
    names = ("time/target_decode_ms", "time/draft_ms", "time/verify_ms", "alpha", "speedup")
    decode, draft, verify, alpha, speedup = [float(results[name] or 0.0) for name in names]
    formula = formula_speedup(gamma, alpha, decode, draft, verify)
    metrics: Metrics = {"formula/speedup": formula, "formula/speedup_error": formula / speedup - 1}
    if plan.config.sampling.ignore_eos:
        # The prefill gives the first.
        rows = int(plan.config.batch.size)
        steps = plan.config.batch.generate_len - 1
        whole = round_time(gamma, draft, verify)
        metrics["formula/speedup_wall"] = batch_speedup(gamma, alpha, rows, steps, decode, whole)
    return metrics


def _by_cost_model(plan: Plan, results: Mapping[str, Any], gamma: int) -> Metrics:
    """Return the prediction for these rounds at the measured acceptance, and its errors.

    The steps are timed at the end of the prompts, and predicted there. The speedups are those of
    the whole generation, and predicted in its middle.
    """
    generate_len = plan.config.batch.generate_len
    rates = measured_rates(plan, float(results["roofline/bandwidth_gbs"] or 0.0))
    try:
        setup = setup_of(plan, *rates).at(context=round(results["data/context_len_mean"]))  # type: ignore[arg-type]
        of_steps = predicted_metrics(setup, gamma, results, generate_len)
        middle = halfway(setup, generate_len)
        of_all = predicted_metrics(middle, gamma, results, generate_len)
        of_speedups = {name: of_all[name] for name in of_all if name.startswith(SPEEDUPS)}
        return (
            of_steps
            | of_speedups
            | limit_metrics(setup, gamma, results)
            | published(setup, task_of(plan.config), gamma)
        )
    except UserError as error:  # a draft that has no cost model
        log.info("not predicted: %s", error)
        return {}
