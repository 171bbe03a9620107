"""The matmul by codes in Triton's interpreter; test_interpreted.py runs this file."""

import pytest
import torch
import torch.nn.functional as F

from magicdec.models import quantize
from tests.models.test_quantize import SIZES
from tests.small import open_batch, random_prompts, small_model


def coded(rows, columns, name, dtype, bias=False):
    """Return a linear layer and the same in codes, as a GPU has it."""
    torch.manual_seed(rows)
    linear = torch.nn.Linear(columns, rows, bias=bias, dtype=dtype).requires_grad_(False)
    layer = torch.nn.Linear(columns, rows, bias=bias, dtype=dtype).requires_grad_(False)
    layer.load_state_dict(linear.state_dict())
    return linear, quantize.coded(layer, name)


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize(("rows", "columns", "count"), [(40, 96, 1), (96, 320, 17), (33, 64, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_decoded_weights(name, rows, columns, count, dtype):
    """Outputs and inputs that are no multiples of a block, too."""
    linear, layer = coded(rows, columns, name, dtype, bias=count == 5)
    x = torch.randn(count, 1, columns).to(dtype)
    right = F.linear(
        x.double(), layer.weight.double(), None if linear.bias is None else linear.bias.double()
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(layer(x).double(), right, atol=tolerance, rtol=tolerance)
    largest = linear.weight.abs().max().float()
    step = 2 / (2 ** int(name[3:]) - 2) * largest + (
        largest * 2**-7 if dtype == torch.bfloat16 else 0
    )
    assert (layer.weight - linear.weight).abs().max() <= step * 1.01
    assert (layer.weight != linear.weight).any()


def test_compilation_leaves_the_kernel_whole():
    """It is one operator of one graph, and its numbers are the same."""
    _, layer = coded(40, 96, "int4", torch.float32, bias=True)
    x = torch.randn(5, 1, 96)
    compiled = torch.compile(lambda x: layer(x * 2) + 1, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x * 2) + 1)


def test_the_memory_estimate_knows_its_output():
    _, layer = coded(40, 96, "int8", torch.float32)
    layer.to("meta")
    assert layer(torch.empty(5, 1, 96, device="meta")).shape == (5, 1, 40)


def test_many_rows_multiply_by_decoded_weights():
    _, layer = coded(40, 96, "int4", torch.float32)
    x = torch.randn(70, 96)
    torch.testing.assert_close(layer(x)[:64], layer(x[:64]), atol=1e-5, rtol=1e-5)


def test_a_draft_on_codes_is_lossless():
    """The model that a GPU would have, in fp32 and interpreted."""
    target = small_model(**SIZES)
    model = quantize.quantized(target, "int4", "cuda")
    assert isinstance(model.layers[0].qkv, quantize.CodedLinear)
    options = {"gamma": 2, "policy": "streaming", "budget": 24, "num_sink": 2, "generate_len": 4}
    batch = open_batch(
        target, random_prompts([40, 53]), draft_name="self", draft_model=model, **options
    )
    assert batch.decoder.generate(batch.draft).tokens == batch.decoder.generate().tokens
