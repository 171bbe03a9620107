"""scenario=plan from what users have: an assumed acceptance, a mix of lengths, and a schedule for
their engine.
"""

import json

import pytest
import yaml

from magicdec.config.omega import omega
from magicdec.errors import UserError
from tests.pixels import coloured, ink
from tests.runs import outcome, shown

pytestmark = pytest.mark.usefixtures("here")
ON_H100 = ("hardware=h100", "target=llama-3.1-8b")
PLAN = (
    "scenario=plan",
    "scenario.save_as=null",
    *ON_H100,
    "draft=model",
    "target@draft.model=llama-3.2-1b",
    "cache=full",
)
PREDICT = ("scenario=predict", *PLAN[1:])


@pytest.mark.parametrize("scenario", [PREDICT, PLAN], ids=["predict", "plan"])
def test_what_an_engine_reports_is_an_alpha(scenario):
    length = omega(3, 0.7)
    reports = (
        f"scenario.acceptance_length={length}",
        f"scenario.acceptance_rate={(length - 1) / 3}",
    )
    given, *reported = (
        outcome(*scenario, "batch.size=8", *keys).metrics["predicted/speedup"]
        for keys in (
            ["scenario.alpha=0.7"],
            *((report, "scenario.acceptance_gamma=3") for report in reports),
        )
    )
    assert reported == pytest.approx([given] * 2)
    assert given > 1


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            ["scenario.alpha=0.7", "scenario.acceptance_rate=0.6"],
            "say the same thing twice; give one",
        ),
        (
            ["scenario.acceptance_rate=0.6"],
            "scenario.acceptance_rate needs scenario.acceptance_gamma: how many tokens",
        ),
        (["scenario.acceptance_gamma=3"], "scenario.acceptance_gamma has no effect without"),
        (
            ["scenario.acceptance_length=4.5", "scenario.acceptance_gamma=3"],
            r"is above scenario.acceptance_gamma \+ 1",
        ),
        (["scenario.acceptance_length=0.5"], "must be at least 1, or null"),
        (
            ["scenario.workload=[[100]]"],
            r"must hold pairs of prompt and output tokens, as in \[\[4000,500\]\]",
        ),
        (["scenario.schedule=trtllm"], "scenario.schedule=trtllm"),
        (["scenario.schedule=vllm"], "no acceptance is known .*; give one"),
    ],
)
def test_mistakes(keys, words):
    with pytest.raises(UserError, match=words):
        outcome(*PLAN, *keys)


def test_engines_do_not_speculate_by_themselves():
    with pytest.raises(
        UserError, match="draft=self: vLLM cannot be set to it; choose draft=model or draft=ngram"
    ):
        outcome("scenario=plan", "scenario.save_as=null", *ON_H100, "scenario.schedule=vllm")


def test_an_assumed_alpha_is_that_of_the_draft_of_the_run():
    found = outcome(
        *PLAN, "scenario.alpha=0.7", "scenario.batch_sizes=[1,16]", "batch.context_len=4000"
    )
    assert {row["draft"] for row in found.history} == {"none", "llama-3.2-1b"}
    assert {row["policy"] for row in found.history} == {"", "full"}
    text = shown(found.view)
    assert "if alpha were different" in text
    # A plan is made for the middle of the 64 new tokens.
    alone = outcome(
        *PREDICT, "scenario.alpha=0.7", "batch.size=16", "batch.context_len=4032"
    ).metrics
    assert f"{alone['predicted/gamma']}: {alone['predicted/speedup']:.2f}x" in text


def test_a_mix_of_lengths_has_a_mean_context_and_its_prefills():
    keys = ("scenario.alpha=0.7", "batch.size=16")
    short, long, mix = (
        outcome(*PLAN, *keys, f"scenario.workload={lengths}").metrics
        for lengths in ("[[500,100]]", "[[16000,100]]", "[[500,100],[16000,100]]")
    )
    step, rate = "predicted/target_decode_ms", "predicted/autoregressive_requests_per_second"
    assert mix[step] == pytest.approx((short[step] + long[step]) / 2, rel=1e-3)
    assert short[step] < long[step]
    assert long[rate] < mix[rate] < short[rate]
    for metrics in (short, long):
        assert metrics["predicted/speedup_with_prefill"] < metrics["predicted/speedup"], (
            "prefill gains nothing"
        )
    long_answers = outcome(*PLAN, *keys, "scenario.workload=[[500,5000]]").metrics
    assert long_answers["predicted/speedup_with_prefill"] == pytest.approx(
        long_answers["predicted/speedup"], rel=0.05
    )


