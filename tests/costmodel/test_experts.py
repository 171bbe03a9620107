import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from magicdec.config.load import compose
from magicdec.costmodel.growth import differs, kv_share
from magicdec.costmodel.hardware import hardware_named
from magicdec.costmodel.memory_estimate import memory
from magicdec.costmodel.prediction import predict
from magicdec.costmodel.roofline import Pass, operators
from magicdec.costmodel.routing import UNIFORM, Routing, recorded
from magicdec.costmodel.verdict_words import verdict
from magicdec.models.description import describe
from magicdec.planning.resolve import resolve
from magicdec.planning.setup import setup_of
from magicdec.scenarios.predict import _view

TARGETS = Path(__file__).parents[2] / "conf" / "target"
# The share of a step's bytes that its KV cache is, at 32 x 32,768, by a count of others: of weights
# as the checkpoint stores them, with uniform routing.
SHARES = {
    "qwen3-30b-a3b": 0.66,
    "gpt-oss-120b": 0.48,
    "qwen3.5-27b": 0.52,
    "deepseek-v3": 0.15,
    "llama-3.1-8b": 0.90,
}


def described(target):
    plain = json.loads((TARGETS / f"{target}.json").read_text())
    return describe(plain, target, runs=False).as_predicted()


@pytest.mark.parametrize("target", SHARES)
def test_the_share_of_the_kv_cache_is_what_others_count(target):
    ops = operators(Pass(described(target), 32, 1, 32_768), hardware_named("h100"))
    kv = sum(op.number * op.bytes for op in ops if op.reads == "kv")
    assert kv / sum(op.number * op.bytes for op in ops) == pytest.approx(SHARES[target], abs=0.01)


@pytest.mark.parametrize(
    ("target", "features"),
    [
        ("llama-3.1-8b", 32 * 14_336),
        ("qwen3-30b-a3b", 48 * 8 * 768),
        ("gpt-oss-20b", 24 * 4 * 2880),  # whose attention is wider than the model
        ("deepseek-v3", 3 * 18_432 + 58 * (8 + 1) * 2048),
    ],
)
def test_what_passes_an_activation_function_is_the_input_of_an_mlps_second_matrix(target, features):
    plain = json.loads((TARGETS / f"{target}.json").read_text())
    modules = describe(plain, target, "transformers", runs=False)
    assert modules.as_predicted().gated_features == features


def test_ranks_keep_projections_to_latents_and_routers_whole():
    """Of DeepSeek-V3: 61 layers from 7,168 features to latents of 1,536 and 576, and 58 routers to
    256 experts.
    """
    matrices = described("deepseek-v3").matrices
    part = described("deepseek-v3").shared_by(8).matrices
    assert len(part) == len(matrices)
    whole = sum(one.elements for one, of_all in zip(part, matrices, strict=True) if one == of_all)
    assert whole == 61 * 7168 * (1536 + 576) + 58 * 7168 * 256
    divided = sum(one.elements for one in part) - whole
    assert divided == (sum(one.elements for one in matrices) - whole) / 8


@pytest.mark.parametrize("target", SHARES)
def test_ranks_divide_what_a_step_reads(target):
    """Layers' weights, and keys and values of heads; latents are whole on each rank."""
    whole, part = (
        operators(Pass(described(target), 32, 1, 32_768, ranks=ranks), hardware_named("4xh100"))
        for ranks in (1, 4)
    )

    def bytes_of(ops, reads):
        return sum(op.number * op.bytes for op in ops if op.reads == reads and op.name != "head")

    assert bytes_of(part, "weights") == pytest.approx(bytes_of(whole, "weights") / 4, rel=0.05)
    kept = 1 if target == "deepseek-v3" else 4
    assert bytes_of(part, "kv") == pytest.approx(bytes_of(whole, "kv") / kept, rel=0.01)


@pytest.mark.parametrize(("target", "gib"), [("gpt-oss-120b", 60.8), ("gpt-oss-20b", 12.8)])
def test_quantized_weights_have_the_size_that_their_page_states(target, gib):
    plain = json.loads((TARGETS / "gpt-oss-120b.json").read_text())
    sizes = json.loads((TARGETS / f"{target}.json").read_text())
    quantized = sizes | {"quantization_config": plain["quantization_config"]}
    config = describe(quantized, target, runs=False)
    assert config.stored_weight_bytes(2) / 2**30 == pytest.approx(gib, rel=0.01)


def test_experts_that_are_touched_are_those_of_a_simulation():
    rng = np.random.default_rng(0)
    draws = [[rng.permutation(16)[:2] for _ in range(6)] for _ in range(4000)]
    counts = [len(np.unique(np.concatenate(tokens))) for tokens in draws]
    assert UNIFORM.touched(16, 2, 3, 2) == pytest.approx(np.mean(counts), rel=0.01)
    assert UNIFORM.touched(16, 2, 1, 1) == pytest.approx(2)


