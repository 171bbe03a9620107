import json
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from magicdec.config.choices import ModelChoice
from magicdec.config.registry import POLICIES
from magicdec.costmodel.acceptance import Curves, Point, _interpolate, measured, published_points
from magicdec.costmodel.hardware import hardware_named
from magicdec.costmodel.round import Setup
from magicdec.costmodel.targets import architecture
from magicdec.drafts.model import IndependentModel
from magicdec.drafts.ngram import PromptLookup
from magicdec.drafts.self import SelfSpeculation
from magicdec.tracking.reader import iter_runs


def point(budget=512, context=8000, alpha=0.8, **changes):
    defaults = {
        "target": "t",
        "draft": "self",
        "policy": "streaming",
        "task": "pg19",
        "source": "s",
    }
    return Point(budget=budget, context_len=context, alpha=alpha, **(defaults | changes))


def asked(
    target="t",
    policy="streaming",
    budget=512,
    context=8000,
    draft="self",
    quantization="none",
    **keys,
):
    choice = SelfSpeculation(quantization=quantization)
    if draft != "self":
        own = ModelChoice(draft, architecture=architecture("llama-3.2-1b"))
        choice = IndependentModel(model=own, quantization=quantization)
    model, machine = architecture("llama-3.1-8b"), hardware_named("h100")
    return Setup(
        model, machine, 1, context, choice, POLICIES[policy].facts(budget=budget, **keys), target
    )


def alpha(curves, **changes):
    estimate = curves.estimate(asked(**changes))
    return estimate and estimate.alpha


CONTEXTS = [point(context=4000, alpha=0.84), point(context=16000, alpha=0.80)]
# The last one is known at another context alone.
BUDGETS = [point(256, alpha=0.7), point(1024, alpha=0.8), point(4096, context=4000, alpha=0.9)]
# Alpha does not grow with the context.
NOISE = [point(context=4000, alpha=0.80), point(context=8000, alpha=0.84)]
WEIGHTS = [point(alpha=0.8), point(alpha=0.6, quantization="int4")]


@pytest.mark.parametrize(
    ("points", "at", "expected"),
    [
        (CONTEXTS, {"context": 4000}, 0.84),
        (CONTEXTS, {"context": 4096}, 0.84),  # within 5%
        (CONTEXTS, {"context": 8000}, pytest.approx(0.82)),  # halfway in log context
        (CONTEXTS, {"context": 3000}, None),
        (CONTEXTS, {"context": 20000}, None),
        (CONTEXTS, {"budget": 1024}, None),
        (CONTEXTS, {"policy": "snapkv"}, None),
        (BUDGETS, {"budget": 512}, pytest.approx(0.75)),
        (BUDGETS, {"budget": 2048}, None),
        (NOISE, {"context": 4000}, pytest.approx(0.82)),
        (NOISE, {"context": 8000}, pytest.approx(0.82)),
        (WEIGHTS, {}, 0.8),
        (WEIGHTS, {"quantization": "int4"}, 0.6),
        (WEIGHTS, {"quantization": "int8"}, None),
        ([], {}, None),
        # A view of everything accepts everything, unless its weights or its entries are quantized.
        ([], {"budget": 8000}, 1.0),
        ([], {"policy": "full"}, 1.0),
        ([], {"policy": "quantized"}, None),
        *(([], {"policy": "full", "quantization": name}, None) for name in ("int8", "int4")),
        *(([], {"budget": 8000, "quantization": name}, None) for name in ("int8", "int4")),
    ],
)
def test_points_are_known_and_between_them_acceptance_is_monotone_and_bounded(points, at, expected):
    assert alpha(Curves(points), **at) == expected


def test_new_tokens_evict_old_ones_from_a_budget_for_the_prompt():
    nothing = Curves([])
    assert nothing.estimate(asked(budget=8000), generate_len=1) is None
    assert nothing.estimate(asked(budget=8064), generate_len=64).alpha == 1.0


def test_a_sliding_window_holds_in_every_cache():
    """tests/decoding/test_lossless.py decodes with such models: with a budget for everything all is
    accepted.
    """
    model = replace(
        architecture("mistral-7b-v0.3"), sliding_window=4096, sliding_layers=tuple(range(32))
    )
    for policy in ("full", "streaming", "quest"):
        assert Curves([]).estimate(asked(policy=policy, budget=8000).at(target=model)).alpha == 1.0


def run(alpha, quantization="none", policy="quantized", draft="self", **cache):
    cache = vars(POLICIES[policy].facts(budget=512)) | cache
    config = {
        "target": {"name": "t"},
        "draft": {"name": draft, "quantization": quantization},
        "cache": cache,
    }
    config |= {"batch": {"context_len": 8000}, "data": {"name": "stdlib"}}
    result = {
        "status": "done",
        "acceptance/source": "measured",
        "alpha": alpha,
        "folder": f"runs/{alpha}",
    }
    return result | {"config": config}


@pytest.mark.parametrize(
    ("policy", "key", "values"),
    [
        ("quantized", "group_size", (8, 4)),
        ("quest", "page_size", (8, 16)),
        ("snapkv", "observation_window", (32, 16)),
        ("pyramidkv", "beta", (20, 10)),
        ("verify_guided", "refresh", (1, 4)),
        ("streaming", "num_sink", (0, 4)),
    ],
)
def test_runs_with_other_settings_of_the_policy_have_another_curve(policy, key, values):
    runs = [
        run(alpha, policy=policy, **{key: value})
        for alpha, value in zip((0.9, 0.6), values, strict=True)
    ]
    curves = Curves(measured(runs), "stdlib")
    for expected, value in zip((0.9, 0.6), values, strict=True):
        assert alpha(curves, policy=policy, **{key: value}) == expected
    assert alpha(curves, policy=policy, **{key: 2}) is None


