"""Quantised drafts: how far weights may move, what is shared, and that the output does not change."""

import pytest
import torch

from magicdec.errors import UserError
from magicdec.models import quantize
from tests.small import open_batch, random_prompts, small_model

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # multiples of the group


@pytest.fixture(scope="module")
def target():
    return small_model(**SIZES)


@pytest.fixture(scope="module", params=["int8", "int4"])
def pair(request, target):
    pytest.importorskip("torchao")
    return request.param, quantize.quantized(target, request.param)


def test_no_weight_moves_by_more_than_a_step_of_its_group(target, pair):
    name, model = pair
    steps = 2 ** int(name.removeprefix("int")) - 1
    for layer, exact in zip(model.layers, target.layers, strict=True):
        for part in ("qkv", "output", "gate_up", "down"):
            weight = getattr(exact, part).weight.unflatten(1, (-1, quantize.GROUP_SIZE))
            moved = (getattr(layer, part).weight.dequantize() - getattr(exact, part).weight).abs()
            step = 2 * weight.abs().amax(-1) / (steps - 1)
            assert (moved.unflatten(1, (-1, quantize.GROUP_SIZE)).amax(-1) <= step * 1.001).all()
            assert moved.max() > 0


def test_the_rest_is_shared_and_the_target_stays(target, pair):
    _, model = pair
    assert model.embed.weight.data_ptr() == target.embed.weight.data_ptr()
    assert type(target.layers[0].qkv.weight.data) is torch.Tensor


@pytest.mark.parametrize("draft", ["self", "layer_skip", "model"])
@pytest.mark.parametrize("policy", ["streaming", "topk"])
def test_every_quantised_draft_is_lossless(target, pair, draft, policy):
    _, model = pair
    options = {"gamma": 3, "policy": policy, "budget": 24, "num_sink": 2}
    batch = open_batch(target, random_prompts([40, 53]), draft_name=draft, draft_model=model, **options)
    assert batch.draft.model.layers[0] is model.layers[0]
    assert batch.decoder.generate(batch.draft).tokens == batch.decoder.generate().tokens


def test_eight_bits_are_accepted_more_often_than_four(target):
    pytest.importorskip("torchao")
    accepted = []
    for name in ("int8", "int4"):
        model = quantize.quantized(target, name)
        batch = open_batch(
            target, random_prompts([40] * 8), draft_name="self", draft_model=model, gamma=3, policy="full"
        )
        counts = batch.decoder.generate(batch.draft).accepted_RB
        accepted.append(counts[counts >= 0].double().mean())
    assert accepted[0] > accepted[1]


def test_without_torchao_there_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(quantize, "find_spec", lambda name: None)
    quantize.check("none")
    with pytest.raises(
        UserError, match=r"draft.quantization=int8 needs torchao: pip install 'magicdec\[quantization\]'"
    ):
        quantize.check("int8")
