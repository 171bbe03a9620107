"""The operators for CPUs in C++ against PyTorch's: 1e-5 in fp32; in bf16, against PyTorch in fp32,
1%.
"""

import itertools

import pytest
import torch
from torch import nn

from magicdec.kernels.library import compiler
from magicdec.models.kv_cache import Place
from magicdec.models.operators import PYTORCH, CppOperators
from tests.threads import threads

if compiler() is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# Of x and of a matrix.
DTYPES = [(torch.float32,) * 2, (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2]
SIZES = (8, 23, 64, 200)  # less than a vector, whole vectors, and a rest


@pytest.fixture(scope="module")
def ops():
    return CppOperators()


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_close(ours, right, dtype):
    assert ours.dtype == dtype
    torch.testing.assert_close(
        ours.float(), right.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 128, 129])
@pytest.mark.parametrize("dtypes", DTYPES)
@torch.inference_mode()
def test_matmul(ops, rows, dtypes):
    dtype = dtypes[0]
    for columns, outputs, biased in itertools.product(SIZES, (1, 8, 70), (False, True)):
        x = random(rows, columns, dtype=dtype)
        weight = random(outputs, columns, dtype=dtypes[1]) / columns**0.5
        bias = random(outputs, dtype=dtype) if biased else None
        right = PYTORCH.matmul(x.float(), weight.float(), bias if bias is None else bias.float())
        assert_close(ops.matmul(x, weight, bias), right, dtype)


@torch.inference_mode()
def test_many_rows_in_bf16_are_multiplied_in_fp32_where_the_processor_has_no_bf16(ops, monkeypatch):
    """PyTorch's own way there takes several times as long."""
    x, weight = random(200, 64, dtype=torch.bfloat16), random(70, 64, dtype=torch.bfloat16) / 8
    bias = random(70, dtype=torch.bfloat16)
    right = (x.double() @ weight.double().T + bias.double()).bfloat16()
    monkeypatch.setattr("magicdec.models.operators.multiplies_bfloat16", lambda: False)
    monkeypatch.setattr("magicdec.models.operators.WIDENED", 32)
    multiplied, linear = [], torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(
        torch.ops.mkldnn,
        "_linear_pointwise",
        lambda *given: multiplied.append(given[0].dtype) or linear(*given),
    )
    assert_close(ops.matmul(x, weight, bias), right, torch.bfloat16)
    assert multiplied == [torch.float32] * 3, "32 rows of the weight at a time, and a rest"


@pytest.mark.parametrize("dtypes", DTYPES)
@torch.inference_mode()
def test_a_row_of_a_matmul_depends_neither_on_the_others_nor_on_threads(ops, dtypes):
    """Bit for bit: so verification, with many rows, agrees with autoregressive decoding, with
    few.
    """
    # More than one part, and a rest of everything.
    x, weight = random(128, 1500, dtype=dtypes[0]), random(70, 1500, dtype=dtypes[1])
    together = ops.matmul(x, weight)
    for rows in (1, 2, 3, 4, 5, 50):
        assert torch.equal(ops.matmul(x[:rows], weight), together[:rows])
        assert torch.equal(ops.matmul(x[-rows:], weight), together[-rows:])
    with threads(2):
        assert torch.equal(ops.matmul(x, weight), together)


@pytest.mark.parametrize("rows", [1, 8, 50])
@torch.inference_mode()
def test_products_of_bf16_numbers_are_added_in_fp32(ops, rows):
    """Without rounding: sums of whole numbers are exact, and only their result is rounded to
    bf16.
    """
    numbers = torch.Generator().manual_seed(rows)
    x, weight = (
        torch.randint(-128, 129, (n, 600), generator=numbers).bfloat16() for n in (rows, 40)
    )
    assert torch.equal(ops.matmul(x, weight), (x.double() @ weight.double().T).bfloat16())


@torch.inference_mode()
def test_linear_layers_keep_their_own_way_where_their_weights_are_not_plain(ops):
    class Doubled(nn.Module):
        def forward(self, x):
            return 2 * x

    x = random(2, 3, 8)
    assert torch.equal(ops.linear(Doubled(), x), 2 * x)
    layer = nn.Linear(8, 5)
    assert_close(ops.linear(layer, x), layer(x), torch.float32)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("size", SIZES)
@torch.inference_mode()
def test_add_norm(ops, size, dtype):
    norm = nn.RMSNorm(size, 1e-6).to(dtype)
    norm.weight.copy_(random(size))
    x, y = random(2, 3, size, dtype=dtype), 3 * random(2, 3, size + 1, dtype=dtype)[..., 1:]
    for ours, right in zip(
        ops.add_norm(norm, x, y), PYTORCH.add_norm(norm.float(), x.float(), y.float()), strict=True
    ):
        assert_close(ours, right, dtype)
        norm.to(dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("size", SIZES)
@torch.inference_mode()
def test_gated(ops, size, dtype):
    gate_up = 20 * random(2, 3, 2 * size, dtype=dtype)
    gate_up[0, 0, :3] = torch.tensor([-300.0, 300.0, 0.0])
    assert_close(ops.gated(gate_up), PYTORCH.gated(gate_up.float()), dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dim", [8, 24, 64])
@torch.inference_mode()
def test_rotate(ops, dim, normed, dtype):
    """Queries, and what is written to the cache: the new tokens' slots alone."""
    B, T, H, K, S = 3, 2, 4, 2, 9
    angles = random(B, T, 1, dim // 2)
    norms = None
    if normed:
        norms = tuple(nn.RMSNorm(dim, 1e-6).to(dtype) for _ in range(2))
        for norm in norms:
            norm.weight.copy_(random(dim))
    slots = torch.tensor([[0, 1], [7, 8], [3, 4]])

    def place(dtype):
        # Strides of a larger tensor.
        k, v = torch.zeros(2, B, K, S + 2, dim, dtype=dtype)[..., 1:-1, :]
        return Place(k, v, torch.arange(B)[:, None], slots)

    qkv = random(B, T, H + 2 * K, dim, dtype=dtype)
    ours, right = place(dtype), place(torch.float32)
    q = ops.rotate(qkv.clone(), H, norms, angles.cos(), angles.sin(), ours)
    wide = None if norms is None else tuple(norm.float() for norm in norms)
    expected = PYTORCH.rotate(qkv.float(), H, wide, angles.cos(), angles.sin(), right)
    assert_close(q, expected, dtype)
    assert_close(ours.k_BKSD, right.k_BKSD, dtype)
    assert_close(ours.v_BKSD, right.v_BKSD, dtype)
    if norms is not None:
        norms = tuple(norm.to(dtype) for norm in norms)
    assert_close(
        ops.rotate(qkv.clone(), H, norms, angles.cos(), angles.sin(), None), expected, dtype
    )
