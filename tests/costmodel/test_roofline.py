from dataclasses import replace

import pytest
import torch

from magicdec.architectures.block_config import BlockConfig
from magicdec.attention.sdpa import SdpaAttention
from magicdec.costmodel import roofline
from magicdec.costmodel.roofline import Pass, entries_time
from magicdec.models.kv_cache import KVCache
from magicdec.models.parallel import Share
from magicdec.models.transformer import Transformer

from .conftest import SMALL


def test_flops_and_bytes_are_what_counting_by_hand_gives(ideal):
    batch, tokens, cached = 3, 2, 100
    ops = {op.name: op for op in roofline.operators(Pass(SMALL, batch, tokens, cached), ideal())}
    rows = batch * tokens
    assert ops["qkv"].flops == 2 * rows * 64 * (8 + 2 + 2) * 8
    assert ops["qkv"].bytes == 2 * (64 * 96 + rows * (64 + 96))
    # Scores and values, all query heads.
    assert ops["attention"].flops == 4 * batch * tokens * cached * 8 * 8
    # Keys and values of 2 KV heads, once.
    assert ops["attention"].bytes == 2 * 2 * batch * cached * 2 * 8
    assert ops["head"].flops == 2 * rows * 64 * 1000
    assert ops["gate_up"].number == SMALL.num_layers


def test_linear_layers_hold_all_weights(ideal, model):
    for config in (SMALL, model("llama-3.1-8b")):
        ops = roofline.operators(Pass(config, 1, 1, 1), ideal())
        weights = sum(op.number * op.flops / 2 for op in ops if op.reads == "weights")
        embedding_and_norms = (
            config.vocab_size * config.hidden_size
            + (2 * config.num_layers + 1) * config.hidden_size
        )
        assert weights == config.num_parameters - embedding_and_norms


def test_a_step_is_bound_by_weights_by_the_context_or_by_compute(ideal, model):
    config = model("llama-3.1-8b")
    sizes = (1, 1, 1), (8, 1, 100_000), (512, 4, 1)
    one_row, long, many = (roofline.step_time(Pass(config, *size), ideal()) for size in sizes)
    assert one_row.largest == "weights"
    # All parameters but the embedding, in bf16.
    assert one_row.total == pytest.approx(15.0e9 / 3350e9, rel=0.01)
    assert long.kv == pytest.approx(8 * 100_000 * config.kv_elements_per_token * 2 / 3350e9)
    assert many.largest == "compute"
    assert many.compute == pytest.approx(2 * 7.5e9 * 2048 / 989e12, rel=0.02)


def test_tensor_parallelism_divides_work_and_adds_communication(ideal, model):
    config = model("llama-3.1-8b")
    one, eight = (roofline.step_time(Pass(config, 32, 1, 32_000, n), ideal(n)) for n in (1, 8))
    assert eight.kv == pytest.approx(one.kv / 8)
    assert eight.weights == pytest.approx(one.weights / 8, rel=0.02)  # inputs are not divided
    assert one.communication == 0 < eight.communication


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("qwen2.5-7b", 2), ("qwen2.5-7b", 4), ("tinyllama-1.1b", 8), ("llama-3.1-8b", 16)],
)
def test_a_rank_does_the_work_of_the_weights_that_it_holds(ideal, model, name, ranks):
    part = Share(0, ranks, 0, ranks)
    with torch.device("meta"):
        held = Transformer(part.config(model(name)), SdpaAttention(), part)
        cache = KVCache(held.config, 1, 1000, torch.bfloat16, "meta")
    ops = {
        op.name: op for op in roofline.operators(Pass(model(name), 1, 1, 1000, ranks), ideal(ranks))
    }
    for matmul in ("qkv", "output", "gate_up", "down"):
        weights = getattr(held.layers[0], matmul).weight.numel()
        assert ops[matmul].flops == 2 * weights
    assert ops["attention"].bytes == cache.num_bytes / held.config.num_layers
    queries = held.layers[0].output.in_features  # of all its heads
    assert ops["attention"].flops == 4 * 1000 * queries
    assert ops["attention"].rows == queries / held.config.head_dim / held.config.num_kv_heads


def test_an_unsharded_head_is_read_whole(ideal, model):
    config = model("llama-3.1-8b")
    sharded, whole = (ideal(8, stack=stack) for stack in ("magicdec", "reference-2024-08"))
    more = (
        roofline.step_time(Pass(config, 1, 1, 1, 8), whole).weights
        - roofline.step_time(Pass(config, 1, 1, 1, 8), sharded).weights
    )
    assert more == pytest.approx(7 / 8 * 128256 * 4096 * 2 / 3350e9, rel=0.01)


