"""The page in a real browser: charts are drawn, filters work, what must not mix is apart, nothing
is fetched.
"""

import json
import re

import pytest

from magicdec.report import page
from magicdec.report.charts import PARTS
from magicdec.report.fastest import answer
from magicdec.report.rows import read_rows
from tests.tracking.browser import CHROMIUM, browsing
from tests.tracking.stores import data_of, write_load, write_store

NUMBER = 400
browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")
# Marks of one kind in one chart, such as numMarks("steps", "rect"); and what the tests look at.
HELPERS = """
const wait = () => new Promise((done) => setTimeout(done, 300));
const numMarks = (id, mark) => document.querySelectorAll(`#${id} .plot .mark-${mark}.role-mark path`).length;
const text = (id) => document.getElementById(id).textContent;
const shownPanels = () => [...document.querySelectorAll("article")].filter((a) => !a.hidden).map((a) => a.id);
const pick = (id, value) => { const s = $(id); s.value = value; s.dispatchEvent(new Event("input")); };
const numShown = () => Number(document.body.dataset.shown);
"""  # noqa: E501
FIXED = {
    "overhead_ms": 5.0,
    "round_ms": 35.0,
    "target_decode_ms": 10.0,
    "draft_ms": 5.0,
    "verify_ms": 20.0,
}


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    write_store(folder / "runs", NUMBER)
    return page.html_page(read_rows(folder / "runs"), title="runs <b>")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("user")) as started:
        yield started


@pytest.fixture
def look(tmp_path, chromium):
    """Return the values of JavaScript expressions, one after the other, in the page of some rows
    (or in a page).
    """

    def in_browser(rows, *expressions, state=""):
        path = tmp_path / f"page{len(list(tmp_path.iterdir()))}.html"
        path.write_text(
            rows if isinstance(rows, str) else page.html_page(rows, "a page"), encoding="utf-8"
        )
        steps = "".join(f"found.push({expression}); await wait();" for expression in expressions)
        deed = f"const found = []; await ready; await wait(); {steps} return found;"
        return chromium.look(path, state, f"{HELPERS}(async () => {{ {deed} }})()")

    return in_browser


def done(number, **values):
    """A row of a run that is done; double underscores are dots."""
    return {"id": f"run{number}", "status": "done"} | {
        key.replace("__", "."): v for key, v in values.items()
    }


def rows_of(key, values, **others):
    return [
        done(i, **{key: value}, speedup=0.8 + i / 10, **others) for i, value in enumerate(values)
    ]


def test_the_page_is_self_contained(html):
    ours = re.sub(r'<script type="text/plain".*?</script>', "", html, flags=re.S)
    assert not re.search(r"(src|href)=|@import|url\(|https?://", ours)
    assert "University of Washington Interactive Data Lab" in ours
    assert "THIS SOFTWARE IS PROVIDED BY THE COPYRIGHT HOLDERS" in ours, "the whole notice"
    assert data_of(html)["vega"].count("window.vegaEmbed") == 1
    assert "runs &lt;b&gt;" in html
    assert not re.search(r"/\*[A-Z]+\*/", ours)


def test_values_that_are_no_numbers_do_not_break_the_page():
    """JSON has no NaN: a browser would read nothing at all."""
    rows = [
        done(i, acceptance_rate=rate) for i, rate in enumerate((float("nan"), float("inf"), 0.5))
    ]
    assert data_of(page.html_page(rows, "a page"))["columns"]["acceptance_rate"] == [
        None,
        None,
        0.5,
    ]


@browser
def test_charts_are_drawn(look, html):
    panels, lines, dots, parts, prediction, is_nan, fetched, shown, everything = look(
        html,
        "shownPanels()",
        "numMarks('chart1', 'line') && numMarks('chart2', 'line')",
        "numMarks('pareto', 'symbol')",
        "numMarks('steps', 'rect')",
        "text('prediction')",
        "document.querySelector('main').innerHTML.includes('NaN')",
        "performance.getEntriesByType('resource').length",
        "numShown()",
        "(set({ 'pick:acceptance/source': '' }), [numShown(), text('runs').includes('synthetic')])",
    )
    assert panels == [
        "fastest",
        "chart1",
        "chart2",
        "pareto",
        "prediction",
        "steps",
        "runs",
    ], "none under load"
    assert lines == 3, "policies"
    assert dots > 300
    assert parts == 3 * 2 * 5 + 2 * 5, (
        "parts of a round, measured and predicted, by batch; and the tokens' times"
    )
    assert "cost model: median error" in prediction
    assert "measured speedup" in prediction
    assert (is_nan, fetched) == (False, 0)
    assert 0 < shown < NUMBER, "drawn acceptance is apart"
    assert everything == [NUMBER, True], "unless one asks for it"


