"""The chart of a results page: lines, points or bars of some rows, in panels, with error bars."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt

from magicdec.report.picture import picture

Row = dict[str, Any]
COLOURS = [
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#56b4e9",
    "#8b929e",
    "#7a5195",
    "#332288",
    "#999933",
]

MAX_TICKS = 6  # a tick at each value of x, where there are no more


def draw_chart(
    file: Path,
    rows: Sequence[Row],
    x: str,
    y: str,
    series: str,
    panels: str = "",
    error: str = "",
    interval: tuple[str, str] = ("", ""),
    kind: str = "line",
    labels: tuple[str, str] = ("", ""),
    log: bool = False,
    level: float | None = None,
    diagonal: bool = False,
    own_scales: bool = False,
) -> None:
    """Draw `y` by `x` with a colour per `series`, in a panel per value of `panels`, and save it as
    PNG.

    A line whose `x` is 0 does not depend on it: it is dashed and crosses the panel. `level` draws a
    horizontal line. `diagonal` draws the line on which `x` and `y` agree, and makes both axes
    logarithmic. With `own_scales` each panel has its own scale of `y`. Raise ValueError for more
    series than there are colours.
    """
    if len({row[series] for row in rows}) > len(COLOURS):
        raise ValueError(f"{file.name}: {series} has more values than there are colours")
    keys = [key for key in (x, y, series, panels, error, *interval) if key]
    values = [{key: row[key] for key in keys} for row in rows if row[y] is not None]
    if error:
        interval = ("low", "high")
        values = [
            row | {"low": row[y] - (row[error] or 0), "high": row[y] + (row[error] or 0)}
            for row in values
        ]
    size = {"width": 300 if panels else 460, "height": 220 if panels else 280}
    colour = alt.Color(f"{series}:N", title=series, sort=None, scale=alt.Scale(range=COLOURS))
    upward = _scale(diagonal, zero=kind == "bar", nice=not diagonal, padding=12 * diagonal)
    up = alt.Y(f"{y}:Q", title=labels[1] or y, scale=upward)
    title = labels[0] or x
    across: Any = alt.X(f"{x}:N", title=title, sort=None, axis=alt.Axis(labelAngle=-20))
    if kind != "bar":
        measured_at = sorted({row[x] for row in values if row[x]})
        has_few = kind == "line" and len(measured_at) <= MAX_TICKS
        ticks = {"values": measured_at} if has_few else {"tickCount": 4}
        scale = _scale(log or diagonal, nice=False, padding=12)
        across = alt.X(f"{x}:Q", title=title, scale=scale, axis=alt.Axis(**ticks))
    base = alt.Chart().encode(y=up, color=colour)
    parts = _marks(base, kind, x, across, series, interval)
    if level is not None:
        parts.append(
            alt.Chart().mark_rule(color="grey", strokeWidth=0.8).encode(y=alt.datum(level))
        )
    if diagonal:
        parts.append(_agreement(values, x, y))
    chart: Any = alt.layer(*parts, data=alt.Data(values=values)).properties(**size)
    if panels:
        order = list(dict.fromkeys(row[panels] for row in values))
        chart = _in_panels(chart, panels, order, 2 if kind == "line" else 3, own_scales)
    file.write_bytes(picture(chart.to_dict(), "png", scale=1.2))


def _agreement(values: Sequence[Row], x: str, y: str) -> Any:
    """Return the line on which `x` and `y` agree, between the ends of `y`."""
    ends = [min(row[y] for row in values), max(row[y] for row in values)]
    data = alt.Data(values=[{x: end, y: end} for end in ends])
    line = alt.Chart(data).mark_line(color="grey", strokeWidth=0.8)
    return line.encode(x=f"{x}:Q", y=f"{y}:Q")


def _in_panels(chart: Any, key: str, order: list[Any], columns: int, own_scales: bool) -> Any:
    """Return a chart with a panel per value of `key`, in this order."""
    panels = chart.facet(facet=alt.Facet(f"{key}:N", title=None, sort=order), columns=columns)
    return panels.resolve_scale(y="independent") if own_scales else panels


def _marks(
    base: Any, kind: str, x: str, across: Any, series: str, interval: tuple[str, str]
) -> list[Any]:
    """Return the layers of a kind of chart: bars, points, or lines with their points and
    intervals.
    """
    if kind == "bar":
        return [base.mark_bar().encode(x=across, xOffset=alt.XOffset(f"{series}:N", sort=None))]
    if kind == "points":
        return [base.mark_point(filled=True, size=30, opacity=1).encode(x=across)]
    placed = base.transform_filter(f"datum['{x}'] != 0")
    parts = [
        base.transform_filter(f"datum['{x}'] == 0").mark_rule(strokeDash=[4, 3]),
        placed.mark_line(strokeWidth=1.5).encode(x=across),
        placed.mark_point(filled=True, size=30, opacity=1).encode(x=across),
    ]
    low, high = interval
    if low:
        bars = placed.mark_rule(strokeWidth=0.7)
        parts.append(bars.encode(x=across, y=f"{low}:Q", y2=f"{high}:Q"))
    return parts


def _scale(is_log: bool, zero: bool = False, **options: Any) -> alt.Scale:
    """Return the scale of an axis. A logarithmic one has no zero."""
    return (
        alt.Scale(type="log", **options)
        if is_log
        else alt.Scale(type="linear", zero=zero, **options)
    )
