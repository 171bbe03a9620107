import re
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import count
from types import SimpleNamespace

import pytest
import yaml

from magicdec.cache.snapkv import SnapKV
from magicdec.cache.streaming import Streaming
from magicdec.config.choices import ModelChoice
from magicdec.config.groups import HardwareConfig
from magicdec.config.options import values_of
from magicdec.costmodel.acceptance import AlphaEstimate, Curves, Point, published_points
from magicdec.costmodel.comparison import warning
from magicdec.costmodel.hardware import hardware_named
from magicdec.costmodel.memory_estimate import memory
from magicdec.costmodel.planned_experiment import experiment_yaml
from magicdec.costmodel.planner import Workload, search
from magicdec.costmodel.prediction import critical_context, predict, predict_generation
from magicdec.costmodel.verdict_words import verdict
from magicdec.drafts.model import IndependentModel
from magicdec.drafts.ngram import PromptLookup
from magicdec.drafts.self import SelfSpeculation
from magicdec.errors import UserError
from magicdec.inputs.rules import parse


def test_a_long_context_pays_and_a_short_one_does_not(setup):
    assert predict(setup(), alpha=0.81).best.speedup > 1.2
    assert predict(setup(context=4000), alpha=0.84).best.speedup < 1


def test_rounds_of_a_lookup_without_a_match_yield_one_token(setup):
    """And a given alpha is that of the others; one of our runs is that of all rounds."""
    none, some = (
        predict(setup(draft=PromptLookup(), match_share=share), (3,), alpha=0.5, generate_len=65)
        for share in (0.0, 0.3)
    )
    assert none.best.speedup < 1
    assert none.best.break_even_alpha is None
    assert some.speedup_wall(some.best) < some.best.speedup
    some = predict(setup(draft=PromptLookup(), match_share=0.3), (3,), alpha=0.5)
    assert some.best.speedup == pytest.approx(some.best.times.speedup(1 + 0.3 * 0.875))
    of_runs = AlphaEstimate(0.5, "runs", is_measured=True)
    known = predict(setup(draft=PromptLookup(), match_share=0.3), (3,), alpha=of_runs)
    assert known.best.speedup == pytest.approx(known.best.times.speedup(1.875))
    own = predict(setup(match_share=0.3), (3,), alpha=0.5)
    assert own.best.speedup == pytest.approx(own.best.times.speedup(1.875)), "a model proposes"


@pytest.mark.parametrize(("generate_len", "cut"), [(32, 1.050), (64, 1.025)])
def test_the_last_round_of_a_row_is_cut_at_its_length(setup, generate_len, cut):
    """A row alone is a batch of one. Omega, of rounds without an end, says 5% more at 32 tokens."""
    prediction = predict(setup(batch=1), (4,), 0.8, generate_len=generate_len)
    at = prediction.best
    endless = predict(setup(batch=1), (4,), 0.8).best
    assert at.speedup == pytest.approx(prediction.speedup_wall(at))
    assert endless.speedup == pytest.approx(cut * at.speedup, rel=0.002)
    assert at.time_per_token_s == pytest.approx(at.times.target.total / at.speedup)


def test_speedup_grows_with_alpha_and_so_does_the_best_gamma(setup):
    predictions = [predict(setup(), alpha=a) for a in (0.5, 0.8, 0.95)]
    assert [p.best.speedup for p in predictions] == sorted(p.best.speedup for p in predictions)
    assert [p.best.gamma for p in predictions] == sorted(p.best.gamma for p in predictions)


def test_the_acceptance_is_looked_up_where_it_is_not_given(setup):
    assert predict(setup(), curves=Curves(published_points())).estimate.alpha == 0.81
    assert predict(setup(), curves=Curves(published_points()), alpha=0.5).estimate.alpha == 0.5


def test_without_acceptance_there_is_a_break_even_and_no_verdict(setup):
    prediction = predict(setup(budget=777), curves=Curves(published_points()))
    assert prediction.best.speedup is None
    assert 0 < prediction.best.break_even_alpha < 1
    at_break_even = predict(setup(budget=777), alpha=prediction.best.break_even_alpha)
    assert at_break_even.best.speedup == pytest.approx(1.0, abs=0.05)
    text = verdict(prediction)
    assert "no acceptance is known" in text
    assert f"{prediction.best.break_even_alpha:.2f}" in text
    assert prediction.known_budgets == (512,)
    assert "(cache.budget=512), or give one, such as scenario.alpha=" in text
    assert predict(setup(budget=512), curves=Curves(published_points())).best.speedup is not None
    nothing = predict(setup(policy="window"), curves=Curves(published_points()))
    assert "Measure it with a run, or give one, such as scenario.alpha=" in verdict(nothing)


