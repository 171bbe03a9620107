"""Search for draft, policy, budget, gamma and batch: predict, rank, and write the best as an
experiment.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from magicdec.config.choices import DraftConfig
from magicdec.config.folders import check_is_ours, check_is_read
from magicdec.config.prediction_settings import Search
from magicdec.config.schema import Config
from magicdec.costmodel.planned_experiment import FOUND_BY, experiment_yaml
from magicdec.costmodel.planner import Candidate, Ranking, Workload, search
from magicdec.costmodel.prediction import predict
from magicdec.costmodel.round import Setup
from magicdec.costmodel.verdict_words import pays_from
from magicdec.errors import UserError
from magicdec.planning.acceptances import assumed_alpha, cache_named, curves, draft_named
from magicdec.planning.compatibility import check_vocabulary
from magicdec.planning.resolved import Plan
from magicdec.planning.setup import setup_of
from magicdec.scenarios.engine_schedule import outcome, predicted_schedule
from magicdec.scenarios.outcome import Outcome
from magicdec.scenarios.predict import prepare as prepare_prediction
from magicdec.shell import command_line
from magicdec.tracking.cells import new_table
from magicdec.tracking.progress import Progress
from magicdec.tracking.store import Run, shown
from magicdec.units import GIB

# Of the working directory: in a checkout its own, otherwise the user's.
EXPERIMENTS = Path("conf", "experiment")
CHOICES = ("draft", "cache")
SHOWN = 12  # candidates in the table
MARKS = "*†‡§"  # of what is said of some of them below the table
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)  # that an assumed acceptance is compared with
SHOWN_UNKNOWN = 6  # configurations without a known acceptance


def prepare(config: Config) -> Plan:
    """Resolve a search. Raise UserError rather than overwrite an experiment that no search has
    written.
    """
    scenario = config.settings(Search)
    name = scenario.save_as
    if name is not None and scenario.schedule is None:
        path, key = _experiment(name), f"scenario.save_as={name}"
        check_is_ours(path, FOUND_BY, key)
        check_is_read("experiment", name, path, key)
    plan = prepare_prediction(config)
    if config.batch.size == "auto" and not scenario.batch_sizes and scenario.schedule is None:
        plan = replace(plan, fills=True)
    _check_lengths(config, plan.target.config.max_position_embeddings)
    if scenario.is_of_own_draft(config.draft):
        if not config.speculates:
            raise UserError(
                "draft=none: a given acceptance and a schedule are those of the run's own draft;"
                " choose it, as in draft=self or draft=model"
            )
        check_vocabulary(plan.target.config, plan.draft.config if plan.draft else None)
        return plan
    for name, draft in zip(scenario.drafts, _searched(plan.config), strict=True):
        check_vocabulary(plan.target.config, draft.own_model, f"scenario.drafts: {name}")
    return plan


def _check_lengths(config: Config, longest: int) -> None:
    """Raise UserError where a workload or a schedule has sequences longer than the target's
    `longest`.
    """
    scenario = config.settings(Search)
    for prompt, output in scenario.workload:
        if prompt + output > longest:
            raise UserError(
                f"scenario.workload: {prompt} + {output} tokens exceed the target's maximum of"
                f" {longest}"
            )
    new = config.batch.generate_len
    if scenario.workload:
        new = Workload(scenario.workload).generate_len
    for context_len in scenario.context_lens if scenario.schedule is not None else ():
        if context_len + new > longest:
            raise UserError(
                f"scenario.context_lens: {context_len} + {new} new tokens exceed the target's"
                f" maximum of {longest} tokens"
            )


def _searched(config: Config) -> list[DraftConfig]:
    """Return the drafts to search."""
    return [draft_named(config, name) for name in config.settings(Search).drafts]


def run(plan: Plan, run: Run, progress: Progress) -> Outcome:
    """Search for a target, a machine and lengths of requests; a line of the history for every
    candidate, the best first.

    Speedups are those of the middle of a generation, however its lengths are given.
    """
    config = plan.config
    scenario = plan.config.settings(Search)
    setup, acceptances = setup_of(plan), curves(config)
    command = command_line(["magicdec", *run.facts["overrides"]])
    workload = Workload(scenario.workload or [(setup.context, max(2, config.batch.generate_len))])
    alpha = assumed_alpha(config, scenario)
    if scenario.is_of_own_draft(config.draft):
        setup = setup.at(draft=config.draft, cache=config.cache)
    prompts = setup.at(context=workload.prompt_len)
    setup = setup.at(context=workload.context_len)
    if scenario.schedule is not None:
        given = None if alpha is None else alpha.alpha
        schedule = predicted_schedule(prompts, scenario, given, acceptances, workload.generate_len)
        return outcome(schedule, setup, scenario, command)
    ranking = search(
        prompts,
        acceptances,
        batches=scenario.batch_sizes,
        drafts=_searched(config),
        caches=[cache_named(config, policy) for policy in scenario.policies],
        gammas=scenario.gammas,
        latency_ms=scenario.latency_ms,
        generate_len=workload.generate_len,
        alpha=alpha,
        fills=plan.fills,
    )
    best = ranking.ranked[0]
    lengths = workload.prompt_len, workload.generate_len
    text = experiment_yaml(best, command, config.hardware, *lengths)
    view: list[RenderableType] = [_view(ranking)]
    if alpha is not None:
        batches = scenario.batch_sizes or _drafting_batches(ranking) or [setup.batch]
        new = workload.generate_len
        view.append(_by_alpha(setup, batches, scenario.gammas, alpha.alpha, new))
    served = _served(ranking, workload)
    view.append(_verdict(served, ranking))
    if scenario.save_as is not None:
        view.append(_saved(scenario.save_as, text))
    metrics = {"device": plan.device_name} | (best.prediction.metrics() if best.prediction else {})
    metrics |= {
        "predicted/tokens_per_second": best.tokens_per_second,
        "predicted/batch_size": best.setup.batch,
        "predicted/speedup": best.speedup,
        "predicted/speedup_wall": best.speedup_wall,
    }
    if best.prediction:
        metrics |= {"predicted/memory_gib": best.held.total / GIB, "predicted/fits": True}
    metrics |= {f"predicted/{name}": value for name, value in served.items()}
    return Outcome(
        metrics, history=[_facts(candidate) for candidate in ranking.ranked], view=Group(*view)
    )


def _experiment(name: str) -> Path:
    return EXPERIMENTS / f"{name}.yaml"


def _saved(name: str, text: str) -> str:
    """Write an experiment, and return what the terminal says of it."""
    file = _experiment(name)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"scenario.save_as={name}: {error}; null writes none") from error
    return f"the best as an experiment: {shown(file)}; run it with experiment={name}"


def _view(ranking: Ranking) -> Group:
    """Return what the terminal shows: the ranking, and what could not be ranked."""
    columns = ("batch", *CHOICES, "gamma", "tokens/s", "TPOT ms", "speedup")
    table = new_table(
        *columns, title="plans; speedups per row | per batch", num_words=2 + len(CHOICES)
    )
    table.padding = (0, 1, 0, 0)  # to fit into 80 columns
    remarks: dict[str, str] = {}  # marks by remark
    for candidate in ranking.ranked[:SHOWN]:
        chosen = (
            (*_choices(candidate.setup), str(candidate.gamma))
            if candidate.prediction
            else ("none", "", "")
        )
        rates = f"{candidate.tokens_per_second:,.0f}", f"{1e3 * candidate.time_per_token_s:.1f}"
        speedups = " | ".join(
            f"{speedup:.2f}x" for speedup in (candidate.speedup, candidate.speedup_wall) if speedup
        )
        remark = candidate.setup.remark if candidate.prediction else None
        if remark:
            mark = remarks.setdefault(remark, MARKS[len(remarks) % len(MARKS)])
            speedups = f"{speedups} {mark}"
        table.add_row(str(candidate.setup.batch), *chosen, *rates, speedups)
    notes = [f"{mark} {remark}" for remark, mark in remarks.items()]
    if len({candidate.setup.batch for candidate in ranking.ranked}) > 1:
        notes.append(
            "tokens/s compares all plans; a speedup is over the same batch without speculation"
        )
    unknown = [_unknown(ranking)] if ranking.unknown else []
    return Group(table, *notes, *unknown, *_left_out(ranking))


def _left_out(ranking: Ranking) -> list[str]:
    """Return a line for each reason why configurations are left out; those too large by name."""
    batches: dict[str, list[str]] = defaultdict(list)
    for setup in ranking.too_large:
        batches[" ".join(filter(None, _choices(setup)))].append(str(setup.batch))
    unfit = [f"{name} at batch {', '.join(tried)}" for name, tried in batches.items()]
    lines = [f"left out, as they do not fit into memory: {'; '.join(unfit)}"] if unfit else []
    if ranking.too_slow:
        lines.append(f"left out, as they are beyond the latency bound: {ranking.too_slow}")
    return lines


def _drafting_batches(ranking: Ranking) -> list[int]:
    """Return the batches of the plans that have a draft."""
    return sorted({candidate.setup.batch for candidate in ranking.ranked if candidate.prediction})


def _by_alpha(
    setup: Setup, batches: Sequence[int], gammas: Sequence[int], alpha: float, generate_len: int
) -> Table:
    """Return the best gamma and its speedup per row, by batch and alpha."""
    alphas = sorted({*ALPHAS, round(alpha, 2)})
    columns = ("batch", *(f"alpha {alpha:g}" for alpha in alphas))
    table = new_table(
        *columns,
        title=f"best gamma and speedup per row, if alpha were different: {setup.draft_title}",
    )
    for batch in batches:
        at_batch = setup.at(batch=batch)
        best = [
            predict(at_batch, gammas, alpha, generate_len=generate_len).best for alpha in alphas
        ]
        cells = [f"{round_.gamma}: {round_.speedup:.2f}x" for round_ in best]
        table.add_row(str(batch), *cells)
    return table


def _served(ranking: Ranking, workload: Workload) -> dict[str, float]:
    """Return requests per second of the best plan and of the best without speculation, both with
    their prefills.
    """
    plans = {
        "requests_per_second": ranking.ranked[0],
        "autoregressive_requests_per_second": ranking.autoregressive,
    }
    rates = {
        name: workload.requests_per_second(
            plan.setup, plan.time_per_token_s, plan.prediction is not None
        )
        for name, plan in plans.items()
    }
    return rates | {
        "speedup_with_prefill": (
            rates["requests_per_second"] / rates["autoregressive_requests_per_second"]
        )
    }


def _verdict(served: Mapping[str, float], ranking: Ranking) -> str:
    """Return the best plan's gain for users, who wait for prefills, too."""
    with_it, without = served["requests_per_second"], served["autoregressive_requests_per_second"]
    return (
        f"with prefill, the best plan serves {with_it:.3g} requests/s,"
        f" {served['speedup_with_prefill']:.2f}x of {without:.3g} without speculation (batch"
        f" {ranking.autoregressive.setup.batch}), assuming that the batch is always full and that"
        " prompts share nothing"
    )


