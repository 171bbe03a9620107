"""A search for draft, policy, budget, gamma and batch: predicted, ranked, and the best written as an experiment."""

import sys
from pathlib import Path

from rich.console import Group, RenderableType

from magicdec.config.schema import Config
from magicdec.costmodel.planner import FOUND_BY, Candidate, Plans, experiment_yaml, search
from magicdec.costmodel.predict import Prediction
from magicdec.costmodel.summary import pays_from
from magicdec.costmodel.targets import option
from magicdec.errors import UserError
from magicdec.planning.prediction import PredictionPlan, cache_named, curves, draft_named, num_bytes, plan_prediction
from magicdec.scenarios.outcome import Outcome
from magicdec.tracking.cells import new_table
from magicdec.tracking.progress import Progress
from magicdec.tracking.store import shown

__all__ = ["num_bytes", "prepare", "run"]
EXPERIMENTS = Path("conf", "experiment")  # of the working directory: in a checkout its own, otherwise the user's
CHOICES = ("batch", "draft", "cache", "budget", "gamma")
SHOWN = 12  # plans in the table
SHOWN_UNKNOWN = 6  # configurations without a known acceptance


def prepare(config: Config) -> PredictionPlan:
    """See `plan_prediction`. Raise UserError rather than overwrite an experiment that no plan has written."""
    name = config.scenario.experiment
    if name is not None:
        path = _experiment(name)
        if path.exists() and FOUND_BY not in path.read_text(encoding="utf-8"):
            raise UserError(f"scenario.experiment={name}: {shown(path)} is there already; choose another name, or null")
    return plan_prediction(config)


def run(plan: PredictionPlan, progress: Progress) -> Outcome:
    """Search for a target, a machine and a context; a line of the history for every plan, the best first."""
    config, scenario = plan.config, plan.config.scenario
    plans = search(
        plan.setup,
        curves(config),
        scenario.batch_sizes,
        [draft_named(name, config.draft.tensor_parallel) for name in scenario.drafts],
        [cache_named(config, policy) for policy in scenario.policies],
        scenario.gammas,
        scenario.latency_ms,
        config.batch.generate_len,
    )
    best = plans.ranked[0]
    path = None if option(config.target.name) else config.target.path
    text = experiment_yaml(best, " ".join(["magicdec", *sys.argv[1:]]), path)
    view: list[RenderableType] = [_view(plans)]
    if scenario.experiment is not None:
        file = _experiment(scenario.experiment)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"scenario.experiment={scenario.experiment}: {error}; null writes none") from error
        view.append(f"the best as an experiment: {shown(file)}; run it with experiment={scenario.experiment}")
    metrics = {"device": plan.device_name} | (best.prediction.metrics() if best.prediction else {})
    metrics |= {"predicted/tokens_per_second": best.tokens_per_second, "predicted/speedup": best.speedup}
    return Outcome(metrics, history=[_facts(one) for one in plans.ranked], view=Group(*view))


def _experiment(name: str) -> Path:
    return EXPERIMENTS / f"{name}.yaml"


def _view(plans: Plans) -> Group:
    """Return what the terminal shows: the ranking, and what could not be ranked."""
    table = new_table(*CHOICES, "tokens/s", "ms per token", "speedup", title="plans", num_words=len(CHOICES))
    for one in plans.ranked[:SHOWN]:
        chosen = _choices(one.prediction) if one.prediction else [str(one.setup.batch), "none", "", "", ""]
        rates = f"{one.tokens_per_second:,.0f}", f"{1e3 * one.time_per_token_s:.1f}", f"{one.speedup:.2f}"
        table.add_row(*chosen, *rates)
    unknown = new_table(*CHOICES, "pays from", title="no acceptance is known for", num_words=len(CHOICES))
    for prediction in plans.unknown[:SHOWN_UNKNOWN]:
        unknown.add_row(*_choices(prediction), pays_from(prediction.best))
    left_out = f"left out: {plans.too_large} that do not fit into memory, {plans.too_slow} beyond the latency bound"
    return Group(table, *([unknown] if plans.unknown else []), left_out)


def _facts(one: Candidate) -> dict[str, float | int | str]:
    setup, drafts = one.setup, one.prediction is not None
    return {
        "batch_size": setup.batch,
        "draft": setup.draft_label if drafts else "none",
        "policy": setup.cache.policy if drafts else "",
        "budget": setup.cache.budget if drafts else 0,
        "gamma": one.gamma,
        "predicted/tokens_per_second": one.tokens_per_second,
        "predicted/time_per_output_token_ms": 1e3 * one.time_per_token_s,
        "predicted/speedup": one.speedup,
    }


def _choices(prediction: Prediction) -> list[str]:
    """Return the cells of CHOICES."""
    setup = prediction.setup
    values = (setup.batch, setup.draft_label, setup.cache.policy, setup.cache.budget, prediction.best.gamma)
    return list(map(str, values))
