"""Which draft, policy, budget, gamma and batch to run: predicted, ranked, and the best as a ready experiment."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Group
from rich.table import Table

from magicdec.costmodel import acceptance
from magicdec.costmodel.planner import Plan, Plans, experiment_yaml, search
from magicdec.costmodel.predict import GAMMAS, Prediction
from magicdec.costmodel.round import DraftSpec, Setup

SHOWN = 12  # plans in the table
SHOWN_UNKNOWN = 6  # configurations without a known acceptance


def plan(
    setup: Setup,
    *,
    batches: Sequence[int] | None = None,
    drafts: Iterable[DraftSpec] = (DraftSpec(),),
    policies: Iterable[str] = ("streaming", "snapkv"),
    gammas: Sequence[int] = GAMMAS,
    latency_ms: float | None = None,
    runs_dir: Path | str | None = None,
    task: str | None = None,
    generate_len: int = 0,
    experiment: Path | None = None,
    command: str = "",
) -> Plans:
    """Search for `setup`'s target, machine and context; `experiment` is a file to write the best plan to."""
    curves = acceptance.published()
    if runs_dir is not None:
        curves = acceptance.measured(runs_dir) + curves
    plans = search(setup, curves, batches, drafts, policies, gammas, latency_ms, generate_len, task)
    if experiment is not None:
        experiment.parent.mkdir(parents=True, exist_ok=True)
        experiment.write_text(experiment_yaml(plans.ranked[0], command))
    return plans


def render(plans: Plans) -> Group:
    """For the terminal: the ranking, and what could not be ranked."""
    table = Table("batch", "draft", "cache", "budget", "gamma", "tokens/s", "ms per token", "speedup", title="plans")
    for candidate in plans.ranked[:SHOWN]:
        table.add_row(*_cells(candidate))
    unknown = Table("batch", "draft", "cache", "budget", "gamma", "pays from alpha", title="no acceptance is known for")
    for prediction in plans.unknown[:SHOWN_UNKNOWN]:
        unknown.add_row(*_unknown_cells(prediction))
    left_out = f"left out: {plans.too_large} that do not fit into memory, {plans.too_slow} beyond the latency bound"
    return Group(table, *([unknown] if plans.unknown else []), left_out)


def _cells(candidate: Plan) -> list[str]:
    setup, rates = candidate.setup, (f"{candidate.tokens_per_second:,.0f}", f"{1e3 * candidate.time_per_token_s:.1f}")
    if candidate.prediction is None:
        return [str(setup.batch), "none", "", "", "", *rates, "1.00"]
    return [*_names(setup), str(candidate.gamma), *rates, f"{candidate.speedup:.2f}"]


def _unknown_cells(prediction: Prediction) -> list[str]:
    alpha = prediction.best.break_even_alpha
    return [*_names(prediction.setup), str(prediction.best.gamma), "never" if alpha is None else f"{alpha:.2f}"]


def _names(setup: Setup) -> list[str]:
    return [str(setup.batch), setup.draft.name, setup.policy, str(setup.budget)]