def _unknown(ranking: Ranking) -> Group:
    """Return the alpha from which a configuration pays, for each batch that it fits into memory
    with.
    """
    title = "drafts without a known acceptance: the alpha from which they pay"
    thresholds: dict[tuple[str, ...], dict[int, str]] = defaultdict(dict)
    for prediction in ranking.unknown:
        thresholds[_choices(prediction.setup)][prediction.setup.batch] = pays_from(prediction.best)
    shown = islice(thresholds.items(), SHOWN_UNKNOWN)
    if all(len(alphas) == 1 for alphas in thresholds.values()):
        table = new_table("batch", *CHOICES, "alpha", num_words=1 + len(CHOICES))
        for choices, alphas in shown:
            ((batch, alpha),) = alphas.items()
            table.add_row(str(batch), *choices, alpha)
    else:
        title = f"{title}, by batch"
        batches = sorted({prediction.setup.batch for prediction in ranking.unknown})
        table = new_table(*CHOICES, *map(str, batches), num_words=len(CHOICES))
        for choices, alphas in shown:
            table.add_row(*choices, *(alphas.get(batch, "-") for batch in batches))
    table.show_edge = True
    return Group(Text(title, style="bold"), table)  # a table's own title is as narrow as the table


def _facts(candidate: Candidate) -> dict[str, float | int | str | None]:
    setup = candidate.setup
    over = setup.cache if candidate.prediction and setup.draft.is_model else None
    return {
        "batch_size": setup.batch,
        "draft": setup.draft_label if candidate.prediction else "none",
        "policy": over.policy if over else "",
        "budget": over.budget if over else 0,
        "gamma": candidate.gamma,
        "predicted/tokens_per_second": candidate.tokens_per_second,
        "predicted/time_per_output_token_ms": 1e3 * candidate.time_per_token_s,
        "predicted/speedup": candidate.speedup,
        "predicted/speedup_wall": candidate.speedup_wall,
    }


def _choices(setup: Setup) -> tuple[str, str]:
    """Return the cells of CHOICES."""
    return setup.draft_label, setup.cache_label
