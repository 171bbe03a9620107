"""Draw the MagicDec paper's figures for stored runs: speedup and step times by batch, intensity by context.

Measured values are points on a line, predicted ones a dashed line, published ones crosses. Needs matplotlib.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from magicdec.errors import UserError
from magicdec.tracking.report.query import Row, is_number, rank
from magicdec.tracking.report.rows import telling

BATCH, CONTEXT = "batch.size", "batch.context_len"
SPEEDUP = {"speedup": "o-", "predicted/speedup": "--", "published/speedup": "x"}
# A panel of a figure: its label, and for each style of line the function that reads a run's value.
Panel = tuple[str, dict[str, Callable[[Row], float | None]]]


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write a PNG file per figure that the runs have values for, and return the paths.

    A figure has a line per context, or per batch, and per value of every other setting in which the runs differ. Raise
    UserError if matplotlib is missing, or if there are no values.
    """
    figures: dict[str, tuple[str, list[Panel]]] = {
        "speedup": (BATCH, [("speedup", {style: _value(key) for key, style in SPEEDUP.items()})]),
        "ratios": (BATCH, [_ratio("T_D / T_T", "draft"), _ratio("T_V / T_T", "verify")]),
        "intensity": (
            CONTEXT,
            [
                (
                    "arithmetic intensity, FLOPs per byte",
                    {"o-": _value("predicted/arithmetic_intensity"), ":": _value("predicted/ridge")},
                )
            ],
        ),
    }
    written = [_figure(folder / f"{name}.png", rows, x, panels) for name, (x, panels) in figures.items()]
    if not any(written):
        raise UserError("--figures: these runs hold no speedups and no step times")
    return [path for path in written if path is not None]


def _value(key: str) -> Callable[[Row], float | None]:
    return lambda row: value if is_number(value := row.get(key)) else None


def _ratio(label: str, step: str) -> Panel:
    def of(prefix: str) -> Callable[[Row], float | None]:
        step_of, target_of = _value(f"{prefix}/{step}_ms"), _value(f"{prefix}/target_decode_ms")

        def ratio(row: Row) -> float | None:
            ours, target = step_of(row), target_of(row)
            return ours / target if ours is not None and target else None

        return ratio

    return label, {"o-": of("time"), "--": of("predicted"), "x": of("published")}


def _figure(path: Path, rows: Sequence[Row], x: str, panels: Sequence[Panel]) -> Path | None:
    """Draw one figure of the runs that have a number for x; return None where none has a value for it."""
    rows = [row for row in rows if is_number(row.get(x))]
    lines = _lines(rows, _line_settings(rows, x))
    if not any(value(row) is not None for _, styles in panels for value in styles.values() for row in rows):
        return None
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--figures needs matplotlib: pip install 'magicdec[plots]'") from None
    figure = Figure(figsize=(5.5 * len(panels), 4.2), layout="constrained")
    for number, (label, styles) in enumerate(panels, 1):
        axes = figure.add_subplot(1, len(panels), number)
        for index, (line, members) in enumerate(lines.items()):
            color = colormaps["viridis"](0.95 * index / max(1, len(lines) - 1))
            for style, value in styles.items():
                points = _points(members, x, value)
                if points:
                    shown = line if style == next(iter(_present(styles, members))) else None
                    axes.plot(*zip(*points, strict=True), style, ms=4, color=color, label=shown)
        axes.set(xscale="log", xlabel=x, ylabel=label, yscale="log" if "intensity" in label else "linear")
        ticks = sorted({row[x] for row in rows})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    if any("x" in styles for _, styles in panels):
        figure.suptitle("points: measured; dashes: predicted; crosses: published", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _lines(rows: Sequence[Row], by: Sequence[str]) -> dict[str, list[Row]]:
    """Return the runs of each line, sorted by the settings that tell the lines apart."""
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: [rank(row.get(key)) for key in by]):
        lines.setdefault(_name(row, by), []).append(row)
    return lines


def _points(rows: Iterable[Row], x: str, value: Callable[[Row], float | None]) -> list[tuple[Any, float]]:
    return sorted((row[x], y) for row in rows if (y := value(row)) is not None)


def _present(styles: dict[str, Callable], rows: Sequence[Row]) -> list[str]:
    return [style for style, value in styles.items() if any(value(row) is not None for row in rows)]


def _line_settings(rows: Sequence[Row], x: str) -> list[str]:
    """Return the settings in which lines differ."""
    return [key for key in dict.fromkeys([CONTEXT if x == BATCH else BATCH, *telling(rows)]) if key != x]


def _name(row: Row, by: Sequence[str]) -> str:
    label = {key: "" if key.endswith(".name") else f"{key.rpartition('.')[2]} " for key in by}
    return ", ".join(f"{label[key]}{row.get(key)}" for key in by)