@browser
def test_filters(look, html):
    some, _, typed, both, is_sorted, mistake, no_number, cleared, _, cells = look(
        html,
        "numShown()",
        "($('where').value = 'budget=64', $('where').dispatchEvent(new Event('input')))",
        "numShown()",
        "(pick('pick:cache.policy', 'snapkv'), numShown())",
        "([...document.querySelectorAll('#runs th')].find((th) => th.textContent ==="
        " 'batch.size').click(), text('runs').includes('batch.size ↑'))",
        "(set({ where: 'bugdet=4' }), text('mistake'))",
        "(set({ where: 'speedup>abc' }), text('mistake'))",
        "($('clear').click(), numShown())",
        "pick('as', 'heat map')",
        "numMarks('chart1', 'rect')",
        state="where=cache.budget%3D128+speedup%3E1&x1=draft.gamma",
    )
    assert 0 < some < cleared / 4
    assert 0 < both < typed < cleared < NUMBER
    assert is_sorted
    assert mistake == "bugdet: no key in which the runs differ"
    assert no_number == "speedup>abc: abc is not a number"
    assert cells == 5 * 5, "contexts x measured batches"


@browser
def test_panels_without_anything_to_show_take_no_room(look):
    rows = [{"id": "a", "status": "failed", "reason": "why"}, {"id": "b", "status": "done"}]
    panels, shown, said = look(rows, "shownPanels()", "numShown()", "text('answer')")
    assert (panels, shown) == (["runs"], 2)
    assert said == "No run has a speedup.Of 2 runs: 1 failed."


@browser
def test_one_swept_axis_is_a_line(look):
    ends = {"speedup_ci95/low": 0.75, "speedup_ci95/high": 1.05}
    rows = rows_of("draft__gamma", (1, 2, 4), **ends, **{"predicted/speedup": 1.3})
    lines, points, words, bars, repeated = look(
        rows,
        "numMarks('chart1', 'line')",
        "numMarks('chart1', 'symbol')",
        "text('chart1')",
        "document.querySelectorAll('#chart1 .role-mark.mark-rule line').length",
        "document.getElementById('shown').textContent",
    )
    assert (lines, points) == (2, 2 * 3), "measured and predicted"
    assert bars > 3, "an interval for each measured point, and the line of no speedup"
    assert "measured" in words
    assert "predicted" in words
    assert repeated == "3 of 3 runs: speedup 0.80x to 1.00x, median 0.90x, above 1 in 0"


@browser
def test_the_median_of_two_is_between_them(look):
    said = look(rows_of("draft__gamma", (1, 2)), "document.getElementById('shown').textContent")
    assert said == ["2 of 2 runs: speedup 0.80x to 0.90x, median 0.85x, above 1 in 0"]


@browser
def test_a_rate_of_many_digits_can_be_chosen(look):
    rows = rows_of("load.rate", (2**0.5, 2.0))
    assert look(rows, "pick('pick:load.rate', '1.4142')", "numShown()")[1] == 1


@browser
def test_a_chosen_policy_leaves_out_runs_without_a_cache(look):
    rows = [*rows_of("cache.policy", ("streaming", "snapkv")), done(3, speedup=1.0)]
    shown = look(rows, "pick('pick:cache.policy', 'streaming')", "numShown()")
    assert shown[1] == 1


@browser
def test_the_best_gamma_is_a_map_over_batch_and_context(look):
    rows = [
        done(
            i,
            batch__size=batch,
            batch__context_len=context,
            **{"predicted/gamma": gamma, "predicted/speedup": 1.1},
        )
        for i, (batch, context, gamma) in enumerate(
            [(1, 1024, 1), (64, 1024, 1), (1, 8192, 2), (64, 8192, 5)]
        )
    ]
    cells, words = look(
        rows, "numMarks('chart1', 'rect')", "text('chart1')", state="value1=best+gamma&as=heat+map"
    )
    assert cells == len(rows)
    assert "best gamma" in words


@browser
def test_a_click_on_a_cell_shows_its_runs_alone(look, html):
    place = "document.querySelector('#chart1 .mark-rect.role-mark path')"
    _, shown, where = look(
        html,
        f"({place}.dispatchEvent(new MouseEvent('click', {{ bubbles: true }})), state.where)",
        "numShown()",
        "state.where",
        state="as=heat+map&x1=draft.gamma&series1=cache.budget&where=cache.policy%3Dsnapkv",
    )
    assert re.fullmatch(r"cache\.policy=snapkv draft\.gamma=\d cache\.budget=\d+", where)
    assert 0 < shown < NUMBER / 20


