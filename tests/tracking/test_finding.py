"""The sentence that a sweep ends with."""

from math import exp, log, pi, sqrt
from statistics import median, stdev

import pytest

from magicdec.measure.intervals import speedup_intervals
from magicdec.report.fastest import answer
from magicdec.report.page import html_page
from magicdec.report.rows import read_rows
from magicdec.report.terminal import marked
from magicdec.tracking.store import Run
from tests.tracking.sample import METRICS, with_changes

ROWS, TOKENS = 4, 11
T_95 = {2: 4.302653}  # Student's t with 2 degrees of freedom, from a table
OF_MEDIAN = sqrt(pi / 2 * 3 / (2 + pi / 2))  # the error of a median of 3 over that of their mean


def store(runs_dir, speedups, **groups):
    """Store a run whose rows all take 1 s speculatively, and in each repeat this many
    autoregressively.
    """
    config = with_changes(**groups) | {"runs_dir": str(runs_dir)}
    name = "-".join(str(value) for group in groups.values() for value in group.values())
    run = Run.open(runs_dir, f"run{name}".replace("-", "x"), config)
    rows = [
        {"row": row, "autoregressive": [1] * TOKENS, "speculative": [1] * TOKENS}
        | {"decode_s": {"autoregressive": list(speedups), "speculative": [1.0] * len(speedups)}}
        for row in range(ROWS)
    ]
    plain = [[one] * ROWS for one in speedups]
    ends = speedup_intervals(plain, [[1.0] * ROWS] * len(speedups), speedups, [1.0] * len(speedups))
    own = {"speedup": sorted(speedups)[len(speedups) // 2], "data/fingerprint": "same"} | ends
    run.finish(METRICS | own, rows, [])


def said(runs_dir):
    return list(answer(read_rows(runs_dir)).sentences())


def test_the_winner_with_its_interval_and_what_was_held_constant(tmp_path):
    best = [1.50, 1.52, 1.54]
    store(tmp_path, best, cache={"budget": 128})
    store(tmp_path, [1.20, 1.21, 1.22], cache={"budget": 64})
    logs = [log(one) for one in best]
    half = OF_MEDIAN * T_95[2] * stdev(logs) / sqrt(3)
    low, high = (exp(median(logs) + sign * half) for sign in (-1, 1))
    winner = (
        f"cache.budget=128 is the fastest, 1.52x per row (95% interval {low:.2f}x to {high:.2f}x)"
    )
    winner += f" and 1.71x per batch ({low:.2f}x to {high:.2f}x)"
    held = (
        "held constant: model tiny, machine Some CPU @ 2.90GHz, batch 8, context 4096, text stdlib"
    )
    assert said(tmp_path) == [winner, held]


def test_what_cannot_be_distinguished(tmp_path):
    for budget, first in ((128, 1.52), (256, 1.51), (64, 1.505), (96, 1.5), (32, 1.495), (16, 1.2)):
        store(tmp_path, [first - 0.02, first, first + 0.02], cache={"budget": budget})
    line = said(tmp_path)[0]
    assert line.startswith(
        "not distinguishable: cache.budget=128, 1.52x per row (95% interval 1.46x to 1.58x) and "
    )
    assert line.endswith("cache.budget=256, cache.budget=64, cache.budget=96, 1 other")


def test_what_is_not_faster_than_the_baseline(tmp_path):
    store(tmp_path, [0.98, 1.00, 1.02], cache={"budget": 128})
    store(tmp_path, [0.50, 0.51, 0.52], cache={"budget": 64})
    assert said(tmp_path)[0].endswith(
        "; not faster than autoregressive decoding by more than noise"
    )


def test_too_few_repeats_have_no_interval(tmp_path):
    store(tmp_path, [1.5, 1.5], cache={"budget": 128})
    store(tmp_path, [1.2, 1.2], cache={"budget": 64})
    assert (
        said(tmp_path)[0]
        == "not known: cache.budget=128 was measured as the fastest, 1.50x per row and 1.71x per"
        " batch; an interval needs at least 4 rows and 3 repeats (scenario.repeats)"
    )


def test_a_speedup_without_an_interval_is_no_win_at_any_place(tmp_path):
    """A single repeat of 4.51x at one context; three repeats around 1 at another."""
    store(tmp_path, [4.51], batch={"context_len": 512})
    store(tmp_path, [0.98, 1.00, 1.02], batch={"context_len": 4096})
    rows = read_rows(tmp_path)
    for row in rows:
        row["repeats"] = 1 if row["batch.context_len"] == 512 else 3
    found = answer(rows)
    assert [place.faster for place in found.places] == ["not known (1 repeat)", "within noise"]
    assert found.top is found.places[1], "what has an interval can be trusted more"
    html = html_page(rows, "a page")
    assert "Speculation is faster at 0 of 2 values of context; at 1 it is not known" in html
    assert 'class="good"' not in html
    cells = {row["batch.context_len"]: marked(row, "speedup") for row in rows}
    assert {context: str(text.style) for context, text in cells.items()} == {512: "", 4096: ""}


def test_a_level_of_load_goes_by_its_value_and_is_said_to_have_no_interval():
    """It is measured once: scenario=serve has no repeats."""
    rows = [
        {"id": str(level), "status": "done", "scenario.name": "serve", "load.concurrency": level}
        | {"cache.budget": budget, "speedup": speedup}
        for level, budget, speedup in ((1, 64, 1.2), (1, 128, 1.5), (8, 64, 0.7), (8, 128, 0.8))
    ]
    found = answer(rows)
    assert [place.faster for place in found.places] == ["speculative", "autoregressive"]
    once = "; a level is measured once, without an interval"
    assert list(found.sentences())[:2] == [
        f"load.concurrency=1: cache.budget=128 is the fastest, 1.50x per row{once}",
        "load.concurrency=8: cache.budget=128 is the fastest, 0.80x per row; autoregressive"
        f" decoding is faster{once}",
    ]


@pytest.mark.parametrize(("speedups", "colour"), [([1.5, 1.6, 1.7], "green"), ([0.5] * 3, "red")])
def test_a_speedup_whose_interval_is_beyond_1_has_a_colour_in_the_table(tmp_path, speedups, colour):
    store(tmp_path, speedups)
    (row,) = read_rows(tmp_path)
    assert marked(row, "speedup").style == colour


def test_a_line_for_each_place(tmp_path):
    for batch, speedup in ((8, 1.5), (16, 1.7)):
        store(tmp_path, [speedup] * 3, batch={"size": batch}, cache={"budget": 128})
        store(tmp_path, [speedup - 0.4] * 3, batch={"size": batch}, cache={"budget": 64})
    first, second, held = said(tmp_path)
    assert first.startswith("batch.size=8: cache.budget=128 is the fastest, 1.50x")
    assert second.startswith("batch.size=16: cache.budget=128 is the fastest, 1.70x")
    assert "batch" not in held


def test_a_single_run_has_nobody_to_beat(tmp_path):
    store(tmp_path, [1.5] * 3, cache={"budget": 128})
    assert said(tmp_path) == []
