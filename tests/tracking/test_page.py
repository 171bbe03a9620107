"""The page in a real browser: charts are drawn, filters work, what must not mix is apart, nothing is fetched."""

import json
import re
import shutil
import subprocess

import pytest

from magicdec.tracking.report import page
from magicdec.tracking.report.rows import read_rows
from tests.tracking.stores import write_load, write_store

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync", "--virtual-time-budget=5000", "--dump-dom"]
NUMBER = 400
browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")
# Marks of one kind in one chart, such as numMarks("steps", "bar", "rect"); and what the tests look at.
HELPERS = """
const wait = () => new Promise((done) => setTimeout(done, 300));
const numMarks = (id, mark, tag) => document.querySelectorAll(`#${id} g[aria-label="${mark}"] ${tag}`).length;
const text = (id) => document.getElementById(id).textContent;
const shownPanels = () => [...document.querySelectorAll("article")].filter((a) => !a.hidden).map((a) => a.id);
const pick = (id, value) => { const s = $(id); s.value = value; s.dispatchEvent(new Event("change")); };
const styleOf = (selector) => getComputedStyle(document.querySelector(selector));
const numShown = () => Number(document.body.dataset.shown);
"""
FIXED = {"overhead_ms": 5.0, "round_ms": 35.0, "target_decode_ms": 10.0, "draft_ms": 5.0, "verify_ms": 20.0}


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    write_store(folder / "runs", NUMBER)
    return page.html_page(read_rows(folder / "runs"), title="runs <b>")


@pytest.fixture
def look(tmp_path):
    """What JavaScript expressions give, one after the other, in the page of some rows (or in a page)."""

    def in_browser(rows, *expressions, state=""):
        path, html = tmp_path / "page.html", rows if isinstance(rows, str) else page.html_page(rows, "a page")
        steps = "".join(f"found.push({expression}); await wait();" for expression in expressions)
        deed = f"{HELPERS}(async () => {{ const found = []; {steps} document.title = JSON.stringify(found); }})();"
        path.write_text(html.replace("</body>", f"<script>{deed}</script></body>"), encoding="utf-8")
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'user'}", f"file://{path}{state and '#' + state}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        title = re.search(r"<title>(.*?)</title>", done.stdout, re.S)[1]
        return json.loads(title.replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))

    return in_browser


def done(number, **values):
    """A row of a run that is done; double underscores are dots."""
    return {"id": f"run{number}", "status": "done"} | {key.replace("__", "."): v for key, v in values.items()}


def rows_of(key, values, **others):
    return [done(i, **{key: value}, speedup=0.8 + i / 10, **others) for i, value in enumerate(values)]


def test_the_page_is_self_contained(html):
    ours = re.sub(r'<script (type="application/json"|data-from).*?</script>', "", html, flags=re.S)
    assert not re.search(r"(src|href)=|@import|url\(|https?://", ours)
    assert html.count("<script data-from=") == 2
    assert "Copyright 2010-2026 Mike Bostock" in ours
    assert "Observable, Inc." in ours
    assert "runs &lt;b&gt;" in html
    assert not re.search(r"/\*[A-Z0-9]+\*/", ours)


@pytest.mark.parametrize("rates", [(float("nan"), 0.5), (float("inf"), float("inf"))])
def test_values_that_are_no_numbers_do_not_break_the_page(rates):
    """JSON has no NaN: a browser would read nothing at all."""
    html = page.html_page([done(i, acceptance_rate=rate) for i, rate in enumerate(rates)], "a page")

    def refuse(word):
        raise AssertionError(word)

    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1]
    column = json.loads(data, parse_constant=refuse)["columns"]["acceptance_rate"]
    assert column in ({"values": [None, 0.5]}, {"constant": None})


@browser
def test_charts_are_drawn(look, html):
    found = look(
        html,
        "shownPanels()",
        "numMarks('overview', 'cell', 'rect')",
        "[numMarks('pareto', 'dot', 'circle'), numMarks('acceptances', 'line', 'path')]",
        "[numMarks('steps', 'bar', 'rect'), numMarks('steps', 'tick', 'line')]",
        "text('prediction')",
        "document.querySelectorAll('#fastest button').length",
        "document.querySelector('main').innerHTML.includes('NaN')",
        "performance.getEntriesByType('resource').length",
        "['--plot-background', '--card'].map((v) => styleOf('#pareto svg').getPropertyValue(v))",
        "numShown()",
        "(set({ 'pick:acceptance/source': '' }), [numShown(), text('runs').includes('synthetic')])",
    )
    (
        panels,
        cells,
        (dots, curves),
        (parts, marks),
        prediction,
        copied,
        is_nan,
        fetched,
        (tip, card),
        shown,
        everything,
    ) = found
    assert panels == ["overview", "pareto", "acceptances", "prediction", "steps", "fastest", "runs"], "none under load"
    assert cells == 5 * 5, "contexts x measured batches"
    assert dots > 300
    assert curves == 3, "policies"
    assert (parts, marks) == (3 * 2 * 5, 2 * 5), "parts of a round, measured and predicted, by batch"
    assert "cost model: median error" in prediction
    assert re.search(r"The cost model's median errors: T_T \d.*%, T_V 5%, round time ", prediction)
    assert "measured speedup" in prediction
    assert copied == 5 * 5
    assert (is_nan, fetched) == (False, 0)
    assert tip == card, "tips are as dark as the page"
    assert 0 < shown < NUMBER, "drawn acceptance is apart"
    assert everything == [NUMBER, True], "unless one asks for it"