def test_the_parts_of_a_round_are_those_that_were_timed():
    """A choice of entries is part of what was timed, or is made once per sequence: it is never
    added.
    """
    h2o = {f"time/{name}": value for name, value in FIXED.items()} | {"time/select_ms": 23_000.0}
    quest = {f"predicted/{name}": value for name, value in FIXED.items()} | {
        "predicted/select_ms": 1.0
    }
    measured = page._judged(done(0, **h2o, acceptance_length=2.0))
    predicted = page._judged(done(1, **quest, **{"predicted/speedup": 2.0}))
    for kind, found, tokens in (
        ("measured", measured, 2.0 * 10),
        ("predicted", predicted, 2.0 * 35),
    ):
        parts = zip((*PARTS, "tokens"), (10, 20, 5, tokens), strict=True)
        assert found == {f"round/{kind}": dict(parts)}
    impossible = page._judged(done(2, **h2o | {"time/overhead_ms": -100.0, "time/round_ms": 30.0}))
    assert impossible["marks"] == "impossible times"


def timed(number, speedup, **settings):
    """A row whose autoregressive time per token is 10 ms."""
    row = done(number, speedup=speedup, **settings)
    for way, ms in (("autoregressive", 10.0), ("speculative", 10.0 / speedup)):
        row[f"{way}/time_per_output_token_ms"] = ms
        row[f"{way}/tokens_per_second"] = 1000 / ms
    return row


SQUARES = """[...document.querySelectorAll("#pareto .mark-symbol.role-mark path")].filter((path) =>
  !path.getAttribute("d").includes("A")).length"""


@browser
@pytest.mark.parametrize("fastest", ["speculative", "autoregressive"])
def test_a_way_of_decoding_keeps_its_mark_whichever_is_drawn_first(look, fastest):
    """Speculative runs are circles, which have arcs, and autoregressive ones squares."""
    speedup = 2.0 if fastest == "speculative" else 0.5
    rows = [timed(number, speedup, draft__gamma=number) for number in (1, 2, 4)]
    only_speculative = rows[0] | {}
    del only_speculative["autoregressive/tokens_per_second"]
    assert look(rows, SQUARES) == [3]
    assert look([only_speculative, *rows[1:]], SQUARES) == [2]


@browser
def test_a_legend_has_numbers_in_their_order_and_names_what_is_missing(look):
    rows = [
        timed(number, 1.0 + number / 10, cache__budget=budget, batch__size=number)
        for number, budget in enumerate((128, 256, 64))
    ]
    rows += [timed(9, 1.4, batch__size=9)]
    labels = (
        '[...document.querySelectorAll("#pareto .role-legend-label text")].map('
        "(label) => label.textContent)"
    )
    (found,) = look(rows, labels, state="colour=cache.budget")
    assert [label for label in found if label.isdigit()] == ["64", "128", "256"]
    assert "no cache" in found
    assert "null" not in found


