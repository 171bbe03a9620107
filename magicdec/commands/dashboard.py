"""`magicdec dashboard`: make a W&B workspace with the usual charts.

With --sweep, also make a report on that sweep, which says what the sweep has found if its runs are
in --runs-dir. Without a login, write the specification to a file as JSON. Needs the extra
`dashboard` (wandb-workspaces).
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from magicdec.errors import UserError, exit_code, to_stderr
from magicdec.inputs.others import given_path
from magicdec.report.export import write
from magicdec.report.fastest import answer
from magicdec.report.rows import read_rows
from magicdec.tracking.columns import ENDS, INTERVAL
from magicdec.tracking.loggers import wandb
from magicdec.tracking.store import shown
from magicdec.units import WAYS

DEFAULT_FILE = Path("dashboard.json")  # without a login
STEPS = {"T_T": "time/target_decode_ms", "T_D": "time/draft_ms", "T_V": "time/verify_ms"}
# W&B's bars do not stack: a chart in Vega-Lite, with a row per run. Runs of the same name become
# their mean.
CHART = "magicdec-step-times"
STACKED_BARS = {
    "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
    "title": "T_T, T_D and T_V",
    "data": {"name": "wandb"},
    "transform": [
        {"fold": [f"${{field:{step}}}" for step in STEPS], "as": ["step", "time"]},
        {"filter": "isValid(datum.time)"},  # a run without a draft has T_T alone
    ],
    "mark": {"type": "bar", "tooltip": True},
    "encoding": {
        "x": {"field": "${field:run}", "type": "nominal", "title": None},
        "y": {
            "field": "time",
            "type": "quantitative",
            "aggregate": "mean",
            "stack": "zero",
            "title": "ms",
        },
        "color": {"field": "step", "type": "nominal", "title": None},
    },
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    return exit_code(lambda: _make(_parser().parse_args(arguments)))


def _make(options: argparse.Namespace) -> None:
    built = [_workspace(options), *([_report(options)] if options.sweep else [])]
    if options.file is None and _is_logged_in():
        if objection := wandb.make_chart(options.entity, CHART, STACKED_BARS):
            to_stderr(
                f"the chart {CHART} was not made, which is fine if it exists already: {objection}"
            )
        for view in built:
            view.save()
            print(view.url)
        return
    file = options.file or DEFAULT_FILE
    specs = [json.loads(view._to_model().model_dump_json(by_alias=True)) for view in built]
    contents = dict(zip(("workspace", "report"), specs, strict=False)) | {
        "charts": {CHART: STACKED_BARS}
    }
    write(file, json.dumps(contents, indent=2) + "\n")
    print(f"the specification is in {shown(file)}")


def _is_logged_in() -> bool:
    try:
        wandb.check({"wandb": {"mode": "online"}})
    except UserError:
        to_stderr("no login for Weights & Biases (`wandb login`)")
        return False
    return True


def _library() -> Any:
    try:
        from wandb_workspaces.reports import v2
    except ImportError:
        raise UserError(
            "dashboards need wandb-workspaces: pip install 'magicdec[dashboard]'"
        ) from None
    return v2


def _views(entity: str) -> dict[str, list[Any]]:
    """Return the panels by the question that they answer."""
    v2 = _library()
    batch = v2.Config("batch.size")
    context = v2.Config("batch.context_len")
    predicted = v2.SummaryMetric("predicted/speedup")
    return {
        "Which policy, budget and gamma?": _choices(),
        "Does speculation pay, for which batch and context?": [
            _scatter("speedup against batch, by context", batch, "speedup", context, log_x=True),
            _scatter("speedup against context, by batch", context, "speedup", batch, log_x=True),
        ],
        "How much throughput at which latency?": [
            _scatter(
                f"{way}: tokens/s against time per token",
                v2.SummaryMetric(f"{way}/time_per_output_token_ms"),
                f"{way}/tokens_per_second",
                batch,
            )
            for way in WAYS
        ],
        "What is accepted, by policy and budget?": _acceptance(),
        "Is the cost model right?": [
            _scatter("speedup measured against predicted", predicted, "speedup", batch)
        ],
        "Where does the time go?": [
            v2.CustomChart(
                query={"summary": {"keys": list(STEPS.values())}},
                chart_name=f"{entity}/{CHART}",
                chart_fields={"run": "name"} | STEPS,
            ),
            v2.BarPlot(title="T_T, T_D and T_V, ms", metrics=list(STEPS.values()), orientation="v"),
        ],
    }


def _scatter(title: str, x: Any, y: str, z: Any = None, **options: Any) -> Any:
    v2 = _library()
    return v2.ScatterPlot(title=title, x=x, y=v2.SummaryMetric(y), z=z, **options)


def _choices() -> list[Any]:
    """Return the panels on policy, budget and gamma."""
    v2 = _library()
    columns = [v2.Config(key) for key in ("cache.policy", "cache.budget", "draft.gamma")]
    columns += [v2.SummaryMetric(key) for key in ("acceptance_rate", "speedup")]
    low, high = [f"speedup{INTERVAL}{end}" for end in ENDS]
    return [
        v2.ParallelCoordinatesPlot(
            title="policy, budget, gamma, acceptance, speedup",
            columns=[v2.ParallelCoordinatesPlotColumn(column) for column in columns],
        ),
        v2.BarPlot(
            title="speedup between the ends of its 95% interval",
            metrics=[low, "speedup", high],
            orientation="v",
            groupby_aggfunc="median",
            groupby_rangefunc="none",
        ),
        v2.RunComparer(diff_only="split"),
    ]


def _acceptance() -> list[Any]:
    """Return the panels on what is accepted."""
    v2 = _library()
    budget = v2.Config("cache.budget")
    return [
        _scatter("acceptance against budget", budget, "acceptance_rate", log_x=True),
        v2.BarPlot(
            title="acceptance by policy",
            metrics=["acceptance_rate"],
            groupby=v2.Config("cache.policy"),
            orientation="v",
            groupby_aggfunc="median",
            groupby_rangefunc="minmax",
        ),
        v2.LinePlot(title="accepted in each round", x="round", y=["accepted"]),
    ]


def _workspace(options: argparse.Namespace) -> Any:
    views = _views(options.entity)
    from wandb_workspaces import workspaces

    sections = [
        workspaces.Section(name=name, panels=panels, is_open=True) for name, panels in views.items()
    ]
    return workspaces.Workspace(options.entity, options.project, name="magicdec", sections=sections)


def _report(options: argparse.Namespace) -> Any:
    """Return a report with the same panels, of the runs of one sweep: a group in W&B."""
    v2, blocks = _library(), _findings(options)
    for name, panels in _views(options.entity).items():
        # Of the report's project.
        runs = v2.Runset(name=options.sweep, filters=f"Metric('Group') == '{options.sweep}'")
        blocks += [v2.H2(name), v2.PanelGrid(runsets=[runs], panels=panels)]
    return v2.Report(
        options.project, options.entity, title=options.sweep, blocks=blocks, width="fluid"
    )


def _findings(options: argparse.Namespace) -> list[Any]:
    """Return the text of what the sweep has found, by its stored runs; nothing if they are not
    here.
    """
    v2 = _library()
    try:
        answered = answer(read_rows(options.runs_dir, options.sweep))
    except UserError:
        return []
    sentences = list(answered.sentences()) if answered else []
    return [v2.H2("What the sweep has found"), *map(v2.P, sentences)] if sentences else []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("magicdec dashboard", description=__doc__)
    parser.add_argument("--entity", required=True, help="team or user, as in wandb.entity")
    parser.add_argument("--project", default="magicdec", help="as in wandb.project (magicdec)")
    parser.add_argument(
        "--sweep",
        metavar="GROUP",
        help="also a report on this group: sweep.name, or the sweep's folder",
    )
    parser.add_argument(
        "--runs-dir",
        type=given_path,
        default=Path("runs"),
        help="the store with the sweep's runs (runs)",
    )
    parser.add_argument(
        "--file",
        type=given_path,
        help=f"write the specification here; {DEFAULT_FILE} without a login",
    )
    return parser