def test_the_papers_critical_context(setup):
    critical = critical_context(setup(), gamma=3)
    assert 3000 <= critical <= 5000

    def gain(context):
        speedups = [
            predict(setup(batch=b, context=context), (3,), alpha=0.8).best.speedup
            for b in (32, 256)
        ]
        return speedups[1] - speedups[0]

    assert gain(int(0.97 * critical)) < 0 <= gain(critical)


def test_critical_context_at_its_ends(setup, model):
    # MHA loads so much KV that the batch helps from the start; a tiny draft of few layers has next
    # to none.
    assert critical_context(setup(target="llama-2-7b-32k"), 3) < critical_context(setup(), 3)
    assert critical_context(setup(target="yi-1.5-6b", hardware="8xL40"), 3) is None


@pytest.mark.parametrize("crossing", [*range(60, 200), 4096, 131071])
def test_the_search_for_the_critical_context_ends_wherever_it_lies(setup, monkeypatch, crossing):
    def round_times(one, gamma):
        assert next(calls) < 200, "the search does not end"
        speedup = one.batch * (one.context - crossing)
        return SimpleNamespace(target=SimpleNamespace(total=speedup), round_s=1.0)

    calls = count()
    monkeypatch.setattr("magicdec.costmodel.prediction.round_times", round_times)
    critical = critical_context(setup(), 3)
    assert max(64, crossing) <= critical <= max(64, crossing + 1, 1.01 * crossing)


def test_the_verdict_says_why(setup):
    slow = verdict(
        predict(setup(batch=48, context=4000), (1, 2), curves=Curves(published_points()))
    )
    assert "predicted to run at 0." in slow
    assert "at batch 48, context 4,000" in slow
    assert "S* is" in slow
    fast = verdict(predict(setup(), curves=Curves(published_points())))
    assert "decoding is bound by reading the KV cache" in fast
    assert "does not fit" in verdict(predict(setup(batch=256), curves=Curves(published_points())))
    many = setup(hardware="1xH100", batch=256, context=600)
    assert re.search(
        r"verification takes \d\.\d+ and is compute-bound", verdict(predict(many, (4,), alpha=0.5))
    )


def at_gammas(setup, asked, gammas, generate_len=64):
    """A prediction whose draft.gamma is `asked`; at alpha 0.82, gamma 2 is the best of the first
    three per row, and 1 per batch.
    """
    at = setup(hardware="1xA100", batch=4, context=32_768, budget=256)
    draft = replace(at.draft, gamma=asked)
    return predict(at.at(draft=draft), gammas, alpha=0.82, generate_len=generate_len)


def test_the_verdict_is_that_of_the_gamma_asked_for_and_names_the_best(setup):
    prediction = at_gammas(setup, 5, (1, 2, 5))
    one, two, five = prediction.by_gamma
    assert five.speedup < 1 < one.speedup < two.speedup
    assert prediction.speedup_wall(one) > prediction.speedup_wall(two)

    def both(at):
        return f"{at.speedup:.2f}x per row and {prediction.speedup_wall(at):.2f}x per batch"

    said = verdict(prediction)
    assert said.startswith(
        f"draft.gamma=5 is predicted to run at {both(five)} (does not pay);"
        f" the best per row is gamma 2: {both(two)} (pays in "
    )
    assert f"; the best per batch is gamma 1: {both(one)}: at batch 4" in said


@pytest.mark.parametrize(
    ("asked", "gammas", "generate_len", "begins"),
    [
        (1, (1, 2, 5), 64, "draft.gamma=1, the best per batch, is predicted to run at "),
        (2, (1, 2, 5), 64, "draft.gamma=2, the best per row, is predicted to run at "),
        (5, (5, 8), 64, "draft.gamma=5, the best per row and per batch, is predicted to run at "),
        (3, (1, 2), 64, "gamma 2, the best per row, is predicted to run at "),
        (2, (1, 2), 0, "draft.gamma=2, the best per row, is predicted to run at "),
    ],
)
def test_the_verdict_names_what_is_best_by_which_criterion(
    setup, asked, gammas, generate_len, begins
):
    assert verdict(at_gammas(setup, asked, gammas, generate_len)).startswith(begins)


def test_metrics_are_flat_and_named(setup):
    metrics = predict(setup(), curves=Curves(published_points())).metrics()
    assert metrics["predicted/speedup"] > 1
    parts = [v for k, v in metrics.items() if k.startswith("predicted/target_decode/")]
    assert sum(parts) == pytest.approx(metrics["predicted/target_decode_ms"])
    assert all(k.startswith("predicted/") for k in metrics)
    assert "predicted/speedup/gamma_3" in metrics