@browser
def test_a_cell_of_a_heat_map_has_two_decimals_in_a_colour_that_is_legible_on_it(look):
    rows = [
        done(i, batch__size=i % 2, draft__gamma=i // 2, speedup=speedup)
        for i, speedup in enumerate((0.2, 0.37, 0.553, 2.0))
    ]
    texts = (
        '[...document.querySelectorAll("#chart1 .mark-text.role-mark text")].map('
        '(text) => [text.textContent, text.getAttribute("fill")])'
    )
    (found,) = look(rows, texts, state="as=heat+map&x1=batch.size&series1=draft.gamma")
    assert sorted(words for words, _ in found) == ["0.20", "0.37", "0.55", "2.00"]
    colours = dict(found)
    assert colours["0.20"] == "#ffffff", "the darkest red"
    assert colours["0.55"] != "#ffffff"


@browser
def test_points_that_average_unlike_runs_are_not_joined(look):
    """At one budget all contexts are short, at the other long."""
    unlike = [
        done(i, cache__budget=budget, batch__context_len=context, acceptance_rate=0.5 + i / 10)
        for i, (budget, context) in enumerate([(64, 512), (64, 1024), (256, 4096), (256, 8192)])
    ]
    like = [
        done(i, cache__budget=budget, batch__context_len=context, acceptance_rate=0.5 + i / 10)
        for i, (budget, context) in enumerate([(64, 512), (64, 1024), (256, 512), (256, 1024)])
    ]
    state = "x2=cache.budget&series2="
    counts = "[numMarks('chart2', 'line'), numMarks('chart2', 'symbol')]"
    ((lines, points), said) = look(unlike, counts, "text('chart2')", state=state)
    assert (lines, points) == (0, 2)
    assert "Not joined: points differ in their values of batch.context_len." in said
    assert look(like, counts, state=state) == [[1, 2]]


@browser
def test_drafts_are_apart_where_acceptance_is_shown_first(look):
    rows = [
        done(i, draft__name=draft, cache__policy=policy, cache__budget=budget, acceptance_rate=0.5)
        for i, (draft, policy, budget) in enumerate(
            [("self", "streaming", 64), ("model", "streaming", 128), ("self", "snapkv", 128)]
        )
    ]
    assert look(rows, "state.series2") == ["draft.name"]


@browser
def test_the_filter_takes_headings_of_the_terminal(look):
    """The heading of acceptance_rate is `accepted`; `draft` is that of draft.name."""
    rows = [
        done(i, draft__name=draft, acceptance_rate=rate)
        for i, (draft, rate) in enumerate([("self", 0.2), ("self", 0.4), ("ngram", 0.6)])
    ]
    accepted, both, mistake = look(
        rows,
        "(set({ where: 'accepted>0.3' }), numShown())",
        "(set({ where: 'accepted>0.3 draft=self' }), numShown())",
        "text('mistake')",
    )
    assert (accepted, both, mistake) == (2, 1, "")


def test_the_page_says_what_a_line_of_its_first_table_is():
    rows = [
        done(i, batch__size=size, batch__context_len=context, speedup=1.5)
        for i, (size, context) in enumerate([(1, 512), (8, 512), (1, 4096)])
    ]
    html = page.html_page(rows, "a page")
    assert "Fastest configuration per context and batch" in html
    assert "at 0 of 3 combinations of context and batch; at 3 it is not known" in html
    assert "not distinguishable: other runs that are not slower" in html


@browser
def test_published_values_are_not_called_measured(look):
    values = {
        "predicted/speedup": 1.5,
        "published/speedup": 1.4,
        "published/predicted_speedup": 1.6,
    }
    rows = [done(i, batch__size=size, **values) for i, size in enumerate((8, 32))]
    prediction, fastest = look(rows, "text('prediction')", "text('fastest')")
    assert "published speedup" in prediction
    assert "measured speedup" not in prediction
    assert "median error 14.3%" in prediction
    assert "best predicted speedup" in fastest


@browser
def test_a_key_of_another_ones_store_is_text(look):
    key = "cache.<img src=x onerror=document.body.dataset.ran=1>"
    rows = [done(number, speedup=1.0) | {key: number} for number in (1, 2)]
    images, ran, heads = look(
        rows,
        "document.images.length",
        "document.body.dataset.ran ?? 'no'",
        "[...document.querySelectorAll('#runs th')].map((th) => th.textContent)",
    )
    assert (images, ran) == (0, "no")
    assert key in heads


def test_what_is_assumed_is_not_recommended():
    """The largest alpha of a sweep over it is no configuration that one could choose."""
    rows = [
        done(
            10 * alpha + gamma,
            scenario__alpha=alpha / 10,
            cache__budget=gamma,
            **{"predicted/speedup": speedup},
        )
        for alpha, gamma, speedup in ((6, 1, 1.1), (6, 2, 1.2), (9, 1, 1.9), (9, 2, 1.8))
    ]
    found = answer(rows)
    best = [
        (place.best["scenario.alpha"], place.best["cache.budget"], place.faster)
        for place in found.places
    ]
    assert best == [(0.6, 2, "speculative"), (0.9, 1, "speculative")]
    assert found.winner(found.top) == "cache.budget=1 is the fastest, predicted 1.90x per row"


def test_a_noisy_run_is_no_answer_while_there_are_others():
    rows = [
        done(
            batch + gamma,
            batch__size=batch,
            draft__gamma=gamma,
            speedup=speedup,
            speedup_spread=spread,
        )
        for batch, gamma, speedup, spread in (
            (10, 1, 1.2, 0.01),
            (10, 2, 9.0, 0.5),
            (20, 1, 5.0, 0.4),
            (20, 2, 4.0, 0.3),
        )
    ]
    found = answer(rows)
    assert [place.best["speedup"] for place in found.places] == [1.2, 5.0]
    assert found.top.best["speedup"] == 1.2
    assert found.winner(found.top).endswith("; 1 noisy run above it: measure again")
    assert found.winner(found.places[1]).endswith(
        "; noisy: the speedup spreads over 40% between repeats"
    )


def test_the_page_answers_with_the_interval_and_what_was_held_constant():
    same = {"target__name": "tiny", "batch__size": 8, "speedup_wall": 1.1}
    rows = [
        done(gamma, draft__gamma=gamma, speedup=s, **same)
        | {
            "speedup_ci95/low": s - 0.1,
            "speedup_ci95/high": s + 0.1,
        }
        for gamma, s in ((1, 1.2), (2, 1.5))
    ]
    html = page.html_page(rows, "a page")
    best = (
        "draft.gamma=2 is the fastest, <b>1.50x per row (95% interval 1.40x to 1.60x) and 1.10x per"
        " batch</b>"
    )
    assert best in html
    assert "Held constant: target.name tiny, batch.size 8. Measure: time per output token" in html
    drawn = rows[0] | {"acceptance/source": "synthetic", "speedup": 9.0}
    assert answer([*rows, drawn]).top.best["speedup"] == 1.5, "what was drawn is no answer"


@browser
def test_several_targets_and_predictions_are_apart(look):
    rows = rows_of("batch__size", (1, 2, 4), target__name="tiny", scenario__name="compare")
    rows += [
        done(10 + i, target__name="large", scenario__name="predict", **{"predicted/speedup": 3.0})
        for i in (1, 2)
    ]
    rows += [done(20, target__name="large", scenario__name="compare", speedup=9.0)]
    assert look(rows, "numShown()", "(set({ 'pick:target.name': '' }), numShown())") == [3, 4]


def test_what_is_slower_than_autoregressive_is_not_recommended():
    speeds = {"speculative/tokens_per_second": 88.0, "autoregressive/tokens_per_second": 100.0}
    speeds |= {"speedup_ci95/low": 0.85, "speedup_ci95/high": 0.91}
    html = page.html_page(
        [done(i, draft__gamma=i, speedup=0.88, speedup_wall=0.8, **speeds) for i in (1, 2)],
        "a page",
    )
    assert "autoregressive, 100 tokens/s" in html
    assert "<b>0.88x per row (95% interval 0.85x to 0.91x) and 0.80x per batch</b>" in html
    assert "; autoregressive decoding is faster" in html


@browser
def test_a_run_under_load_is_one_run_with_a_line_over_its_levels(look, tmp_path):
    write_load(tmp_path / "runs", {1: (100.0, 150.0), 2: (180.0, 240.0), 8: (500.0, 450.0)})
    panels, said, load, words, has_null = look(
        read_rows(tmp_path / "runs"),
        "shownPanels()",
        "text('answer')",
        "[numMarks('chart3', 'line'), numMarks('chart3', 'symbol')]",
        "text('chart3')",
        "document.querySelector('main').textContent.includes('null')",
    )
    assert panels == ["fastest", "chart1", "chart3", "pareto", "runs"]
    assert load == [2, 6]
    assert "1.50x per row (95% interval 1.40x to 1.60x) and 1.25x per level" in said
    assert "load.concurrency" in words
    assert not has_null


@browser
def test_what_a_run_has_generated_is_shown_by_round(look, tmp_path):
    rounds = [
        {"proposed": 0, "accepted": [], "bonus": "<b>"},
        {"proposed": 2, "accepted": [" c", "at\u202e"], "bonus": "."},
    ]
    for name, number in (("one", 2), ("two", 1)):
        sample = {
            "row": 0,
            "prompt_end": f"prompt of {name} ",
            "speculative": "",
            "rounds": rounds[:number],
        }
        (tmp_path / name).mkdir()
        (tmp_path / name / "samples.jsonl").write_text(json.dumps(sample))
    rows = [
        done(i, folder=str(tmp_path / name), draft__gamma=i)
        for i, name in enumerate(("one", "two", "none"))
    ]
    first, other, accepted, chosen = look(
        rows,
        "document.querySelector('#generated .text').textContent",
        "(pick('run', 'run0'), document.querySelector('#generated .text').textContent)",
        "[...document.querySelectorAll('#generated .accepted')].map((s) =>"
        " s.textContent).join('|')",
        "$('run').options.length",
    )
    assert first == "prompt of two <b>", "the newest run first"
    assert other == "prompt of one <b> cat\\u{202e}."
    assert accepted == "| cat\\u{202e}"
    assert chosen == 2, "runs with text alone"