def test_runs_of_quantized_drafts_are_known_by_their_weights():
    curves = Curves(measured([run(0.9), run(0.5, "int4")]), "stdlib")
    assert alpha(curves, policy="quantized") == 0.9
    assert alpha(curves, policy="quantized", quantization="int4") == 0.5


def test_runs_of_a_draft_without_a_cache_are_known_whatever_cache_they_name():
    known = Curves(measured([run(0.7, policy="h2o", draft="ngram")]))
    assert (
        known.estimate(asked(policy="streaming", budget=99).at(draft=PromptLookup())).alpha == 0.7
    )
    assert known.estimate(asked(policy="h2o")) is None, "of self-speculation"


def test_runs_of_a_folder_are_evidence_for_others_of_its_name():
    """The acceptance of weights elsewhere is an assumption, that of the same folder is none."""
    one = run(0.7, policy="streaming")
    one["config"]["target"] = {"name": "llama-3.1-8b", "path": "/data/one"}
    curves, named = Curves(measured([one])), asked("llama-3.1-8b")
    for path, note in [
        ("/data/one", ""),
        ("/data/two", ", assuming that llama-3.1-8b (two) accepts as llama-3.1-8b (one) does"),
        (None, ", assuming that llama-3.1-8b accepts as llama-3.1-8b (one) does"),
    ]:
        found = curves.estimate(named.at(target_path=path))
        assert (found.alpha, found.source) == (0.7, f"run 0.7, on stdlib{note}")


def test_the_same_text_comes_first_then_own_runs():
    points = [
        point(alpha=0.8),
        point(alpha=0.7, task="ruler-cwe"),
        point(alpha=0.6, measured=True, task="stdlib"),
    ]
    assert (
        alpha(Curves(points))
        == alpha(Curves(points, "stdlib"))
        == alpha(Curves(points, "unheard of"))
        == 0.6
    )
    assert alpha(Curves(points, "pg19")) == 0.8
    assert alpha(Curves(points, "ruler-cwe")) == 0.7
    assert alpha(Curves([*points, point(alpha=0.5, measured=True)], "pg19")) == 0.5
    sampled = [point(budget, alpha=0.5, task="text at temperature 0.7") for budget in (512, 1024)]
    assert alpha(Curves([*sampled, point(alpha=0.9, task="text")], "stdlib")) == 0.9
    assert (
        alpha(Curves([*sampled, point(alpha=0.9, task="text")], "stdlib at temperature 0.7")) == 0.5
    )
    known = [one for one in published_points() if one.task.startswith("ruler-qa-")]
    assert known, "the paper has two such tasks"
    one = known[0]
    of_one = asked(one.target, one.policy, one.budget, one.context_len, one.draft)
    assert "on ruler-qa-" in Curves(published_points(), "ruler-qa").estimate(of_one).source


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
    curves = Curves(published_points())
    stated = curves.estimate(asked("llama-3.1-8b", "streaming", 512, 32_000))
    assert stated.alpha == 0.81
    assert "2408.11049" in stated.source
    # Implied by table 6: Omega = 3.41 at gamma 3.
    assert 0.87 < curves.estimate(asked("llama-3.1-8b", "snapkv", 2049, 32_000)).alpha < 0.92
    assert curves.estimate(asked("llama-3.1-8b", "streaming", 512, 2000)) is None


def test_what_the_paper_states_is_what_its_tables_imply():
    from magicdec.config.omega import alpha_from_acceptance_length
    from magicdec.costmodel.tables import read_table

    for row in read_table():
        if row.table == "3c":
            stated = Curves(published_points()).estimate(row.setup(architecture)).alpha
            assert alpha_from_acceptance_length(row.omega, row.gamma) == pytest.approx(
                stated, abs=0.025
            )


def test_runs_are_read_from_the_store(tmp_path):
    config = {
        "target": {"name": "t"},
        "draft": {"name": "self", "model": None},
        "batch": {"context_len": 8000},
    }
    config |= {
        "cache": {"policy": "streaming", "budget": 512, "num_sink": 0},
        "scenario": {"name": "compare"},
    }
    config |= {"data": {"name": "ruler", "task": "vt"}, "sampling": {"temperature": 0}}
    sampled = config | {"sampling": {"temperature": 0.6}}
    odd = {key: {"name": "x", "model": None} for key in ("draft", "target", "scenario")}
    result = {"status": "done", "acceptance/source": "measured"}
    runs = {
        "done": (config, result | {"alpha": 0.7}),
        "sampled": (sampled, result | {"alpha": 0.4}),
        "synthetic": (config, result | {"acceptance/source": "synthetic", "alpha": 0.9}),
        "failed": (config, {"status": "failed"}),
        "odd": (odd | {"data": {}, "cache": {"policy": "x"}}, result | {"alpha": 0.4}),
    }
    for name, (config, result) in runs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(config))
        (tmp_path / name / "result.json").write_text(json.dumps(result))
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "result.json").write_text('{"status": "do')
    points = measured(iter_runs(tmp_path))
    greedy, sampled = (
        Curves(points, f"ruler-vt{ending}") for ending in ("", " at temperature 0.6")
    )
    assert (alpha(greedy), alpha(sampled)) == (0.7, 0.4)
    assert greedy.estimate(asked()).source == "run done, on ruler-vt"
    assert measured(iter_runs(tmp_path / "nowhere")) == []
