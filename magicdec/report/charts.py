"""Charts of runs: one description each, in Vega-Lite, for files (`magicdec figure`) and the page.

Altair makes the descriptions, vl-convert draws them without a browser. A description names its
titles by placeholders ($x), which `filled` replaces here, and a few lines of JavaScript in the
page.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import altair as alt

from magicdec.units import WAYS

GREY, NOISY_COLOUR = "#8b929e", "#d55e00"
# Distinguishable without red and green, and in grey print by the shapes that come with them.
COLOURS = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", GREY, "#7a5195"]
BREAK_EVEN = {"strokeDash": [4, 3], "color": GREY}
SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down"]
KINDS = ("number", "log", "word")  # of values: on a linear axis, on a logarithmic one, side by side
# Of a cell: its luminance below which its text is light, and the colours of texts on dark and light
# cells. At 0.2 both have the same contrast; on red, light text reads better.
DARK = 0.22
ON_CELLS = alt.value("#ffffff"), alt.value("#16181d")
PARTS = ("drafting", "verification", "rest of the round")
UNITS = ("ms per round", "vs autoregressive")
SERIES_GAP = 0.05  # of the x axis, for all series of a place
SIZE = (440, 280)  # of a figure, in points
Spec = dict[str, Any]
Chart = Any  # Altair's


def _points() -> Chart:
    """Return a chart of the rows that `filled` adds, without marks."""
    return alt.Chart(alt.NamedData(name="points"))


def _positive_points() -> Chart:
    """Return a chart of the rows that logarithmic axes can show."""
    return _points().transform_filter("datum.x > 0 && datum.y > 0")


def _log_axes(scale: alt.Scale, axis: alt.Axis) -> tuple[alt.X, alt.Y]:
    """Return an x and a y axis that are alike but for their titles."""
    return (
        alt.X("x:Q", title="$x", scale=scale, axis=axis),
        alt.Y("y:Q", title="$y", scale=scale, axis=axis),
    )


def _tips(*names: str) -> list[alt.Tooltip]:
    """Return what a pointer over a mark shows."""
    return [alt.Tooltip(name) for name in names]


def _beside(base: Chart, is_log: bool) -> Chart:
    """Move the points of several series with the same x apart, so that their intervals do not hide
    each other.
    """
    order: Any = [alt.SortField("series"), alt.SortField("kind")]
    ranked = base.transform_window(rank="dense_rank()", sort=order).transform_joinaggregate(
        ranks="max(rank)", least="min(x)", most="max(x)"
    )
    share = f"{SERIES_GAP} * (datum.rank / (datum.ranks + 1) - 0.5)"
    if is_log:
        return ranked.transform_calculate(at=f"datum.x * pow(datum.most / datum.least, {share})")
    return ranked.transform_calculate(at=f"datum.x + (datum.most - datum.least) * {share}")


def _across(base: Chart, x: str) -> tuple[Chart, dict[str, Any]]:
    """Return a chart and the place of its points on an x axis of one of KINDS."""
    if x == "word":
        axis = alt.Axis(labelOverlap=True, labelAngle=0)
        offset = alt.XOffset("series:N", sort=None)
        return base, {"x": alt.X("x", type="ordinal", title="$x", axis=axis), "xOffset": offset}
    if x == "log":
        scale = alt.Scale(type="log", base=2, nice=False, padding=14)
    else:
        scale = alt.Scale(zero=False, padding=14)
    axis = alt.Axis(values=["$values"], labelOverlap=True, labelExpr="format(datum.value, ',')")
    at = alt.X("at", type="quantitative", title="$x", axis=axis, scale=scale)
    return _beside(base, x == "log"), {"x": at}


def _colour_of_line(series: str) -> alt.Color:
    """Return the colour of a series, which a number or a word names."""
    is_number = series == "number"
    kind: Any = "ordinal" if is_number else "nominal"
    return alt.Color(
        "series",
        type=kind,
        title="$series",
        scale=alt.Scale(scheme="viridis") if is_number else alt.Scale(range=COLOURS),
        sort=None,
        legend=alt.Legend(symbolType="stroke"),
    )


def line(x: str = "number", series: str = "word") -> Chart:
    """Describe y over x, a colour per series and a shape per kind.

    A point is the median, or another statistic, of the rows with the same x, series and kind. A
    single row has an interval, from `low` to `high`; `!` marks noise. Points of rows with `apart`
    are not joined.
    """
    keys: Any = ["x", "series", "kind"]
    rows = _points().transform_aggregate(
        y="median(y)", low="min(low)", high="max(high)", noisy="max(noisy)", rule="max(rule)", runs="count()", apart="max(apart)",  # noqa: E501
        groupby=keys,
    )  # fmt: skip
    base, at = _across(rows, x)
    colour = _colour_of_line(series)
    up = alt.Y("y:Q", title="$y", scale=alt.Scale(zero=False))
    # A legend of kinds only where there are several: the placeholder becomes an empty list.
    legend = alt.Legend(values=["$kinds"])
    shape = alt.Shape("kind:N", title=None, sort=None, scale=alt.Scale(range=SHAPES), legend=legend)
    tips = _tips("series:N", "kind:N", "x:N", "y:Q", "low:Q", "high:Q", "runs:Q")
    rule = base.transform_filter("isValid(datum.rule)").transform_aggregate(rule="max(rule)")
    parts = [
        rule.mark_rule(**BREAK_EVEN).encode(y="rule:Q"),
        base.transform_filter("datum.runs == 1 && datum.high > datum.low")
        .mark_errorbar(ticks=alt.MarkConfig(width=7), thickness=1.2)
        .encode(**at, y=alt.Y("low:Q", title="$y"), y2="high:Q", color=colour),
        base.mark_point(filled=True, size=55, opacity=1).encode(
            **at, y=up, color=colour, shape=shape, tooltip=tips),
        base.transform_filter("datum.noisy")
        .mark_text(text="!", dx=9, dy=-7, fontWeight="bold", color=NOISY_COLOUR, size=13).encode(**at, y=up),  # noqa: E501
    ]  # fmt: skip
    if x != "word":
        dash = alt.StrokeDash("kind:N", title=None, sort=None, legend=None)
        kept = base.transform_filter("!(datum.apart > 0)")
        joined = kept.mark_line(strokeWidth=1.6).encode(**at, y=up, color=colour, strokeDash=dash)
        parts.insert(1, joined)
    return alt.layer(*parts)


def heat(ratio: bool) -> Chart:
    """Describe a statistic of y for each x and series, as a table of colours. A ratio is good above
    1, bad below.
    """
    base = _points().transform_aggregate(
        y="median(y)", noisy="max(noisy)", runs="count()", groupby=["x", "series"]
    )
    hues = alt.SchemeParams(
        name="redblue" if ratio else "blues", extent=[0.15, 0.85] if ratio else [0, 0.6]
    )
    scale = alt.Scale(scheme=hues, domainMid=1) if ratio else alt.Scale(scheme=hues)
    axis = alt.Axis(labelAngle=0, labelOverlap=True, labelSeparation=4)
    across = alt.X("x:O", title="$x", axis=axis)
    up = alt.Y("series:O", title="$series", sort="descending")
    colour = alt.Color("y:Q", title="$y", scale=scale)
    tips = _tips("x:N", "series:N", "y:Q", "runs:Q")
    cells = base.mark_rect(cornerRadius=2).encode(x=across, y=up, color=colour, tooltip=tips)
    figure = "format(datum.y, '.2f')"
    if not ratio:  # tokens per second, a gamma
        whole = "datum.y % 1 == 0 || datum.y >= 100"
        figure = f"{whole} ? format(datum.y, ',.0f') : {figure}"
    words = base.transform_calculate(text=f"({figure}) + (datum.noisy ? ' !' : '')")
    legible = alt.condition(f"luminance(scale('color', datum.y)) < {DARK}", *ON_CELLS)
    return alt.layer(cells, words.mark_text().encode(x=across, y=up, text="text:N", color=legible))


def trade() -> Chart:
    """Describe throughput over latency, with the Pareto front of each kind: speculative and
    autoregressive.
    """
    base = _positive_points()
    log = alt.Scale(type="log", nice=False, padding=12)
    x, y = _log_axes(log, alt.Axis(tickCount=5, format="~s"))
    colour = alt.Color("series:N", title="$series", sort=None, scale=alt.Scale(range=COLOURS))
    fill = alt.Fill("series:N", title="$series", sort=None, scale=alt.Scale(range=COLOURS))
    ways = [*reversed(WAYS)]  # named, so that each keeps its mark whatever runs are shown
    shape = alt.Shape("kind:N", title=None, scale=alt.Scale(domain=ways, range=SHAPES[: len(ways)]))
    order: Any = [alt.SortField("x", "ascending"), alt.SortField("y", "descending")]
    front = base.transform_window(best="max(y)", sort=order, groupby=["kind"], frame=[None, 0])
    kept = front.transform_filter("datum.y >= datum.best")
    dash = alt.StrokeDash("kind:N", scale=alt.Scale(domain=ways), legend=None)
    tips = _tips("id:N", "series:N", "x:Q", "y:Q")
    return alt.layer(
        kept.mark_line(strokeWidth=1.4, color=GREY).encode(x=x, y=y, strokeDash=dash),
        base.mark_point(size=45, fillOpacity=0.3).encode(
            x=x, y=y, color=colour, fill=fill, shape=shape, tooltip=tips
        ),
    )


def agreement() -> Chart:
    """Describe predictions over measurements: exact on the dashed line, 10% off at the edges of the
    band.
    """
    base = _positive_points()
    scale = alt.Scale(type="log", nice=False, padding=10)
    x, y = _log_axes(scale, alt.Axis(tickCount=5, format="~r"))
    legend = alt.Legend(columns=1, labelLimit=400)
    colour = alt.Color("series:N", title=None, scale=alt.Scale(range=COLOURS), legend=legend)
    band = base.transform_calculate(low="0.9 * datum.x", high="1.1 * datum.x")
    named = (
        base.transform_calculate(error="abs(datum.y / datum.x - 1)")
        .transform_joinaggregate(off="median(error)", groupby=["series"])
        .transform_calculate(series="datum.series + ': median error ' + format(datum.off, '.1%')")
    )
    intervals = named.transform_filter("datum.high > datum.low")
    low = alt.Y("low:Q", title="$y")
    exact = alt.Y("x:Q", title="$y", scale=scale)
    tips = _tips("id:N", "x:Q", "y:Q")
    return alt.layer(
        band.mark_area(opacity=0.12, color=GREY).encode(x=x, y=low, y2="high:Q"),
        base.mark_line(strokeDash=[5, 4], color=GREY).encode(x=x, y=exact),
        intervals.mark_rule(opacity=0.4).encode(x="low:Q", x2="high:Q", y=y, color=colour),
        named.mark_point(size=45, opacity=0.8).encode(x=x, y=y, color=colour, tooltip=tips),
    )


def parts(unit: str) -> Chart:
    """Describe the mean parts of a round, measured and predicted; a mark is the autoregressive time
    of its tokens.
    """
    whole = "1" if unit == UNITS[0] else "datum.tokens"
    base = _points().transform_fold([*PARTS], as_=["series", "time"])
    base = base.transform_calculate(y=f"datum.time / {whole}", tokens=f"datum.tokens / {whole}")
    x = alt.X("x:O", title="$x", axis=alt.Axis(labelAngle=0, labelOverlap=True))
    inner = alt.XOffset("kind:N")
    up = alt.Y("y:Q", title=unit)
    bars = base.transform_aggregate(y="mean(y)", groupby=["x", "kind", "series"])
    faint = alt.Opacity(
        "kind:O", title=None, scale=alt.Scale(domain=["measured", "predicted"], range=[1, 0.5])
    )
    colour = alt.Color("series:N", title=None, scale=alt.Scale(range=COLOURS), sort=[*PARTS])
    tips = _tips("x:N", "kind:N", "series:N", "y:Q")
    tokens = base.transform_aggregate(tokens="mean(tokens)", groupby=["x", "kind"])
    return alt.layer(
        bars.mark_bar().encode(x=x, xOffset=inner, y=up, color=colour, opacity=faint, tooltip=tips),
        tokens.mark_tick(thickness=3, color=NOISY_COLOUR).encode(x=x, xOffset=inner, y="tokens:Q"),
    )


DESCRIPTIONS: dict[str, Callable[[], Chart]] = {
    **{
        f"line {x} {series}": partial(line, x, series)
        for x in KINDS
        for series in ("number", "word")
    },
    "heat ratio": partial(heat, True),
    "heat": partial(heat, False),
    "trade": trade,
    "agreement": agreement,
    **{f"parts {unit}": partial(parts, unit) for unit in UNITS},
}


def styled(name: str, on_page: bool) -> Chart:
    """Return a chart in its size and colours. On the page it is as wide as its box, in the page's
    colours.
    """
    chart = DESCRIPTIONS[name]()
    ink = "currentColor" if on_page else "#1c2330"
    faint = alt.AxisConfig(
        gridColor=ink, gridOpacity=0.12, domainColor=ink, domainOpacity=0.4, tickColor=ink, tickOpacity=0.4,  # noqa: E501
        labelColor=ink, titleColor=ink, titleFontWeight="normal", labelFontSize=11, titleFontSize=12,  # noqa: E501
    )  # fmt: skip
    legend = alt.LegendConfig(
        labelColor=ink,
        titleColor=ink,
        orient="top",
        columns=3,
        titleFontWeight="normal",
        symbolLimit=24,
        symbolBaseFillColor=ink,
        symbolBaseStrokeColor=ink,
        labelLimit=220,
    )
    chart = chart.properties(width="container" if on_page else SIZE[0], height=SIZE[1], padding=5)
    if not on_page:
        title = alt.TitleParams(
            text=["$caption"], orient="bottom", anchor="start", frame="bounds", fontSize=9.5, fontWeight="normal",  # noqa: E501
            offset=12, color="#5c677a",
        )  # fmt: skip
        chart = chart.properties(title=title)
    chart = chart.configure(
        axis=faint,
        legend=legend,
        font="Helvetica, Arial, sans-serif",
        background="transparent" if on_page else "white",
    )
    return chart.configure_view(stroke=None)


@cache
def template(name: str, on_page: bool = False) -> str:
    """Return a description as JSON.

    Tests check it against the schema of Vega-Lite: for all charts that takes half a second.
    """
    description = styled(name, on_page).to_dict(validate=False)
    text = json.dumps(description, separators=(",", ":"))
    if on_page:  # which has a menu of statistics
        return text.replace('"op":"median","field":"y"', '"op":"$statistic","field":"y"')
    return text


def filled(template: str, titles: Mapping[str, Any], points: list[Spec]) -> Spec:
    """Return a description with its titles and its points in place. A legend whose values are an
    empty list goes.
    """
    for key, value in titles.items():
        text = json.dumps(value)
        template = template.replace(f'["${key}"]' if isinstance(value, list) else f'"${key}"', text)
    return json.loads(template.replace('{"values":[]}', "null")) | {"datasets": {"points": points}}
