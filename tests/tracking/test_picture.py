"""Pictures by their pixels: marks are where the data are, and what would be blank or unfinished is
refused.
"""

import os

import pytest
import vl_convert

from magicdec.errors import UserError
from magicdec.report.charts import COLOURS, DESCRIPTIONS, PARTS, SIZE, filled, styled, template
from magicdec.report.picture import picture, placeholders
from tests.pixels import changed, coloured, ink, spots
from tests.programs import ROOT

TITLES = {
    "x": "batch",
    "y": "gamma",
    "series": "context",
    "values": [1, 2, 4],
    "kinds": [],
    "caption": ["a chart"],
}
# The titles that assets/page.js gives to each kind of chart.
ON_PAGE = {
    "line": {"x", "y", "series", "values", "kinds", "statistic"},
    "heat": {"x", "y", "series", "statistic"},
}
ON_PAGE |= {"trade": {"x", "y", "series"}, "agreement": {"x", "y"}, "parts": {"x"}}


def points(values, series="a"):
    """A point per place of x, with what each kind of chart reads."""
    parts = dict.fromkeys(PARTS, 1.0) | {"tokens": 4.0}
    others = {"series": series, "kind": "measured", "noisy": False, "rule": None} | parts
    return [{"x": x, "y": y, "low": y, "high": y} | others for x, y in values.items()]


def drawn(name, values, **titles):
    return picture(filled(template(name), TITLES | titles, values), "png")


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_every_chart_has_marks(name, capfd):
    values = points({1: 1.5, 2: 2.0, 4: 1.0}) + points({1: 1.0, 2: 3.0, 4: 2.0}, series="b")
    if "number" in name.split()[-1:]:
        values = [point | {"series": len(point["series"])} for point in values]
    chart = drawn(name, values)
    assert ink(chart) > 0.02
    assert coloured(chart) > 0.0005
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("on_page", [False, True], ids=["file", "page"])
@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_every_chart_follows_the_schema_of_vega_lite(name, on_page):
    """Altair raises an error for what the schema does not have."""
    assert styled(name, on_page).to_dict()["$schema"].startswith("https://vega.github.io/schema/")


def test_points_are_where_their_values_are():
    chart = drawn("line word word", points({"p": 1.0, "q": 3.0, "r": 2.0}))
    (left, low), (middle, high), (right, between) = spots(chart, COLOURS[0])
    assert middle - left == pytest.approx(right - middle, abs=1)
    assert between == pytest.approx((low + high) / 2, abs=1)
    assert low - high > SIZE[1], "more than half of the height, at two pixels per point"


def test_a_cell_of_a_map_is_where_its_batch_and_context_are():
    """A cell is what changes if its value does. Two others span the scale of colours."""
    batches, contexts = (1, 2, 4), (8192, 4096)  # from left to right, from top to bottom
    spans = {(8, 4096): 8, (8, 8192): 1}
    flat = spans | {(batch, context): 2 for batch in batches for context in contexts}

    def chart(values):
        return drawn("heat", [cell for (x, of), y in values.items() for cell in points({x: y}, of)])

    before = chart(flat)
    boxes = {
        place: changed(before, chart(flat | {place: 5})) for place in flat.keys() - spans.keys()
    }
    left, top, right, bottom = boxes[batches[0], contexts[0]]
    width, height = 2 * SIZE[0] / 4, 2 * SIZE[1] / 2
    assert (right - left, bottom - top) == (
        pytest.approx(width, rel=0.1),
        pytest.approx(height, rel=0.1),
    )
    for (batch, context), box in boxes.items():
        corner = (left + batches.index(batch) * width, top + contexts.index(context) * height)
        assert box[:2] == pytest.approx(corner, abs=4)


def test_what_would_be_blank_or_unfinished_is_refused(capfd):
    values, marks = points({1: 1.0, 2: 2.0}), "none of its values has a place on its axes"
    unfinished = {key: title for key, title in TITLES.items() if key != "series"}
    unknown = filled(template("heat"), TITLES, values)
    unknown["layer"][0]["transform"][0]["aggregate"][0]["op"] = "middle"
    warned = filled(template("parts ms per round"), TITLES, values)
    warned["layer"][0]["encoding"]["opacity"]["type"] = "nominal"
    for spec, words in (
        (filled(template("heat"), unfinished, values), r"nothing was given for \$series$"),
        (
            filled(template("heat", on_page=True), TITLES, values),
            r"nothing was given for \$statistic$",
        ),
        (unknown, "TypeError: .* is not a function"),
        (warned, "Channel opacity should not be used"),
        (filled(template("heat"), TITLES, []), marks),
        (filled(template("trade"), TITLES, points({1: -1.0, 2: 0.0})), marks),
        (filled(template("line word word"), TITLES, points({"p": None})), marks),
    ):
        with pytest.raises(UserError, match=words):
            picture(spec, "svg")
    assert capfd.readouterr().err == ""


def test_a_value_may_look_like_a_placeholder():
    chart = picture(
        filled(template("line word word"), TITLES, points({"$HOME": 1.0}, series="$x")), "svg"
    )
    assert ">$HOME<" in chart.decode()


def test_what_others_write_to_stderr_meanwhile_is_kept(capfd, monkeypatch):
    convert = vl_convert.vegalite_to_vega

    def interrupted(*args, **options):
        os.write(2, b"hello\n")
        return convert(*args, **options)

    monkeypatch.setattr(vl_convert, "vegalite_to_vega", interrupted)
    assert ink(drawn("heat", points({1: 2.0}))) > 0.02
    assert capfd.readouterr().err == "hello\n"


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_the_page_fills_every_placeholder(name):
    spec = filled(template(name, on_page=True), {}, [])
    assert {text.removeprefix("$") for text in placeholders(spec)} <= ON_PAGE[name.split()[0]]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs").rglob("*.png")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_pictures_of_the_documentation_are_not_blank(path):
    assert ink(path) > 0.02
    assert coloured(path) > 0.001