@browser
def test_filters(look, html):
    found = look(
        html,
        "[numShown(), numMarks('overview', 'cell', 'rect')]",
        "($('where').value = 'budget=64', $('where').dispatchEvent(new Event('input')))",
        "numShown()",
        "(pick('pick:cache.policy', 'snapkv'), numShown())",
        "(document.querySelector('#runs th[data-key=\"batch.size\"]').click(), text('runs').includes('batch.size ↓'))",
        "(set({ where: 'bugdet=4' }), [text('mistake'), $('where').className])",
        "(set({ where: 'speedup>abc' }), text('mistake'))",
        "($('clear').click(), numShown())",
        "document.querySelector('#overview a').dispatchEvent(new MouseEvent('click', { bubbles: true }))",
        "[numShown(), state.where]",
        state="where=cache.budget%3D128+speedup%3E1&x=draft.gamma",
    )
    (some, cells), _, typed, both, is_sorted, mistake, no_number, cleared, _, (clicked, where) = found
    assert 0 < some < cleared / 4
    assert 0 < cells <= 5 * 4, "contexts x gammas"
    assert 0 < both < typed < cleared < NUMBER
    assert is_sorted
    assert mistake == ["bugdet: the runs do not differ in it, or have no such key", "wrong"]
    assert no_number == "speedup>abc: abc is not a number"
    assert 0 < clicked < cleared / 10, "a cell's runs alone"
    assert re.fullmatch(r"draft\.gamma=\d+ batch\.context_len=\d+|batch\.size=\d+ batch\.context_len=\d+", where)


@browser
def test_panels_without_anything_to_show_take_no_room(look):
    rows = [{"id": "a", "status": "failed", "reason": "why"}, {"id": "b", "status": "done"}]
    assert look(rows, "shownPanels()", "numShown()") == [["runs"], 2]


@browser
def test_one_swept_axis_is_a_line(look):
    rows = rows_of("draft__gamma", (1, 2, 4), speedup_min=0.75, speedup_max=1.05, **{"predicted/speedup": 1.3})
    cells, lines, rules, words, interval = look(
        rows,
        "numMarks('overview', 'cell', 'rect')",
        "[...document.querySelectorAll('#overview g[aria-label=line] path')].map((p) => p.getAttribute('stroke'))",
        "numMarks('overview', 'rule', 'line')",
        "text('overview')",
        "ends('speedup', 1)",
    )
    assert interval == [0.75, 1.05], "the least and the greatest repeat, not the same on both sides of the median"
    assert cells == 0
    assert len(lines) == len(set(lines)) == 2, "measured and predicted, in colours of their own"
    assert rules == 1 + 3, "the break-even, and an interval over the repeats of each run"
    assert "measured" in words
    assert "predicted" in words


@browser
def test_the_parts_of_a_round_are_those_that_were_timed(look):
    """A choice of entries is part of what was timed, or is made once per sequence: it is never added."""
    h2o = {f"time/{name}": value for name, value in FIXED.items()} | {"time/select_ms": 23_000.0}
    h2o |= {"acceptance_length": 2.0}
    quest = {f"predicted/{name}": value for name, value in FIXED.items()} | {"predicted/select_ms": 1.0}
    quest |= {"predicted/speedup": 2.0}
    impossible = h2o | {"speedup": 1.1, "time/overhead_ms": -100.0, "time/round_ms": 30.0}
    rows = [done(0, cache__policy="h2o", **h2o), done(1, cache__policy="quest", **quest)]
    rows += [done(2, cache__policy="topk", **impossible)]
    parts, tokens, bars, words, marked = look(
        rows,
        "[round(0, 'time').parts, round(1, 'predicted').parts]",
        "[round(0, 'time').tokens, round(1, 'predicted').tokens, round(1, 'time')]",
        "numMarks('steps', 'bar', 'rect')",
        "text('steps')",
        "text('runs')",
    )
    assert parts == [{"drafting": 10, "verification": 20, "rest of the round": 5}] * 2
    assert tokens == [2.0 * 10, 2.0 * 35, None]
    assert bars == 3 * 3
    assert "In 1 run the parts take longer than the whole round" in words
    assert marked.count("impossible times") == 1


