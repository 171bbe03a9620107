"""Selecting, codes and scores on a GPU: as measured on the card, or said not to be."""

from dataclasses import replace

import pytest
from gpu_publish import kernel_costs
from render import read_csv

from magicdec.costmodel.hardware import hardware_named
from magicdec.costmodel.kernel_costs import KernelCosts
from magicdec.costmodel.prediction import predict
from magicdec.costmodel.round import Setup, round_times
from magicdec.costmodel.targets import architecture
from magicdec.costmodel.verdict_words import verdict
from magicdec.drafts.self import SelfSpeculation
from tests.costmodel.conftest import changed
from tests.programs import ROOT

RESULTS = ROOT / "docs/results"
POINTS = {row["policy"]: row for row in read_csv(RESULTS / "gpu-policies.csv")}


@pytest.fixture
def setup():
    """A factory of self-speculation of Llama-3.1-8B."""

    def make(hardware, batch=64, context=32_000, **changes):
        model, machine = architecture("llama-3.1-8b"), hardware_named(hardware)
        return changed(Setup(model, machine, batch, context), **changes)

    return make


@pytest.fixture
def measured_cell(setup):
    """A factory of the setup of docs/results/gpu-policies.csv."""

    def make(policy, **changes):
        return setup(
            hardware="h200", batch=14, context=32_768, policy=policy, budget=512, **changes
        )

    return make


@pytest.mark.parametrize("policy", ["quest", "topk", "quantized", "verify_guided"])
def test_a_round_of_each_policy_is_predicted_as_the_card_measured_it(measured_cell, policy):
    """The steps of streaming are the control: they need none of this work."""
    point, control = POINTS[policy], POINTS["streaming"]
    setup = measured_cell(policy)
    times, plain = (round_times(measured_cell(one), 4) for one in (policy, "streaming"))
    step = times.steps(setup.cache)["draft"]
    draft_ms = 1e3 * (step.total - plain.draft.total)
    verify_ms = 1e3 * (times.verify.total - plain.verify.total)
    off_ms = 1e3 * plain.round_s - control["round_ms"]
    assert draft_ms == pytest.approx(point["draft_ms"] - control["draft_ms"], abs=0.4)
    assert verify_ms == pytest.approx(point["verify_ms"] - control["verify_ms"], abs=0.1)
    assert 1e3 * times.round_s - off_ms == pytest.approx(point["round_ms"], rel=0.05)


def test_the_shipped_costs_are_those_of_the_published_points():
    """If this fails, run python benchmarks/gpu.py --page."""
    machine = hardware_named("h200")
    derived = kernel_costs(machine, POINTS.values(), "")
    assert derived.times == machine.kernels.times


def test_a_speedup_is_no_longer_promised_where_selecting_takes_longer_than_everything(
    measured_cell,
):
    quest, streaming = (
        predict(measured_cell(policy), (4,), alpha=0.9).best.speedup
        for policy in ("quest", "streaming")
    )
    assert quest < 1 < streaming


@pytest.mark.parametrize(
    ("hardware", "policy", "remark"),
    [
        (
            "h200",
            "quest",
            "selecting entries (quest): as measured on NVIDIA H200, commit b9a530c, 14 x 32,768,"
            " budget 512, gamma 4",
        ),
        (
            "h100",
            "quest",
            "selecting entries (quest): not measured on this GPU, counted by bytes",
        ),
        ("h200", "streaming", None),
    ],
)
def test_a_prediction_says_what_was_measured(setup, hardware, policy, remark):
    prediction = predict(setup(hardware=hardware, policy=policy), (4,), alpha=0.9)
    assert prediction.metrics()["predicted/kernel_costs"] == remark
    assert (remark or "") in verdict(prediction)
    assert ("on this GPU" in verdict(prediction)) == ("on this GPU" in (remark or ""))


def test_codes_of_weights_are_said_not_to_be_measured(setup):
    quantized = setup(hardware="h200", draft=SelfSpeculation(quantization="int4"))
    assert quantized.remark is not None
    assert "weights (int4): not measured on this GPU" in quantized.remark


def test_a_policy_that_scores_its_verifications_pays_for_the_rounds_that_do(measured_cell):
    every, fourth = (
        round_times(measured_cell("verify_guided", refresh=refresh), 4) for refresh in (1, 4)
    )
    plain = round_times(measured_cell("streaming"), 4)
    extra = every.verify.total - plain.verify.total
    assert fourth.verify.total - plain.verify.total == pytest.approx(extra / 4)
    # 14 rows, 32 layers, 32 heads, 5 tokens, 32,768 entries: written and read in 4 bytes each.
    moved = 2 * 4 * 14 * 32 * 32 * 5 * 32_768
    machine = hardware_named("h200")
    factor = machine.kernels.times["scores"]["verify_guided"]
    assert extra == pytest.approx(factor * moved / machine.bandwidth, rel=1e-3)


def test_a_cpu_needs_no_remark(setup):
    machine = replace(hardware_named("h200"), name="cpu", kernels=KernelCosts())
    assert setup("h200", policy="quest").at(hardware=machine).remark is None
