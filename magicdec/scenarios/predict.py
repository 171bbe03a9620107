"""What to expect of a configuration, without loading anything: times, speedup by gamma, S*, memory and a verdict."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group
from rich.table import Table

from magicdec.costmodel import acceptance
from magicdec.costmodel import predict as costmodel
from magicdec.costmodel.hardware import GIB
from magicdec.costmodel.predict import BATCHES, GAMMAS, Prediction
from magicdec.costmodel.round import Setup
from magicdec.costmodel.verdict import verdict

SHOWN = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # gammas in the table


def predict(
    setup: Setup,
    *,
    gammas: Sequence[int] = GAMMAS,
    alpha: float | None = None,
    runs_dir: Path | str | None = None,
    task: str | None = None,
    generate_len: int = 0,
    batches: tuple[int, int] = BATCHES,
    figures: Path | None = None,
) -> Prediction:
    """Predict one configuration.

    Its alpha is given, or found between the acceptances that the runs in `runs_dir` have measured (on `task`, a
    data.name) and those that the MagicDec paper has published. `figures` is a folder for the paper's plots.
    """
    curves = acceptance.published()
    if runs_dir is not None:
        curves = acceptance.measured(runs_dir) + curves
    prediction = costmodel.predict(setup, gammas, alpha, curves, task, generate_len, batches)
    if figures is not None:
        from magicdec.costmodel.figures import draw

        draw(setup, figures, prediction.best.gamma, alpha, curves)
    return prediction


def render(prediction: Prediction) -> Group:
    """For the terminal: a table of gammas, a table of what bounds each step, and the verdict."""
    held, device = prediction.memory, prediction.setup.hardware.device
    memory = f"memory per GPU: {held.total / GIB:.1f} of {device.memory / GIB:.0f} GiB"
    note = f"{prediction.setup.hardware.name}: {prediction.setup.hardware.note}"
    return Group(_gammas(prediction), _breakdown(prediction), memory, note, verdict(prediction))


def _gammas(prediction: Prediction) -> Table:
    columns = ("gamma", "T_T ms", "T_D ms", "T_select ms", "T_V ms", "round ms", "speedup", "pays from alpha")
    table = Table(*columns, title="predicted")
    for at in prediction.by_gamma:
        if at.gamma in SHOWN or at is prediction.best:
            times = (at.times.target, at.times.draft, at.times.select, at.times.verify)
            table.add_row(
                str(at.gamma),
                *(f"{1e3 * time.total:.2f}" for time in times),
                f"{1e3 * at.times.round_s:.2f}",
                "?" if at.speedup is None else f"{at.speedup:.2f}",
                "never" if at.break_even_alpha is None else f"{at.break_even_alpha:.2f}",
                style="bold" if at is prediction.best else "",
            )
    return table


def _breakdown(prediction: Prediction) -> Table:
    """Shares of the steps at the best gamma."""
    times = prediction.best.times
    table = Table("ms", *times.target._fields, title=f"what bounds the steps at gamma {times.gamma}")
    for name, time in (("T_T", times.target), ("T_D", times.draft), ("T_V", times.verify)):
        table.add_row(name, *(f"{1e3 * part:.2f}" for part in time))
    return table
