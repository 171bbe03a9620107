"""Draw the MagicDec paper's figures for stored runs: speedup and step times by batch, intensity by context.

Measured values are points on a line, predicted ones a dashed line, published ones crosses. Needs matplotlib.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from magicdec.errors import UserError
from magicdec.tracking.cells import is_number
from magicdec.tracking.report.query import Row, rank
from magicdec.tracking.report.rows import telling

BATCH, CONTEXT = "batch.size", "batch.context_len"
STYLES = {"o-": "time", "--": "predicted", "x": "published"}  # of lines: measured, predicted, published
Lines = dict[str, tuple[str, ...]]  # by style: the metric that is drawn, or two whose ratio is


def _ratios(step: str) -> Lines:
    return {style: (f"{source}/{step}_ms", f"{source}/target_decode_ms") for style, source in STYLES.items()}


# By file: the x axis, and the lines of each panel by its label.
FIGURES: dict[str, tuple[str, dict[str, Lines]]] = {
    "speedup": (BATCH, {"speedup": {"o-": ("speedup",), "--": ("predicted/speedup",), "x": ("published/speedup",)}}),
    "ratios": (BATCH, {"T_D / T_T": _ratios("draft"), "T_V / T_T": _ratios("verify")}),
    "intensity": (
        CONTEXT,
        {
            "arithmetic intensity, FLOPs per byte": {
                "o-": ("predicted/arithmetic_intensity",),
                ":": ("predicted/ridge",),
            }
        },
    ),
}


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write a PNG file per figure that the runs have values for, and return the paths.

    A figure has a line per context, or per batch, and per value of every other setting in which the runs differ. Raise
    UserError if matplotlib is missing, or if there are no values.
    """
    written = [_figure(folder / f"{name}.png", rows, x, panels) for name, (x, panels) in FIGURES.items()]
    if not any(written):
        raise UserError("--figures: these runs hold no speedups and no step times")
    return [path for path in written if path is not None]


def _value(row: Row, keys: tuple[str, ...]) -> float | None:
    """Return a run's metric, or the ratio of two; None if it has no such numbers."""
    values = [row[key] for key in keys if is_number(row.get(key))]
    if len(values) < len(keys) or 0 in values[1:]:
        return None
    return values[0] / values[1] if len(keys) == 2 else values[0]


def _figure(path: Path, rows: Sequence[Row], x: str, panels: dict[str, Lines]) -> Path | None:
    """Draw one figure of the runs that have a number for x; return None if none has a value for it."""
    rows = [row for row in rows if is_number(row.get(x))]
    groups = _groups(rows, _line_settings(rows, x))
    if not any(_points(rows, x, keys) for lines in panels.values() for keys in lines.values()):
        return None
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--figures needs matplotlib: pip install 'magicdec[plots]'") from None
    figure = Figure(figsize=(5.5 * len(panels), 4.2), layout="constrained")
    for number, (label, lines) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(1, len(panels), number)
        for index, (name, members) in enumerate(groups.items()):
            color = colormaps["viridis"](0.95 * index / max(1, len(groups) - 1))
            drawn = {style: points for style, keys in lines.items() if (points := _points(members, x, keys))}
            for style, points in drawn.items():
                legend = name if style == next(iter(drawn)) else None
                axes.plot(*zip(*points, strict=True), style, ms=4, color=color, label=legend)
        axes.set(xscale="log", xlabel=x, ylabel=label, yscale="log" if "intensity" in label else "linear")
        ticks = sorted({row[x] for row in rows})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    if any("x" in lines for lines in panels.values()):
        figure.suptitle("points: measured; dashes: predicted; crosses: published", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _groups(rows: Sequence[Row], by: Sequence[str]) -> dict[str, list[Row]]:
    """Return the runs of each line, sorted by the settings in which lines differ."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: [rank(row.get(key)) for key in by]):
        groups.setdefault(_name(row, by), []).append(row)
    return groups


def _points(rows: Iterable[Row], x: str, keys: tuple[str, ...]) -> list[tuple[Any, float]]:
    return sorted((row[x], y) for row in rows if (y := _value(row, keys)) is not None)


def _line_settings(rows: Sequence[Row], x: str) -> list[str]:
    """Return the settings in which lines differ."""
    return [key for key in dict.fromkeys([CONTEXT if x == BATCH else BATCH, *telling(rows)]) if key != x]


def _name(row: Row, by: Sequence[str]) -> str:
    label = {key: "" if key.endswith(".name") else f"{key.rpartition('.')[2]} " for key in by}
    return ", ".join(f"{label[key]}{row.get(key)}" for key in by)
