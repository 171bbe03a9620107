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

GREY, NOISY = "#8b929e", "#d55e00"
# Distinguishable without red and green, and in grey print by the shapes that come with them.
COLOURS = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", GREY, "#7a5195"]
BREAK_EVEN = {"strokeDash": [4, 3], "color": GREY}
SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down"]
KINDS = ("number", "log", "word")  # of values: on a linear axis, on a logarithmic one, side by side
PARTS = ("drafting", "verification", "rest of the round")
UNITS = ("ms per round", "vs autoregressive")
APART = 0.05  # of the x axis, for all series of a place
SIZE = (440, 280)  # of a figure, in points
Spec = dict[str, Any]
Chart = Any  # Altair's


def _beside(base: Chart, is_log: bool) -> Chart:
    """Move the points of several series with the same x apart, so that their intervals do not hide
    each other.
    """
    order: Any = [alt.SortField("series"), alt.SortField("kind")]
    ranked = base.transform_window(rank="dense_rank()", sort=order).transform_joinaggregate(
        ranks="max(rank)", least="min(x)", most="max(x)"
    )
    share = f"{APART} * (datum.rank / (datum.ranks + 1) - 0.5)"
    if is_log:
        return ranked.transform_calculate(at=f"datum.x * pow(datum.most / datum.least, {share})")
    return ranked.transform_calculate(at=f"datum.x + (datum.most - datum.least) * {share}")


def line(x: str = "number", series: str = "word") -> Chart:
    """Describe y over x, a colour per series and a shape per kind.

    A point is the median, or another statistic, of the rows with the same x, series and kind. A
    single row has an interval, from `low` to `high`; `!` marks noise.
    """
    keys: Any = ["x", "series", "kind"]
    base: Chart = alt.Chart(alt.NamedData(name="points")).transform_aggregate(
        y="median(y)", low="min(low)", high="max(high)", noisy="max(noisy)", rule="max(rule)", runs="count()",  # noqa: E501
        groupby=keys,
    )  # fmt: skip
    hues = alt.Scale(scheme="viridis") if series == "number" else alt.Scale(range=COLOURS)
    kind: Any = "ordinal" if series == "number" else "nominal"
    colour = alt.Color(
        "series",
        type=kind,
        title="$series",
        scale=hues,
        sort=None,
        legend=alt.Legend(symbolType="stroke"),
    )
    # A legend of kinds only where there are several: the placeholder becomes an empty list.
    shape = alt.Shape(
        "kind:N",
        title=None,
        sort=None,
        scale=alt.Scale(range=SHAPES),
        legend=alt.Legend(values=["$kinds"]),
    )
    dash = alt.StrokeDash("kind:N", title=None, sort=None, legend=None)
    if x == "word":
        axis = alt.Axis(labelOverlap=True, labelAngle=0)
        at: dict[str, Any] = {"x": alt.X("x", type="ordinal", title="$x", axis=axis)}
        at["xOffset"] = alt.XOffset("series:N", sort=None)
    else:
        base, is_log = _beside(base, x == "log"), x == "log"
        scale = (
            alt.Scale(type="log", base=2, nice=False, padding=14)
            if is_log
            else alt.Scale(zero=False, padding=14)
        )
        axis = alt.Axis(values=["$values"], labelOverlap=True, labelExpr="format(datum.value, ',')")
        at = {"x": alt.X("at", type="quantitative", title="$x", axis=axis, scale=scale)}
    up = alt.Y("y:Q", title="$y", scale=alt.Scale(zero=False))
    tips = [
        alt.Tooltip(name)
        for name in ("series:N", "kind:N", "x:N", "y:Q", "low:Q", "high:Q", "runs:Q")
    ]
    rule = base.transform_filter("isValid(datum.rule)").transform_aggregate(rule="max(rule)")
    parts = [
        rule.mark_rule(**BREAK_EVEN).encode(y="rule:Q"),
        base.transform_filter("datum.runs == 1 && datum.high > datum.low")
        .mark_errorbar(ticks=alt.MarkConfig(width=7), thickness=1.2)
        .encode(**at, y=alt.Y("low:Q", title="$y"), y2="high:Q", color=colour),
        base.mark_point(filled=True, size=55, opacity=1).encode(
            **at, y=up, color=colour, shape=shape, tooltip=tips),
        base.transform_filter("datum.noisy")
        .mark_text(text="!", dx=9, dy=-7, fontWeight="bold", color=NOISY, size=13).encode(**at, y=up),  # noqa: E501
    ]  # fmt: skip
    if x != "word":
        parts.insert(
            1, base.mark_line(strokeWidth=1.6).encode(**at, y=up, color=colour, strokeDash=dash)
        )
    return alt.layer(*parts)


def heat(ratio: bool) -> Chart:
    """Describe a statistic of y for each x and series, as a table of colours. A ratio is good above
    1, bad below.
    """
    base: Chart = alt.Chart(alt.NamedData(name="points")).transform_aggregate(
        y="median(y)", noisy="max(noisy)", runs="count()", groupby=["x", "series"]
    )
    hues = alt.SchemeParams(
        name="redblue" if ratio else "blues", extent=[0.15, 0.85] if ratio else [0, 0.6]
    )
    # Light: text is legible on it.
    scale = alt.Scale(scheme=hues, domainMid=1) if ratio else alt.Scale(scheme=hues)
    tips = [alt.Tooltip(name) for name in ("x:N", "series:N", "y:Q", "runs:Q")]
    axis = alt.Axis(labelAngle=0, labelOverlap=True, labelSeparation=4)
    across = alt.X("x:O", title="$x", axis=axis)
    up = alt.Y("series:O", title="$series", sort="descending")
    cells = base.mark_rect(cornerRadius=2).encode(
        x=across, y=up, color=alt.Color("y:Q", title="$y", scale=scale), tooltip=tips
    )
    words = base.transform_calculate(text="format(datum.y, '.3~r') + (datum.noisy ? ' !' : '')")
    return alt.layer(
        cells,
        words.mark_text(color="#16181d", stroke="white", strokeWidth=0.15).encode(
            x=across, y=up, text="text:N"
        ),
    )