@browser
def test_published_values_are_not_called_measured(look):
    values = {"predicted/speedup": 1.5, "published/speedup": 1.4, "published/predicted_speedup": 1.6}
    rows = [done(i, batch__size=size, **values) for i, size in enumerate((8, 32))]
    prediction, fastest = look(rows, "text('prediction')", "text('fastest')")
    assert "published speedup" in prediction
    assert "measured speedup" not in prediction
    assert "median error 14.3%" in prediction
    assert "best predicted speedup" in fastest


@browser
def test_what_is_assumed_is_not_recommended(look):
    """The largest alpha of a sweep over it is no configuration that one could choose."""
    rows = [
        done(10 * alpha + gamma, scenario__alpha=alpha / 10, cache__budget=gamma, **{"predicted/speedup": speedup})
        for alpha, gamma, speedup in ((6, 1, 1.1), (6, 2, 1.2), (9, 1, 1.9), (9, 2, 1.8))
    ]
    (lines,) = look(rows, "[...document.querySelectorAll('#fastest tr')].slice(1).map((row) => row.innerText)")
    assert [line.split()[:4] for line in lines] == [
        ["0.6", "speculative", "1.20x", "2"],
        ["0.9", "speculative", "1.90x", "1"],
    ]


@browser
def test_several_targets_and_predictions_are_apart(look):
    rows = rows_of("batch__size", (1, 2, 4), target__name="tiny", scenario__name="compare")
    rows += [done(10 + i, target__name="large", scenario__name="predict", **{"predicted/speedup": 3.0}) for i in (1, 2)]
    rows += [done(20, target__name="large", scenario__name="compare", speedup=9.0)]
    shown, tiles, asked = look(rows, "numShown()", "text('tiles')", "(set({ 'pick:target.name': '' }), numShown())")
    assert (shown, asked) == (3, 4)
    assert "3 of 6" in tiles


@browser
def test_what_is_slower_than_autoregressive_is_not_recommended(look):
    speeds = {"speculative/tokens_per_second": 88.0, "autoregressive/tokens_per_second": 100.0}
    rows = [done(i, draft__gamma=i, speedup=0.88, speedup_wall=0.8, **speeds) for i in (1, 2)]
    fastest, tiles = look(rows, "text('fastest')", "text('tiles')")
    assert "autoregressive, 100 tokens/s" in fastest
    assert "0.88x" in fastest
    assert "0.88x per row and 0.80x per batchat best: autoregressive is faster everywhere" in tiles


@browser
def test_a_run_under_load_is_one_run_with_a_line_over_its_levels(look, tmp_path):
    write_load(tmp_path / "runs", {1: (100.0, 150.0), 2: (180.0, 240.0), 8: (500.0, 450.0)})
    panels, tiles, load, cells, has_null = look(
        read_rows(tmp_path / "runs"),
        "shownPanels()",
        "text('tiles')",
        "[numMarks('underload', 'line', 'path'), numMarks('underload', 'dot', 'circle'), text('underload')]",
        "numMarks('overview', 'cell', 'rect')",
        "document.querySelector('main').textContent.includes('null')",
    )
    assert panels == ["overview", "pareto", "underload", "fastest", "runs"]
    assert "1 of 1" in tiles
    assert load[:2] == [2, 6]
    assert "1.50x per row and 1.25x per level" in tiles
    assert "load.concurrency" in load[2]
    assert (cells, has_null) == (0, False)


@browser
def test_what_a_run_has_generated_is_shown_by_round(look, tmp_path):
    rounds = [
        {"proposed": 0, "accepted": [], "bonus": "<b>"},
        {"proposed": 2, "accepted": [" c", "at\u202e"], "bonus": "."},
    ]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        sample = {
            "row": 0,
            "prompt_end": f"prompt of {name} ",
            "speculative": "",
            "rounds": rounds[: 2 if name == "one" else 1],
        }
        (tmp_path / name / "samples.jsonl").write_text(json.dumps(sample))
    rows = [done(i, folder=str(tmp_path / name), draft__gamma=i) for i, name in enumerate(("one", "two", "none"))]
    first, other, accepted, chosen = look(
        rows,
        "document.querySelector('#generated .text').textContent",
        "(pick('run', 'run0'), document.querySelector('#generated .text').textContent)",
        "[...document.querySelectorAll('#generated .accepted')].map((s) => s.textContent).join('|')",
        "$('run').options.length",
    )
    assert first == "prompt of two <b>", "the newest run first"
    assert other == "prompt of one <b> cat\\u{202e}."
    assert accepted == "| cat\\u{202e}"
    assert chosen == 2, "runs with text alone"
