"""Quantized drafts: how far weights may move, what is shared, and that the output does not
change.
"""

import pytest
import torch

from magicdec.errors import UserError
from magicdec.models import quantize
from tests.small import accepted, open_batch, random_prompts, small_model

pytest.importorskip("torchao")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # multiples of the group


@pytest.fixture(scope="module")
def target():
    return small_model(**SIZES)


@pytest.fixture(scope="module", params=["int8", "int4"])
def pair(request, target):
    return request.param, quantize.quantized(target, request.param, "cpu")


def test_no_weight_moves_by_more_than_a_step_of_its_group(target, pair):
    """Weights as the layer multiplies by them: it is shown the unit vectors."""
    name, model = pair
    steps = 2 ** int(name.removeprefix("int")) - 1
    rounding = 2**-7 if name == "int4" else 0.0  # of bfloat16
    for layer, exact in zip(model.layers, target.layers, strict=True):
        for part in quantize.MATRICES:
            weight = getattr(exact, part).weight
            moved = (getattr(layer, part)(torch.eye(weight.shape[1])).T - weight).abs()
            groups, moved = (x.unflatten(1, (-1, quantize.CODE_GROUP)) for x in (weight, moved))
            step = 2 * groups.abs().amax(-1) / (steps - 1)
            assert (moved.amax(-1) <= step * 1.001 + rounding * groups.abs().amax(-1)).all()
            assert moved.max() > 0


def test_a_bias_is_added_and_a_type_kept(target):
    linear, x = torch.nn.Linear(64, 32), torch.randn(3, 5, 64)
    packed = quantize.PackedLinear(linear)
    torch.testing.assert_close(packed(x), linear(x), atol=0.2, rtol=0)
    torch.testing.assert_close(
        packed(x) - packed(torch.zeros_like(x)), linear(x) - linear.bias, atol=0.2, rtol=0
    )
    torch.testing.assert_close(packed(torch.zeros(64)[None])[0], linear.bias)
    assert packed(x).dtype == torch.float32


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_target_that_keeps_bfloat16_matrices(quantization):
    """The copy computes as that of the same target in float32."""
    compact, x = small_model(**SIZES), torch.randn(2, 3, 64)
    for parameter in compact.parameters():
        parameter.data = parameter.data.bfloat16() if parameter.dim() == 2 else parameter.data
    wide = small_model(**SIZES)
    wide.load_state_dict(compact.state_dict())
    ours, theirs = (
        quantize.quantized(model, quantization, "cpu").layers[0].qkv(x) for model in (compact, wide)
    )
    assert torch.equal(ours, theirs)


def test_four_bits_take_half_a_byte_and_scales(target):
    model = quantize.quantized(target, "int4", "cpu")
    exact = sum(
        getattr(layer, part).weight.numel() for layer in target.layers for part in quantize.MATRICES
    )
    parts = [getattr(layer, part) for layer in model.layers for part in quantize.MATRICES]
    held = sum(parameter.nbytes for part in parts for parameter in part.parameters())
    assert held == exact // 2 + exact // quantize.CODE_GROUP * 4


def test_the_rest_is_shared_and_the_target_stays(target, pair):
    _, model = pair
    assert model.embed.weight.data_ptr() == target.embed.weight.data_ptr()
    assert type(target.layers[0].qkv.weight.data) is torch.Tensor


@pytest.mark.parametrize("draft", ["self", "layer_skip", "model"])
@pytest.mark.parametrize("policy", ["streaming", "topk"])
def test_every_quantized_draft_is_lossless(target, pair, draft, policy):
    _, model = pair
    options = {"gamma": 3, "policy": policy, "budget": 24, "num_sink": 2}
    batch = open_batch(
        target, random_prompts([40, 53]), draft_name=draft, draft_model=model, **options
    )
    assert batch.draft.model.layers[0] is model.layers[0]
    assert batch.decoder.generate(batch.draft).tokens == batch.decoder.generate().tokens


def test_eight_bits_are_accepted_more_often_than_four(target):
    means = []
    prompts = random_prompts([40] * 8)
    keys = {"draft_name": "self", "gamma": 3, "policy": "full"}
    for name in ("int8", "int4"):
        batch = open_batch(
            target, prompts, draft_model=quantize.quantized(target, name, "cpu"), **keys
        )
        means.append(accepted(batch.decoder.generate(batch.draft)).double().mean())
    assert means[0] > means[1]


def test_without_torchao_there_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(quantize, "find_spec", lambda name: None)
    said = r"draft.quantization=int8 needs torchao: pip install 'magicdec\[quantization\]'"
    with pytest.raises(UserError, match=said):
        quantize.check("int8", torch.device("cpu"))
