"""Quantized drafts: how far weights may move, what is shared, and that the output does not
change.
"""

import pytest
import torch

from magicdec.config.load import compose
from magicdec.errors import UserError
from magicdec.models import quantize
from magicdec.planning.resolve import resolve
from tests.small import accepted, open_batch, random_prompts, small_drafter, small_model

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
    model = model.first_layers(1) if draft == "layer_skip" else model
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


def test_the_matrix_that_joins_two_vectors_is_quantized_too(target):
    modules = small_drafter("mtp", target, 0.1)
    joined = quantize.quantized(modules, "int8", "cpu").layers[0].joined.weight
    assert type(joined.data) is not torch.Tensor


UNEVEN = "target.architecture.intermediate_size=240"


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        (
            ["draft.quantization=int8", UNEVEN],
            "int8 takes multiples of 32, but down has 240 inputs",
        ),
        (
            ["draft.quantization=int4", "hardware.tensor_parallel=4"],
            "int4 takes multiples of 32, but down has 176 inputs on each rank",
        ),
    ],
)
def test_matrices_that_are_not_made_of_whole_groups_are_refused(keys, refused):
    random = ["target.weights=random", "draft.synthetic_acceptance=0.7"]
    with pytest.raises(UserError, match=f"^draft.quantization={refused}; choose draft.quant"):
        resolve(compose(["hardware=cpu", *random, *keys]))


def test_outputs_that_cannot_be_packed_together_are_refused_on_a_cpu():
    config = small_model(num_heads=8, num_kv_heads=1, head_dim=4).config
    quantize.check_sizes("int8", config, 1, torch.device("cpu"))
    quantize.check_sizes("int4", config, 1, torch.device("cuda"))
    with pytest.raises(UserError, match="int4 takes multiples of 16, but qkv has 40 outputs;"):
        quantize.check_sizes("int4", config, 1, torch.device("cpu"))