def test_lengths_mean_the_same_in_a_batch_and_in_a_workload(tmp_path):
    """1,024 + 2,048 tokens, of which the middle has 2,048 tokens of context."""
    keys = ("scenario.alpha=0.8", "batch.size=64", "scenario.batch_sizes=[64]")
    streaming = ("draft=self", "cache=streaming", "cache.budget=256")
    search = ("scenario=plan", *ON_H100, *keys, *streaming)
    lengths = ("batch.context_len=1024", "batch.generate_len=2048")
    batch = outcome(*search, *lengths, "scenario.save_as=batch")
    workload = outcome(*search, "scenario.workload=[[1024,2048]]", "scenario.save_as=workload")
    assert batch.history == workload.history
    assert batch.metrics == workload.metrics
    middle = ("batch.context_len=2048", "batch.generate_len=2048", "scenario.alpha=0.8")
    at = outcome("scenario=predict", *ON_H100, *streaming, "batch.size=64", *middle).metrics
    assert batch.metrics["predicted/speedup"] == pytest.approx(at["predicted/speedup"])
    for name in ("batch", "workload"):
        written = yaml.safe_load((tmp_path / "conf/experiment" / f"{name}.yaml").read_text())
        assert written["batch"] == {"size": 64, "context_len": 1024, "generate_len": 2048}


def test_the_memory_of_a_plan_is_that_of_the_end_of_the_generation():
    """Keys and values of 131,072 bytes a token: 150 rows of 3,072 tokens take 56.2 GiB beside 15.0
    GiB of weights and the draft's 4.7 GiB (256 tokens). With 1,024 tokens more they would not fit.
    """
    keys = ("scenario.alpha=0.8", "draft=self", "cache=streaming", "cache.budget=256")
    lengths = "scenario.workload=[[1024,2048]]"
    found = outcome(
        "scenario=plan", *ON_H100, "scenario.save_as=null", *keys, lengths, "batch.size=150"
    )
    assert {row["draft"] for row in found.history} == {"none", "self"}
    assert found.metrics["predicted/fits"]
    assert found.metrics["predicted/memory_gib"] == pytest.approx(56.2 + 15.0 + 4.7, rel=0.01)


def test_a_schedule_is_a_file_a_map_and_a_command(tmp_path):
    keys = (
        "scenario.alpha=0.6",
        "batch.size=64",
        "scenario.schedule=vllm",
        "scenario.context_lens=[1000,16000]",
    )
    found = outcome(*PLAN, *keys, "scenario.save_as=mine", "batch.context_len=16000")
    written = json.loads((tmp_path / "schedules" / "mine.vllm.json").read_text())
    ranges = written["num_speculative_tokens_per_batch_size"]
    assert ranges[0][0] == 1
    assert ranges[-1][1] == 64
    chart = tmp_path / "schedules" / "mine.vllm.png"
    assert ink(chart) > 0.3, "two lines of cells"
    assert coloured(chart) > 0.2
    text = shown(found.view)
    command = (
        "vllm serve meta-llama/Llama-3.1-8B",
        "--max-num-seqs 64",
        '--speculative-config "$(cat FILE)"',
    )
    assert " \\\n    ".join(command).replace("FILE", "schedules/mine.vllm.json") in text, "to paste"
    worst = min(row["share_of_best"] for row in found.history)
    assert worst == found.metrics["predicted/worst_share"] >= 0.9
    for row in found.history:
        (gamma,) = [gamma for low, high, gamma in ranges if low <= row["batch_size"] <= high]
        assert row["gamma"] == gamma


@pytest.mark.parametrize(
    ("engine", "reason"), [("vllm", "the drafter runs all the same"), ("tensorrt_llm", "collapses")]
)
def test_a_zero_that_harms_is_warned_of_and_can_be_ruled_out(tmp_path, engine, reason):
    keys = ("scenario.alpha=0.5", "batch.size=512", f"scenario.schedule={engine}")
    keys += ("scenario.save_as=null", "batch.context_len=1000")
    with_zero = outcome(*PLAN, *keys)
    assert 0 in {row["gamma"] for row in with_zero.history}
    assert reason in " ".join(shown(with_zero.view).split())
    without = outcome(*PLAN, *keys, "scenario.least_gamma=1")
    assert min(row["gamma"] for row in without.history) == 1
    assert "warning" not in shown(without.view)
    assert min(row["predicted/speedup"] for row in without.history) < 1, "it says that it loses"


def test_a_schedules_command_is_quoted(tmp_path):
    keys = (
        "scenario.alpha=0.6",
        "batch.size=4",
        "scenario.schedule=vllm",
        "scenario.save_as='my --own'",
    )
    text = shown(outcome(*PLAN, *keys).view)
    assert """--speculative-config "$(cat 'schedules/my --own.vllm.json')"\n""" in text
    assert (tmp_path / "schedules" / "my --own.vllm.json").exists()


def test_a_schedule_that_is_not_saved_is_shown(tmp_path):
    keys = (
        "scenario.alpha=0.6",
        "batch.size=4",
        "scenario.schedule=tensorrt_llm",
        "scenario.save_as=null",
    )
    text = shown(outcome(*PLAN, *keys).view)
    assert "draft_len_schedule:" in text
    assert text.count("FILE.yaml") == 2, "the content's and the command's"
    assert "None" not in text
    assert not (tmp_path / "schedules").exists()