@pytest.mark.parametrize(
    ("hardware", "element_bytes", "expected"), [("8xA100", 2, 4), ("16xA100", 2, 2), ("A100", 4, 2)]
)
def test_the_intensity_is_that_of_the_step(setup, hardware, element_bytes, expected):
    """An endless context costs a FLOP per byte and query head in bf16; 4 share a KV head, and 16
    ranks divide them.
    """
    step = replace(setup(hardware=hardware, context=10_000_000), element_bytes=element_bytes)
    assert predict(step, (1,)).metrics()["predicted/arithmetic_intensity"] == pytest.approx(
        expected, rel=0.05
    )


TARGETS = [
    "llama-2-7b-32k",
    "llama-3.1-8b",
    "llama-3.1-70b",
    "llama-3.2-1b",
    "tinyllama-1.1b",
    "mistral-7b-v0.3",
]
TARGETS += ["qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "qwen3-1.7b", "qwen3-8b", "qwen3-14b"]
TARGETS += ["yi-1.5-6b", "yi-1.5-34b"]


@pytest.mark.parametrize("hardware", ["8xA100", "4xA100", "1xH100", "8xL40", "2xh200"])
@pytest.mark.parametrize("target", TARGETS)
def test_every_model_predicts_on_every_machine_that_can_hold_it(setup, model, target, hardware):
    ranks = hardware_named(hardware).count
    if model(target).num_heads % ranks:
        with pytest.raises(
            UserError, match=rf"hardware\.tensor_parallel={ranks}: 28 query heads.*valid: 1, 2, 4"
        ):
            setup(target=target, hardware=hardware)
        return
    prediction = predict(setup(target=target, hardware=hardware), (1, 4), alpha=0.8)
    times = prediction.best.times
    assert 0 < times.draft.total <= times.target.total < times.verify.total
    assert 0.2 < prediction.best.speedup < 3
    assert verdict(prediction)


def test_predicting_needs_no_torch():
    code = "import sys, magicdec.costmodel.planner; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_plans_are_ranked_by_throughput_within_the_bounds(setup, model):
    own = IndependentModel(model=ModelChoice("llama-3.2-1b", architecture=model("llama-3.2-1b")))
    drafts = SelfSpeculation(), own
    plans = search(
        setup(hardware="8xH100"),
        Curves(published_points()),
        (16, 32, 64, 256),
        drafts,
        latency_ms=12.0,
    )
    rates = [plan.tokens_per_second for plan in plans.ranked]
    assert rates == sorted(rates, reverse=True)
    assert all(1e3 * plan.time_per_token_s <= 12.0 for plan in plans.ranked)
    assert plans.ranked[0].speedup > 1
    assert plans.too_large  # batch 256 x 32,000 tokens
    assert any(plan.prediction is None for plan in plans.ranked)  # autoregressive decoding competes
    assert all(p.estimate is None for p in plans.unknown)


def written(best, generate_len=64):
    """The content of the experiment of a candidate, on a machine as its option has it."""
    machine = parse(HardwareConfig, values_of("hardware", best.setup.hardware.name.lower()))
    return yaml.safe_load(experiment_yaml(best, "", machine, 4000, generate_len))


def test_an_experiment_generates_as_many_tokens_as_were_ranked(setup):
    (best, *_) = search(
        setup(context=4000), Curves(published_points()), (32,), generate_len=500
    ).ranked
    batch = written(best, generate_len=500)["batch"]
    assert batch == {"size": 32, "context_len": 4000, "generate_len": 500}


def test_where_nothing_pays_the_plan_is_autoregressive(setup):
    (best, *_) = search(setup(context=4000), Curves(published_points()), (32,)).ranked
    assert best.prediction is None
    assert {"override /draft": "none"} in written(best)["defaults"]


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090", "4xh100"])
def test_a_machine_that_is_no_option_is_written_out(setup, name):
    (best, *_) = search(setup(context=4000), Curves(published_points()), (32,)).ranked
    machine = parse(HardwareConfig, values_of("hardware", "h100") | {"name": name})
    of_that_name = replace(best.setup.hardware, name=name)
    best = replace(best, setup=replace(best.setup, hardware=of_that_name))
    content = yaml.safe_load(experiment_yaml(best, "", machine, 4000, 64))
    assert {"override /hardware": "auto"} in content["defaults"]
    assert values_of("hardware", "auto") | content["hardware"] == asdict(machine)


def test_a_draft_without_a_cache_is_one_candidate_per_batch(setup):
    caches = (Streaming(budget=512), SnapKV(budget=512))
    plans = search(
        setup(), Curves(published_points()), (32, 64), (PromptLookup(), SelfSpeculation()), caches
    )
    assert [p.setup.batch for p in plans.unknown if p.setup.draft.name == "ngram"] == [64, 32]
    known = Point("llama-3.1-8b", "ngram", "full", 0, 32_000, "text", 0.9, "run", settings=())
    (best, *_) = search(setup(), Curves([known]), (32,), (PromptLookup(),)).ranked
    assert {"override /draft": "ngram"} in written(best)["defaults"]
    assert "cache" not in written(best)


def test_mistakes_and_impossible_plans_say_why(setup):
    with pytest.raises(UserError, match=r"alpha=1\.5"):
        predict(setup(), alpha=1.5)
    with pytest.raises(UserError, match=r"latency_ms=0\.1: the fastest plan takes"):
        search(setup(), Curves(published_points()), latency_ms=0.1)
    with pytest.raises(UserError, match="does not fit into the memory"):
        search(setup(hardware="1xA100", batch=512), Curves(published_points()))


@pytest.mark.parametrize("latency_ms", [None, 25.0])
def test_a_plan_that_fills_the_memory_has_the_most_rows_of_each_configuration(setup, latency_ms):
    """As many as a search over every batch finds to be within memory and latency."""
    at = setup(hardware="H200", context=32_768)
    caches, kinds = (Streaming(budget=512), SnapKV(budget=512)), (SelfSpeculation(), PromptLookup())
    ask = {"drafts": kinds, "caches": caches, "gammas": (2, 4), "generate_len": 64}
    every = search(at, Curves(published_points()), range(1, 65), latency_ms=latency_ms, **ask)
    filled = search(at, Curves(published_points()), latency_ms=latency_ms, fills=True, **ask)

    def most_rows(setups):
        rows = {}
        for each in setups:
            label = (each.draft_label, each.cache_label)
            rows[label] = max(each.batch, rows.get(label, 0))
        return rows

    for found in ("ranked", "unknown"):
        by_hand = most_rows(each.setup for each in getattr(every, found))
        assert most_rows(each.setup for each in getattr(filled, found)) == by_hand
    assert filled.too_large == ()
    without = filled.autoregressive.setup.batch
    assert filled.ranked[0].setup.batch != without, "each has its own batch"
    if latency_ms is None:
        assert filled.ranked[0].setup.batch < without, "a draft's cache takes memory"
        fixed = search(at, Curves(published_points()), (without,), **ask)
        assert filled.ranked[0].tokens_per_second > 1.5 * fixed.ranked[0].tokens_per_second


@pytest.mark.parametrize(("prompt", "output"), [(32001, 129), (1001, 65), (7, 3), (4000, 64)])
def test_a_workload_of_one_pair_has_its_prompt(prompt, output):
    workload = Workload([(prompt, output)])
    assert (workload.prompt_len, workload.generate_len) == (prompt, output)


def test_a_generation_is_timed_in_its_middle_and_held_and_looked_up_by_its_prompts(setup):
    at, curves = setup(context=32_000, budget=512), Curves(published_points())
    found = predict_generation(at, (2, 3), None, curves, 8_000)
    assert found.setup.context == 36_000
    assert found.memory == memory(at, found.best.gamma, 8_000)
    assert found.estimate == curves.estimate(at, 8_000)


def test_the_warning_before_a_run_counts_the_last_round_as_the_prediction_of_the_run_does(setup):
    """An alpha that pays if outputs are long, and does not for 32 tokens."""
    at = setup(context=8000)
    alpha = predict(at, (4,)).best.break_even_alpha + 0.005
    assert warning(at, (4,), Curves([]), alpha) is None
    assert "does not pay" in warning(at, (4,), Curves([]), alpha, 32)


def test_what_fits_at_no_batch_is_named(setup, model):
    large = IndependentModel(
        model=ModelChoice("llama-3.1-70b", architecture=model("llama-3.1-70b"))
    )
    plans = search(setup(hardware="H200"), Curves([]), (1,), (large,), (Streaming(budget=512),))
    assert {each.draft_label for each in plans.too_large} == {"llama-3.1-70b"}
    filled = search(
        setup(hardware="H200"),
        Curves([]),
        drafts=(large,),
        caches=(Streaming(budget=512),),
        fills=True,
    )
    assert {each.batch for each in filled.too_large} == {1}
