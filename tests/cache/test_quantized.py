"""The quantized cache: what codes may lose, and what must stay exact."""

import pytest
import torch

from magicdec.attention.sdpa import SdpaAttention
from magicdec.cache.quantized import Codes, Quantized, QuantizedCache
from magicdec.config.choices import CacheSpec
from magicdec.models.kv_cache import KVCache
from tests.small import small_model

CONFIG = small_model().config  # head_dim 8, 2 layers, 2 KV heads


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [4, 8, 32])
def test_every_number_is_within_half_a_step(bits, group_size):
    x = torch.randn(1, 2, 2, 9, 8) * 3
    codes = Codes(x.shape, bits, group_size, "cpu")
    codes.codes_LBKSC, codes.scales_LBKSN2 = codes.encode(x)
    size = min(group_size, 8)
    for row, decoded in zip(x.reshape(-1, size).tolist(), codes.decode(0, x.dtype).reshape(-1, size), strict=True):
        step = (max(row) - min(row)) / (2**bits - 1)
        assert (decoded - torch.tensor(row)).abs().max() <= 0.5 * step + 0.01 * max(abs(v) for v in row)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_scale_that_half_precision_rounds_down_overflows_no_code(bits):
    """The least and the largest of 16 numbers so small that their scale loses most of its digits."""
    x = torch.linspace(0, 1.45, 16).roll(5).view(1, 1, 1, 2, 8) * 2**bits * 2**-24
    codes = Codes(x.shape, bits, 8, "cpu")
    codes.codes_LBKSC, codes.scales_LBKSN2 = codes.encode(x)
    assert (codes.decode(0, x.dtype) - x[0]).abs().max() < 0.5 * x.max()


def test_equal_numbers_stay_what_they_are():
    x = torch.full((1, 1, 1, 1, 8), 2.5)
    codes = Codes(x.shape, 4, 8, "cpu")
    codes.codes_LBKSC, codes.scales_LBKSN2 = codes.encode(x)
    assert torch.equal(codes.decode(0, x.dtype), x[0])


@pytest.mark.parametrize("taken", [[0, 0], [2, 3]])
def test_old_entries_are_read_from_codes_and_recent_ones_exactly(taken):
    """Old entries are overwritten in the target after they were encoded: only recent ones may show it."""
    lengths = torch.tensor([30, 7], dtype=torch.int32)
    target = KVCache(CONFIG, 2, 40, torch.float32, "cpu")
    target.k_LBKSD.normal_()
    target.v_LBKSD.normal_()
    target.rollback(lengths)
    spec = CacheSpec(Quantized(budget=10, bits=8, group_size=8), 2, 37)
    cache = QuantizedCache.build(spec, CONFIG, 2, torch.float32, "cpu", target)
    cache.load(target)
    cache.take(target, cache.length_B, torch.tensor(taken, dtype=torch.int32), 3)
    lengths = lengths + torch.tensor(taken)
    q, attention = torch.randn(2, 1, CONFIG.num_heads, CONFIG.head_dim), SdpaAttention()
    plan = cache.plan(attention, 1, torch.float32)[0]
    before = cache.attend(0, q, attention, plan)
    exact = attention.attend(q, target.k_LBKSD[0], target.v_LBKSD[0], plan)
    torch.testing.assert_close(before[1], exact[1])  # a row within the budget loses nothing
    torch.testing.assert_close(before[0], exact[0], atol=0.03, rtol=0.03)
    target.k_LBKSD[:, 0, :, : int(lengths[0]) - 10] = 100.0
    assert torch.equal(cache.attend(0, q, attention, plan), before)
    target.v_LBKSD[:, 0, :, int(lengths[0]) - 10] += 100.0
    assert not torch.equal(cache.attend(0, q, attention, plan), before)
