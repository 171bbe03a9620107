"""The pages of results: each is what its template makes of the CSV files next to it, and opens with
a chart.
"""

import re

import charts
import pytest
import render

from magicdec.errors import UserError
from tests.pixels import spots
from tests.programs import ROOT

PAGES = sorted(
    path.relative_to(ROOT / "benchmarks/pages")
    for path in (ROOT / "benchmarks/pages").rglob("*.md")
)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_pages_are_those_of_their_csv_files(page, monkeypatch):
    """If this fails, run python benchmarks/render.py."""
    lengths = []
    monkeypatch.setattr("charts.draw_chart", lambda _, rows, *__, **___: lengths.append(len(rows)))
    name = str(page.with_suffix(""))
    text = render.page_of(name).read_text(encoding="utf-8")
    assert text == render.render(name)
    assert lengths
    assert all(lengths)
    shown = re.search(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert shown is not None
    assert text.index(shown[0]) < f"{text}\n## ".index("\n## ")
    assert (render.page_of(name).parent / shown[1]).exists()


def test_tables_format_cells_and_leave_out_what_is_unknown():
    rows = [{"a": 1024, "b": 0.5, "c": True}, {"a": 2048, "b": None, "c": False}]
    assert render.table(rows, "a:,", "half=b:.0%", "c").splitlines()[2:] == [
        "| 1,024 | 50% | yes |",
        "| 2,048 |  | NO |",
    ]
    table = render.pivot(
        [{"x": 1, "y": 1000, "z": 2.0}, {"x": 1, "y": 2000, "z": 3.0}], ["x"], "y", "{z:.1f}"
    )
    assert table.splitlines() == [
        "| x | 1,000 | 2,000 |",
        "| --- | --- | --- |",
        "| 1 | 2.0 | 3.0 |",
    ]


def test_ratios_are_counted_with_their_range_and_median():
    assert render.ahead([0.5, None, 1.0, 4.0]) == "2 of 3 cells (0.50x to 4.00x, median 1.00x)"
    assert render.span([2.0, 2.0]) == "2.00x"


def test_rows_survive_the_csv_file(tmp_path):
    rows = [
        {"name": "a, b", "number": 1, "share": 0.25, "good": True},
        {"name": "c", "number": 2, "good": False},
    ]
    render.write_csv(tmp_path / "rows.csv", rows)
    assert render.read_csv(tmp_path / "rows.csv") == [rows[0], {**rows[1], "share": None}]


@pytest.mark.parametrize("kind", ["line", "bar", "points"])
def test_a_chart_has_a_mark_for_each_row(kind, tmp_path):
    rows = [
        {"x": x, "y": y, "way": way}
        for way, low in (("a", 1.0), ("b", 2.0))
        for x, y in ((1, low), (4, low + 1))
    ]
    charts.draw_chart(tmp_path / "chart.png", rows, "x", "y", "way", kind=kind, log=kind == "line")
    for colour in charts.COLOURS[:2]:
        assert len(spots(tmp_path / "chart.png", colour, least=10)) >= 2, (
            "those of the rows, and of the legend"
        )
    with pytest.raises(UserError, match="none of its values has a place"):
        charts.draw_chart(tmp_path / "empty.png", [], "x", "y", "way", kind=kind)
    assert not (tmp_path / "empty.png").exists()
