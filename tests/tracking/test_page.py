"""The page in a real browser: plots are drawn, filters work, nothing is fetched."""

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


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    write_store(folder / "runs", NUMBER)
    return page.render(read_rows(folder / "runs"), title="runs <b>")


@pytest.fixture
def show(html, tmp_path):
    """The page's elements after its script, and perhaps a person's deed, have run."""

    def in_browser(state="", deed=""):
        path = tmp_path / "page.html"
        path.write_text(html.replace("</body>", f"<script>{deed}</script></body>"), encoding="utf-8")
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'user'}", f"file://{path}{state and '#' + state}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return without_scripts(done.stdout)

    return in_browser


def without_scripts(text):
    return re.sub(r"<script.*?</script>", "", text, flags=re.S)


def plot(dom, name):
    return re.search(rf'<div id="{name}".*?</div>', dom, re.S)[0]


def shown(dom):
    return int(re.search(r'data-shown="(\d+)"', dom)[1])


def test_the_page_is_self_contained(html):
    outside = re.sub(r'<script type="application/json".*?</script>', "", html, flags=re.S)
    assert not re.search(r"(src|href)=|@import|url\(|https?://", outside)
    assert "runs &lt;b&gt;" in html
    assert "/*" not in without_scripts(html)


@browser
def test_plots_are_drawn(show):
    dom = show()
    assert plot(dom, "heatmap").count('class="cell"') == 5 * 5, "contexts x measured batches"
    assert plot(dom, "pareto").count('class="dots"') == 4, "autoregressive, and three policies"
    assert plot(dom, "acceptances").count('class="front"') == 3
    assert re.search(r'data-points="3\d\d"', plot(dom, "prediction"))
    assert plot(dom, "steps").count('class="part"') == 3 * 5, "the parts of a round, by measured batch"
    assert plot(dom, "steps").count('class="mark-line"') == 5
    assert dom.count("python launch.py batch.size=") == 5 * 5
    assert "NaN" not in dom
    assert '<article id="loads" hidden="">' in dom, "nothing ran under load"


@browser
def test_measured_and_synthetic_runs_are_apart_unless_one_asks(show):
    dom = show()
    assert 0 < shown(dom) < NUMBER
    assert "synthetic acceptance</span>" not in plot(dom, "fastest")
    both = show("pick%3Aacceptance%2Fsource=")
    assert shown(both) == NUMBER
    assert 'class="mark">synthetic' in both


@browser
def test_filters_in_the_address(show):
    dom = show("where=cache.budget%3D128+speedup%3E1&x=draft.gamma")
    assert 0 < shown(dom) < shown(show()) / 4
    assert plot(dom, "heatmap").count('class="cell"') <= 5 * 4
    assert ">draft.gamma</text>" in plot(dom, "heatmap")


@browser
def test_filters_by_hand(show):
    typed = "const w = $('where'); w.value = 'budget=64'; w.dispatchEvent(new Event('input'));"
    picked = "const p = $('pick:cache.policy'); p.value = 'snapkv'; p.dispatchEvent(new Event('change'));"
    all_of_it, one = show(deed=typed), show(deed=typed + picked)
    assert 0 < shown(one) < shown(all_of_it) < shown(show())
    clicked = "document.querySelector('#heatmap .cell').dispatchEvent(new Event('click'));"
    assert plot(show(deed=clicked), "heatmap").count('class="cell"') == 1
    sorted_by_batch = "document.querySelector('th[data-key=\"batch.size\"]').click();"
    assert "batch.size ↓" in show(deed=sorted_by_batch)


@browser
def test_a_wrong_filter_is_told(show):
    dom = show(deed="set({ where: 'bugdet=4' });")
    assert "bugdet: the runs do not differ in it" in dom
    assert 'class="wrong"' in dom


@browser
@pytest.mark.parametrize("rows", [[{"id": "a", "status": "failed", "reason": "why"}], [{"id": "a", "status": "done"}]])
def test_a_store_with_nothing_to_plot(rows, tmp_path):
    path = tmp_path / "empty.html"
    path.write_text(page.render(rows, "empty"), encoding="utf-8")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'user'}", f"file://{path}"]
    assert shown(subprocess.run(command, capture_output=True, text=True, timeout=120).stdout) == 1


@browser
def test_predictions_stand_beside_what_is_published(tmp_path):
    """Gamma is the same everywhere, and so no setting; measured runs and predicted ones are in one store."""
    steps = {"target_decode_ms": 4.0, "draft_ms": 1.0, "verify_ms": 5.0}
    predicted = {f"predicted/{name}": value for name, value in steps.items()}
    predicted |= {"predicted/speedup": 1.5, "predicted/gamma": 3, "predicted/alpha": 0.8}
    predicted |= {"published/speedup": 1.4, "published/predicted_speedup": 1.6}
    measured = {f"time/{name}": value for name, value in steps.items()} | {"acceptance_length": 3.0, "gamma": 2}
    runs = [predicted | {"batch.size": 8}, predicted | {"batch.size": 32}, measured | {"batch.size": 64}]
    settings = {f"extra.key_{number}": number for number in range(12)}
    rows = [{"id": str(i), "status": "done", "draft.gamma": 2} | run for i, run in enumerate(runs)]
    rows[2] |= settings | {"acceptance/source": "measured"}
    rows.append({"id": "3", "status": "done", "acceptance/source": "synthetic", "speedup": 9.0, "draft.gamma": 2})
    path = tmp_path / "page.html"
    path.write_text(page.render(rows, "paper"), encoding="utf-8")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'user'}", f"file://{path}"]
    dom = without_scripts(subprocess.run(command, capture_output=True, text=True, timeout=120).stdout)
    assert shown(dom) == 3, "however many settings differ, drawn acceptance stays apart"
    assert "published/predicted_speedup, median error 14.3%" in plot(dom, "prediction")
    assert plot(dom, "steps").count('class="part"') == 3 * 3
    assert plot(dom, "steps").count('class="mark-line"') == 3
    assert "gamma draft steps, T_D each: 3 ms" in plot(dom, "steps"), "at the gamma predicted for"
    assert "2 of 3 runs are predicted" in dom
    assert "no run has been measured" in plot(dom, "fastest")


@browser
def test_throughput_under_load_is_drawn_both_ways(tmp_path):
    write_load(tmp_path / "runs", {1: (100.0, 150.0), 2: (180.0, 240.0), 8: (500.0, 450.0)})
    path = tmp_path / "page.html"
    path.write_text(page.render(read_rows(tmp_path / "runs"), "load"), encoding="utf-8")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'user'}", f"file://{path}"]
    dom = without_scripts(subprocess.run(command, capture_output=True, text=True, timeout=120).stdout)
    drawn = plot(dom, "underload")
    assert drawn.count('data-points="3"') == 2
    assert ">load.concurrency</text>" in drawn
    assert '<article id="loads">' in dom