def test_recorded_routing_explains_overlap_and_popularity():
    rng = np.random.default_rng(0)
    popular = np.arange(1, 17) / np.arange(1, 17).sum()
    rows = []
    for _ in range(300):
        chosen = [rng.choice(16, 2, replace=False, p=popular)]
        while len(chosen) < 20:
            repeats = rng.random() < 0.6
            chosen.append(chosen[-1] if repeats else rng.choice(16, 2, replace=False, p=popular))
        rows.append(chosen)
    routing = recorded(np.array([rows]), 16)
    assert routing.novelty == pytest.approx(0.4, abs=0.05)
    pairs = np.concatenate([np.array(rows)[:, :-1], np.array(rows)[:, 1:]], -1).reshape(-1, 4)
    mean = np.mean([len(set(pair)) for pair in pairs])
    assert routing.touched(16, 2, 1, 2) == pytest.approx(mean, rel=0.02)
    assert routing.touched(16, 2, 8, 4) < UNIFORM.touched(16, 2, 8, 4)


def test_a_verification_that_chooses_alike_touches_no_more():
    assert Routing(novelty=0.0).touched(64, 8, 4, 5) == UNIFORM.touched(64, 8, 4, 1)


def predicted(target, *keys):
    sizes = ["batch.size=32", "batch.context_len=16384", "scenario.alpha=0.8"]
    plan = resolve(
        compose([f"target={target}", "scenario=predict", "hardware=h100", *sizes, *keys])
    )
    return predict(setup_of(plan), alpha=0.8)


def test_a_verdict_says_what_grows_and_which_experts_are_touched():
    text = verdict(predicted("gpt-oss-120b"))
    assert "entries of 18 of 36 layers" in text
    assert "18 layers stop at a window of 128 tokens" in text
    assert "A step touches 64% of the experts, a verification " in text
    assert "48 layers keep states of one size" in verdict(predicted("qwen3.5-27b"))


def test_a_dense_target_has_no_such_remarks():
    assert "grow the entries" not in verdict(predicted("llama-3.1-8b"))


def test_a_memory_estimate_counts_copies_of_recurrent_states():
    """A verification of gamma + 1 tokens keeps a state after each, and the draft has its own."""
    prediction = predicted("qwen3.5-27b")
    setup = prediction.setup
    states = sum(memory.layers * memory.state_bytes for memory in setup.target.memories)
    assert states > 0
    grown = memory(setup, 5).draft_kv - memory(setup, 2).draft_kv
    slots = setup.target.kv_elements_per_token * setup.element_bytes
    assert grown == pytest.approx(setup.batch * 3 * (states + slots))
    without = sum(m.stored_bytes(0, 2) for m in setup.target.memories)
    assert memory(setup, 2).draft_kv > setup.batch * (3 + 1) * without


def test_a_run_that_chooses_gamma_keeps_the_states_of_every_gamma():
    setup = predicted("qwen3.5-27b").setup
    states = sum(memory.layers * memory.state_bytes for memory in setup.target.memories)
    several = memory(setup, 3, gammas=(1, 2, 3)).draft_kv - memory(setup, 3).draft_kv
    assert several == pytest.approx(setup.batch * (2 + 3) * states)


def test_a_touched_expert_costs_its_overhead():
    setup = predicted("qwen3-30b-a3b").setup
    efficiency = replace(setup.hardware.efficiency, expert_overhead_us=2.0)
    slower = setup.at(hardware=replace(setup.hardware, efficiency=efficiency))
    kinds = [each for each in setup.target.matrices if each.experts]
    touched = sum(
        each.number * UNIFORM.touched(each.experts, each.experts_per_token, setup.batch, 1)
        for each in kinds
    )
    added = slower.target_time.total - setup.target_time.total
    assert added == pytest.approx(2e-6 * touched)


@pytest.mark.parametrize(
    ("target", "is_shown"),
    [("qwen3-30b-a3b", True), ("qwen3.5-27b", True), ("llama-3.1-8b", False)],
)
def test_a_prediction_maps_the_share_of_the_kv_cache(target, is_shown):
    prediction = predicted(target)
    assert differs(prediction.setup) is is_shown
    console = Console(width=100)
    with console.capture() as shown:
        console.print(_view(prediction))
    words = " ".join(shown.get().split())
    assert ("share of the KV cache in the bytes of a step" in words) is is_shown
    share = kv_share(prediction.setup.at(batch=32, context=32768))
    assert share == pytest.approx(SHARES[target], abs=0.02)
    assert prediction.metrics()["predicted/kv_share"] == kv_share(prediction.setup)