def test_sliding_layers_read_their_window(ideal):
    windowed = replace(SMALL, sliding_window=64, sliding_layers=(0, 2))
    ops = [op for op in roofline.operators(Pass(windowed, 1, 1, 1000), ideal()) if op.reads == "kv"]
    assert sum(op.number * op.bytes for op in ops) == 2 * 2 * 2 * 8 * (64 + 64 + 1000)


def test_overheads_and_quantization(ideal):
    plain = roofline.step_time(Pass(SMALL, 1, 1, 1), ideal())
    assert roofline.step_time(
        Pass(SMALL, 1, 1, 1), ideal(layer_overhead_us=10.0)
    ).total - plain.total == pytest.approx(30e-6)
    assert roofline.step_time(
        Pass(SMALL, 1, 1, 1), ideal(step_overhead_us=10.0)
    ).total - plain.total == pytest.approx(10e-6)
    quantized = roofline.step_time(Pass(SMALL, 1, 1, 1, weight_bytes=0.5), ideal())
    saved = (
        1.5 * roofline.layer_weights(SMALL) / ideal().bandwidth
    )  # of the layers alone: the head stays
    assert plain.weights - quantized.weights == pytest.approx(saved)


def test_tiles_stretch_attention_only_where_they_are_not_split():
    assert roofline.tile_stretch(128, 108) == 1.0  # under 0.8 of 216 places: split
    assert roofline.tile_stretch(200, 108) == 1.0  # a single wave
    assert roofline.tile_stretch(216, 108) == roofline.tile_stretch(432, 108) == 1.0  # full waves
    assert roofline.tile_stretch(256, 108) == pytest.approx(1.5 * 216 / 256)  # 40 tiles left over
    assert roofline.tile_stretch(400, 108) == pytest.approx(
        1.0
    )  # 184 left over: as busy as a full wave
    assert roofline.tile_stretch(256, None) == 1.0


def test_intensity_is_flops_over_bytes(ideal, model):
    config, machine = model("llama-2-7b-32k"), ideal()
    # Without sharing of KV heads, decoding long contexts tends to one multiply-add per element: 1
    # FLOP per byte.
    assert roofline.arithmetic_intensity(Pass(config, 64, 1, 1_000_000), machine) == pytest.approx(
        1.0, rel=0.05
    )
    assert roofline.arithmetic_intensity(Pass(config, 64, 4, 1_000_000), machine) == pytest.approx(
        4.0, rel=0.05
    )


def test_attention_has_a_share_of_the_rate_of_matmuls(ideal):
    # Of 10,000 query tokens over as many cached ones, attention is bound by FLOPs, as are the
    # matmuls.
    forward = Pass(SMALL, 1, 10_000, 10_000)
    flops = sum(
        op.number * op.flops for op in roofline.operators(forward, ideal()) if op.reads == "kv"
    )
    slower = (
        roofline.step_time(forward, ideal(attention_fraction=0.25)).compute
        - roofline.step_time(forward, ideal()).compute
    )
    assert slower == pytest.approx(3 * flops / ideal().device.flops)


def test_what_is_not_hidden_is_added(ideal, model):
    forward = Pass(model("llama-3.1-8b"), 8, 4, 4000, chooses=False)
    machine = ideal()
    parts = [
        (
            op.number * op.bytes * op.stretch / machine.bandwidth,
            op.number * op.flops / machine.matmul_rate(op.rows),
        )
        for op in roofline.operators(forward, machine)
    ]
    for overlap in (1.0, 0.25):
        expected = sum(max(part) + (1 - overlap) * min(part) for part in parts)
        assert roofline.step_time(forward, ideal(overlap=overlap)).total == pytest.approx(expected)


def test_entries_are_made_in_all_layers_of_the_hidden_states_that_are_joined_once(ideal, model):
    """DFlash has five layers, each with keys and values of its own."""
    one = replace(BlockConfig.like(model("llama-3.1-8b")), num_layers=1)
    times = [
        entries_time(Pass(replace(one, num_layers=layers), 1, 1, 1), ideal()) for layers in (1, 5)
    ]
    joined = one.fused_parameters
    in_a_layer = one.qkv_inputs * (one.num_heads + 2 * one.num_kv_heads) * one.head_dim
    ratio = (joined + 5 * in_a_layer) / (joined + in_a_layer)
    assert times[1].weights == pytest.approx(ratio * times[0].weights)
