import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.costmodel.acceptance import Curves, Point, _interpolate, measured, published
from magicdec.tracking.reader import iter_runs


def point(budget=512, context=8000, alpha=0.8, **changes):
    defaults = {"target": "t", "draft": "self", "policy": "streaming", "task": "pg19", "source": "s"}
    return Point(budget=budget, context_len=context, alpha=alpha, **(defaults | changes))


def alpha(curves, budget=512, context=8000, policy="streaming", **changes):
    estimate = curves.estimate("t", "self", policy, budget, context, **changes)
    return estimate and estimate.alpha


def test_known_points_are_returned_as_they_are():
    curves = Curves([point(context=4000, alpha=0.84), point(context=8000, alpha=0.83)])
    assert alpha(curves, context=4000) == 0.84
    assert alpha(curves, context=4096) == 0.84  # within 5%


def test_between_points_it_is_monotone_and_bounded():
    curves = Curves([point(context=4000, alpha=0.84), point(context=16000, alpha=0.80)])
    assert alpha(curves, context=8000) == pytest.approx(0.82)  # halfway in log context


def test_beyond_the_points_there_is_none():
    curves = Curves([point(context=4000), point(context=16000)])
    assert alpha(curves, context=3000) is None
    assert alpha(curves, context=20000) is None
    assert alpha(curves, budget=1024) is None
    assert alpha(curves, policy="snapkv") is None
    assert alpha(Curves([])) is None


def test_budgets_are_interpolated_where_the_context_is_known():
    curves = Curves([point(256, alpha=0.7), point(1024, alpha=0.8), point(4096, context=4000, alpha=0.9)])
    assert alpha(curves, budget=512) == pytest.approx(0.75)
    assert alpha(curves, budget=2048) is None  # budget 4,096 is known at another context alone


def test_noise_is_pooled_away():
    curves = Curves([point(context=4000, alpha=0.80), point(context=8000, alpha=0.84)])
    assert alpha(curves, context=4000) == alpha(curves, context=8000) == pytest.approx(0.82)


def test_a_view_of_everything_accepts_everything():
    assert alpha(Curves([]), budget=8000) == 1.0
    assert alpha(Curves([]), policy="full") == 1.0
    assert alpha(Curves([]), policy="quantized") is None


def test_the_same_text_comes_first_then_own_runs():
    points = [point(alpha=0.8), point(alpha=0.7, task="ruler-cwe"), point(alpha=0.6, measured=True, task="stdlib")]
    assert alpha(Curves(points)) == alpha(Curves(points, "stdlib")) == alpha(Curves(points, "unheard of")) == 0.6
    assert alpha(Curves(points, "pg19")) == 0.8
    assert alpha(Curves(points, "ruler-cwe")) == 0.7
    assert alpha(Curves([*points, point(alpha=0.5, measured=True)], "pg19")) == 0.5
    known = [one for one in published() if one.task.startswith("ruler-qa-")]
    assert known, "the paper has two such tasks"
    found = Curves(published(), "ruler-qa").estimate(*known[0][:5])
    assert "on ruler-qa-" in found.source


@given(
    st.lists(st.tuples(st.integers(64, 100_000), st.floats(0, 1)), min_size=1, max_size=8),
    st.lists(st.integers(64, 100_000), min_size=2, max_size=2),
    st.booleans(),
)
def test_interpolation_never_turns_around_nor_leaves_its_points(points, at, rising):
    low, high = (_interpolate(points, size, rising) for size in sorted(at))
    values = [value for _, value in points]
    for result in (low, high):
        assert result is None or min(values) - 1e-9 <= result <= max(values) + 1e-9
    if low is not None and high is not None:
        assert (high - low) * (1 if rising else -1) >= -1e-9


def test_the_papers_acceptances():
    curves = Curves(published())
    stated = curves.estimate("llama-3.1-8b", "self", "streaming", 512, 32_000)
    assert stated.alpha == 0.81
    assert "2408.11049" in stated.source
    # Implied by table 6: Omega = 3.41 at gamma 3.
    implied = curves.estimate("llama-3.1-8b", "self", "snapkv", 2049, 32_000)
    assert 0.87 < implied.alpha < 0.92
    assert curves.estimate("llama-3.1-8b", "self", "streaming", 512, 2000) is None


def test_what_the_paper_states_is_what_its_tables_imply():
    from magicdec.costmodel.speedup import alpha_from_acceptance_length
    from magicdec.costmodel.tables import read_table

    for row in read_table():
        if row.table == "3c":
            stated = (
                Curves(published()).estimate(row.target, row.draft, row.policy, row.kv_budget, row.context_len).alpha
            )
            assert alpha_from_acceptance_length(row.omega, row.gamma) == pytest.approx(stated, abs=0.025)


def test_runs_are_read_from_the_store(tmp_path):
    config = (
        "target: {name: t}\ndraft: {name: self, model: null}\ncache: {policy: streaming, budget: 512}\n"
        "batch: {context_len: 8000}\ndata: {name: ruler, task: vt}\nsampling: {temperature: TEMPERATURE}\n"
    )
    results = {
        "done": {"status": "done", "acceptance/source": "measured", "alpha": 0.7},
        "sampled": {"status": "done", "acceptance/source": "measured", "alpha": 0.4},
        "synthetic": {"status": "done", "acceptance/source": "synthetic", "alpha": 0.9},
        "failed": {"status": "failed"},
    }
    for name, result in results.items():
        temperature = 0.6 if name == "sampled" else 0
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text(config.replace("TEMPERATURE", str(temperature)))
        (folder / "result.json").write_text(json.dumps(result))
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "result.json").write_text('{"status": "do')
    points = measured(iter_runs(tmp_path))
    greedy, sampled = (Curves(points, f"ruler-vt{ending}") for ending in ("", " at temperature 0.6"))
    assert (alpha(greedy), alpha(sampled)) == (0.7, 0.4)
    assert greedy.estimate("t", "self", "streaming", 512, 8000).source == "run done, on ruler-vt"
    assert measured(iter_runs(tmp_path / "nowhere")) == []
