"""scenario.schedule: the predicted gamma for each batch and context, written as an engine takes
it.
"""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from magicdec.config.prediction_settings import Search
from magicdec.costmodel.acceptance import Curves
from magicdec.costmodel.engine_settings import FORMS
from magicdec.costmodel.round import Setup
from magicdec.costmodel.schedules import Schedule, predicted_cells, schedule
from magicdec.errors import UserError
from magicdec.report.charts import filled, template
from magicdec.report.figures import draw
from magicdec.scenarios.outcome import Outcome
from magicdec.tracking.cells import new_table
from magicdec.tracking.store import shown

FOLDER = Path("schedules")  # of the working directory


def predicted_schedule(
    prompts: Setup, scenario: Search, alpha: float | None, curves: Curves, generate_len: int
) -> Schedule:
    """Predict the schedule of a setup's draft for the batches and the prompts' lengths of a
    search.
    """
    assert scenario.schedule is not None
    form = FORMS[scenario.schedule]
    form.method(prompts)  # refuses a draft that the engine does not have
    most = max(scenario.batch_sizes or [prompts.batch])
    contexts = scenario.context_lens or [prompts.context]
    cells = list(
        predicted_cells(
            prompts,
            most,
            contexts,
            scenario.gammas,
            alpha,
            curves,
            generate_len,
            scenario.least_gamma,
        )
    )
    return schedule(cells, scenario.tolerance, form.by_batch, form.by_context)


def outcome(schedule: Schedule, setup: Setup, scenario: Search, command: str) -> Outcome:
    """Return what a run stores and shows of a schedule, and write its file and its map."""
    assert scenario.schedule is not None
    form = FORMS[scenario.schedule]
    settings = form.settings(schedule, setup)
    what = f"{setup.target_label}, {setup.draft_title}, {setup.hardware.name}"
    view: list[RenderableType] = [
        f"gamma and predicted speedup by batch and context: {what}",
        _table(schedule),
        _loss(schedule),
    ]
    asked = max(scenario.batch_sizes or [setup.batch])
    if schedule.max_batch < asked:
        view.append(f"batches from {schedule.max_batch + 1} to {asked} do not fit into memory")
    view.append("")
    name = f"{scenario.save_as}.{scenario.schedule}"
    # Where nothing is saved, the command names what the user will.
    stem = "FILE" if scenario.save_as is None else FOLDER / name
    file = Path(f"{stem}{form.suffix}")
    if scenario.save_as is not None:
        try:
            FOLDER.mkdir(parents=True, exist_ok=True)
            if settings.content:
                file.write_text(settings.content, encoding="utf-8")
            _draw(schedule, setup, FOLDER / f"{name}.png", command)
        except OSError as error:
            raise UserError(
                f"scenario.save_as={scenario.save_as}: {error}; null writes none"
            ) from error
        view.append(f"map: {shown(FOLDER / f'{name}.png')}")
    if settings.content:
        view += [f"{shown(file)}:", _to_copy(settings.content.rstrip())]
    view += [f"{form.label}:", _to_copy(settings.command(shown(file)))]
    if settings.note:
        view.append(f"note: {settings.note}")
    gammas = {entry.gamma for entry in schedule.entries}
    if form.pauses and 0 in gammas and gammas != {0}:
        view.append(f"warning: where gamma is 0 {form.pauses}; scenario.least_gamma=1 never pauses")
    history = [
        {
            "batch_size": cell.batch,
            "context_len": cell.context,
            "gamma": schedule.gamma(cell.batch, cell.context),
            "best_gamma": cell.best,
            "predicted/speedup": cell.speedups[schedule.gamma(cell.batch, cell.context)],
            "share_of_best": schedule.share(cell),
        }
        for cell in schedule.cells
    ]
    metrics = {
        "predicted/worst_share": schedule.share(schedule.worst),
        "predicted/gamma": schedule.max_gamma,
    }
    return Outcome(metrics, history=history, view=Group(*view))


def _to_copy(text: str) -> Text:
    """Return a text that is not wrapped, however narrow the terminal is."""
    return Text(text, no_wrap=True, overflow="ignore")


def _table(schedule: Schedule) -> Table:
    """Return the ranges of batches, with gamma and speedup at each context."""
    contexts = sorted({cell.context for cell in schedule.cells})
    columns = [f"{context:,}" for context in contexts]
    table = new_table("batch", *columns)
    for low, high in sorted({entry.batch for entry in schedule.entries}):
        cells = []
        for context in contexts:
            within = [c for c in schedule.cells if c.context == context and low <= c.batch <= high]
            cells.append(_cell(schedule, within) if within else "does not fit")
        table.add_row(f"{low}" if low == high else f"{low}-{high}", *cells)
    return table


def _cell(schedule: Schedule, cells: Sequence) -> str:
    gamma = schedule.gamma(cells[0].batch, cells[0].context)
    speedups = [cell.speedups[gamma] for cell in cells]
    low = f"{min(speedups):.2f}"
    high = f"{max(speedups):.2f}"
    return f"{gamma}: {low}x" if low == high else f"{gamma}: {low}-{high}x"


def _loss(schedule: Schedule) -> str:
    worst = schedule.worst
    lost = 1 - schedule.share(worst)
    if lost < 0.0005:
        return "no batch loses anything against the best gamma of its own"
    return (
        f"at most {lost:.1%} below the best gamma of each batch (at batch {worst.batch}, context"
        f" {worst.context:,})"
    )


def _draw(schedule: Schedule, setup: Setup, path: Path, command: str) -> None:
    points = [
        {
            "x": cell.batch,
            "series": cell.context,
            "y": schedule.gamma(cell.batch, cell.context),
            "noisy": False,
        }
        for cell in schedule.cells
    ]
    what = f"{setup.target_label}, {setup.draft_title}, {setup.hardware.name}; predicted"
    titles = {"x": "batch", "series": "context", "y": "gamma", "caption": [what]}
    draw(filled(template("heat"), titles, points), path, command)
