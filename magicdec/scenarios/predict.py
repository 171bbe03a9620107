"""The prediction for a configuration, without loading anything: times, speedup by gamma, S*, memory
and a verdict.
"""

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.table import Table

from magicdec.config.prediction_settings import Predict
from magicdec.config.schema import Config
from magicdec.costmodel.acceptance import task_of
from magicdec.costmodel.comparison import published
from magicdec.costmodel.growth import differs, kv_share
from magicdec.costmodel.prediction import Prediction
from magicdec.costmodel.prediction import predict as predict_setup
from magicdec.costmodel.round import Setup, round_times
from magicdec.costmodel.verdict_words import pays_from, verdict
from magicdec.planning.acceptances import assumed_alpha, curves
from magicdec.planning.resolve import resolve
from magicdec.planning.resolved import Plan
from magicdec.planning.setup import setup_of
from magicdec.scenarios.outcome import Outcome
from magicdec.tracking.cells import new_table
from magicdec.tracking.progress import Progress
from magicdec.tracking.store import Run
from magicdec.units import GIB

# Of the map that a target has which is not dense, or whose layers do not all grow.
BATCHES = (1, 8, 32, 128, 256)
CONTEXTS = (4096, 16384, 32768, 65536, 131072)


def prepare(config: Config) -> Plan:
    """Resolve a prediction. Raise UserError for what cannot be predicted."""
    plan = resolve(config)
    round_times(setup_of(plan), 1)
    return plan


def predicted(plan: Plan) -> Prediction:
    """Predict one configuration, at every gamma of scenario.gammas: at a context of
    batch.context_len, without the tokens that a generation adds to it.
    """
    config = plan.config
    scenario = plan.config.settings(Predict)
    return predict_setup(
        setup_of(plan),
        scenario.gammas,
        assumed_alpha(config, scenario),
        curves(config),
        generate_len=config.batch.generate_len,
        batches=(scenario.critical_batches[0], scenario.critical_batches[1]),
    )


def run(plan: Plan, run: Run, progress: Progress) -> Outcome:
    """Predict one configuration; a line of the history for every gamma."""
    prediction = predicted(plan)
    history = [
        {
            "gamma": at.gamma,
            "predicted/round_ms": 1e3 * at.times.round_s,
            "predicted/speedup": at.speedup,
        }
        for at in prediction.by_gamma
    ]
    paper = published(prediction.setup, task_of(plan.config), plan.config.draft.gamma)
    metrics = {"device": plan.device_name, **prediction.metrics(), **paper}
    return Outcome(metrics, history=history, view=_view(prediction, paper))


def _view(prediction: Prediction, paper: Mapping[str, Any] | None = None) -> Group:
    """Return what the terminal shows: a table of gammas, what bounds each step, the verdict, and
    published values.
    """
    held, setup = prediction.memory, prediction.setup
    memory = (
        f"memory per GPU: {held.total / GIB:.1f} of {setup.hardware.device.memory / GIB:.0f} GiB"
    )
    note = f"{setup.hardware.name}: {setup.hardware.note}"
    shares = [_kv_shares(setup)] if differs(setup) else []
    mark = ["* draft.gamma; bold: the best per row"] if prediction.configured else []
    parts: list[Any] = [
        _gammas(prediction),
        *mark,
        _breakdown(prediction),
        *shares,
        memory,
        note,
        "",
        verdict(prediction),
    ]
    if paper:
        where = f"the paper's Table {paper['published/table']}: {paper['published/speedup']:.2f}x"
        model = f"predicted for its acceptance: {paper['published/predicted_speedup']:.2f}x"
        parts.append(f"{where} at gamma {paper['published/gamma']}; {model}")
    return Group(*parts)


def _gammas(prediction: Prediction) -> Table:
    setup = prediction.setup
    title = f"predicted: {setup.target_label}, {setup.draft_title}; ms, and speedups"
    columns = (
        "gamma",
        "T_T",
        "T_D",
        "T_select",
        "T_V",
        "round",
        "per row",
        "per batch",
        "pays from alpha",
    )
    table = new_table(*columns, title=title)
    table.padding = (0, 1, 0, 0)  # to fit into 80 columns
    configured = prediction.configured
    for at in prediction.by_gamma:
        times = (at.times.target, at.times.draft, at.times.select, at.times.verify)
        table.add_row(
            f"{at.gamma}*" if at is configured else f"{at.gamma} ",
            *(f"{1e3 * time.total:.2f}" for time in times),
            f"{1e3 * at.times.round_s:.2f}",
            *(
                "?" if value is None else f"{value:.2f}x"
                for value in (at.speedup, prediction.speedup_wall(at))
            ),
            pays_from(at),
            style="bold" if at is prediction.best else "",
        )
    return table


def _breakdown(prediction: Prediction) -> Table:
    """Return the milliseconds of each step at the best gamma, by what bounds them."""
    times = prediction.best.times
    table = new_table(
        "", *times.target._fields, title=f"what bounds the steps at gamma {times.gamma}; ms"
    )
    for name, time in (("T_T", times.target), ("T_D", times.draft), ("T_V", times.verify)):
        table.add_row(name, *(f"{1e3 * part:.2f}" for part in time))
    return table


def _kv_shares(setup: Setup) -> Table:
    """Return the share of the KV cache in what a step reads, which is what a sparse draft saves."""
    longest = setup.target.max_position_embeddings
    contexts = [context for context in CONTEXTS if context <= longest]
    title = "share of the KV cache in the bytes of a step, by batch and context"
    table = new_table("batch", *(f"{context:,}" for context in contexts), title=title)
    for batch in BATCHES:
        setups = [setup.at(batch=batch, context=context) for context in contexts]
        table.add_row(str(batch), *(f"{kv_share(each):.0%}" for each in setups))
    return table