def trade() -> Chart:
    """Describe throughput over latency, with the Pareto front of each kind: speculative and
    autoregressive.
    """
    base: Chart = alt.Chart(alt.NamedData(name="points")).transform_filter(
        "datum.x > 0 && datum.y > 0"
    )
    log = alt.Scale(type="log", nice=False, padding=12)
    ticks = alt.Axis(tickCount=5, format="~s")
    x, y = (
        alt.X("x:Q", title="$x", scale=log, axis=ticks),
        alt.Y("y:Q", title="$y", scale=log, axis=ticks),
    )
    colour = alt.Color("series:N", title="$series", scale=alt.Scale(range=COLOURS))
    order: Any = [alt.SortField("x", "ascending"), alt.SortField("y", "descending")]
    front = base.transform_window(best="max(y)", sort=order, groupby=["kind"], frame=[None, 0])
    kept = front.transform_filter("datum.y >= datum.best")
    tips = [alt.Tooltip(name) for name in ("id:N", "series:N", "x:Q", "y:Q")]
    return alt.layer(
        kept.mark_line(strokeWidth=1.4, color=GREY).encode(
            x=x, y=y, strokeDash=alt.StrokeDash("kind:N", sort=None, legend=None)),
        base.mark_point(size=45, fillOpacity=0.3).encode(
            x=x, y=y, color=colour, fill=alt.Fill("series:N", title="$series", scale=alt.Scale(range=COLOURS)),  # noqa: E501
            shape=alt.Shape("kind:N", title=None, sort=None, scale=alt.Scale(range=SHAPES)), tooltip=tips),  # noqa: E501
    )  # fmt: skip


def agreement() -> Chart:
    """Describe predictions over measurements: exact on the dashed line, 10% off at the edges of the
    band.
    """
    base: Chart = alt.Chart(alt.NamedData(name="points")).transform_filter(
        "datum.x > 0 && datum.y > 0"
    )
    scale = alt.Scale(type="log", nice=False, padding=10)
    axis = alt.Axis(tickCount=5, format="~r")
    x, y = (
        alt.X("x:Q", title="$x", scale=scale, axis=axis),
        alt.Y("y:Q", title="$y", scale=scale, axis=axis),
    )
    colour = alt.Color(
        "series:N",
        title=None,
        scale=alt.Scale(range=COLOURS),
        legend=alt.Legend(columns=1, labelLimit=400),
    )
    exact = base.transform_calculate(low="0.9 * datum.x", high="1.1 * datum.x")
    named = (
        base.transform_calculate(error="abs(datum.y / datum.x - 1)")
        .transform_joinaggregate(off="median(error)", groupby=["series"])
        .transform_calculate(series="datum.series + ': median error ' + format(datum.off, '.1%')")
    )
    tips = [alt.Tooltip(name) for name in ("id:N", "x:Q", "y:Q")]
    return alt.layer(
        exact.mark_area(opacity=0.12, color=GREY).encode(x=x, y=alt.Y("low:Q", title="$y"), y2="high:Q"),  # noqa: E501
        base.mark_line(strokeDash=[5, 4], color=GREY).encode(x=x, y=alt.Y("x:Q", title="$y", scale=scale)),  # noqa: E501
        named.transform_filter("datum.high > datum.low").mark_rule(opacity=0.4).encode(
            x="low:Q", x2="high:Q", y=y, color=colour),
        named.mark_point(size=45, opacity=0.8).encode(x=x, y=y, color=colour, tooltip=tips),
    )  # fmt: skip


def parts(unit: str) -> Chart:
    """Describe the mean parts of a round, measured and predicted; a mark is the autoregressive time
    of its tokens.
    """
    whole = "1" if unit == UNITS[0] else "datum.tokens"
    base: Chart = alt.Chart(alt.NamedData(name="points")).transform_fold(
        [*PARTS], as_=["series", "time"]
    )
    base = base.transform_calculate(y=f"datum.time / {whole}", tokens=f"datum.tokens / {whole}")
    x, inner = (
        alt.X("x:O", title="$x", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
        alt.XOffset("kind:N"),
    )
    bars = base.transform_aggregate(y="mean(y)", groupby=["x", "kind", "series"])
    faint = alt.Opacity(
        "kind:O", title=None, scale=alt.Scale(domain=["measured", "predicted"], range=[1, 0.5])
    )
    colour = alt.Color("series:N", title=None, scale=alt.Scale(range=COLOURS), sort=[*PARTS])
    tips = [alt.Tooltip(name) for name in ("x:N", "kind:N", "series:N", "y:Q")]
    tokens = base.transform_aggregate(tokens="mean(tokens)", groupby=["x", "kind"])
    return alt.layer(
        bars.mark_bar().encode(
            x=x, xOffset=inner, y=alt.Y("y:Q", title=unit), color=colour, opacity=faint, tooltip=tips),  # noqa: E501
        tokens.mark_tick(thickness=3, color=NOISY).encode(x=x, xOffset=inner, y="tokens:Q"),
    )  # fmt: skip


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


@cache
def template(name: str, on_page: bool = False) -> str:
    """Return a description as JSON. On the page a chart is as wide as its box, in the page's
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
    chart = chart.configure_view(stroke=None)
    text = json.dumps(chart.to_dict(), separators=(",", ":"))
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
