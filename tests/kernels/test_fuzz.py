"""The C++ kernels at sizes drawn at random: attention against its definition, in fp64, and a pass
against PyTorch's.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.attention.cpp import CppAttention
from magicdec.attention.sdpa import SdpaAttention
from magicdec.kernels import library
from magicdec.models import passes
from magicdec.models.kv_cache import KVCache
from tests.attention.twins import attend, attend_scored, definition
from tests.small import small_model
from tests.threads import threads

if library.compiler() is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2.5e-2}
# An instance of random.Random whose choices Hypothesis makes small.
DRAWN = given(st.randoms(note_method_calls=True))


@DRAWN
@settings(max_examples=100)
@torch.inference_mode()
def test_attention(r):
    T = r.choice([1, 2, 3, 5, 9, 31, 33, 70])
    L = r.choice([0, 1, 5, 30, 63, 100, 513, 1100])
    D = 8 * r.randint(1, 17)
    B = r.choice([1, 2, 5])
    K = r.choice([1, 2, 3])
    J = r.choice([1, 2, 3, 5, 7, 8]) if T * L < 5000 else 1
    S, dtype = T + L + r.choice([0, 1, 8]), r.choice(list(TOLERANCE))
    generator = torch.Generator().manual_seed(r.randint(0, 1000))
    gap = r.choice([0, 0, 8])  # of tensors that are a part of larger ones
    q = torch.randn(B, T, K * J + gap, D, generator=generator)[:, :, : K * J].to(dtype)
    k, v = torch.randn(2, B, K, S, D + gap, generator=generator)[..., :D].to(dtype)
    seqlens = torch.randint(T, T + L + 1, (B,), generator=generator, dtype=torch.int32)
    own_BKT = (seqlens[:, None] - T + torch.arange(T))[:, None].repeat(1, K, 1)
    modes = (
        ["all", "selected", "in no order", "scored"]
        if CppAttention.max_new_tokens >= T
        else ["all"]
    )
    window, mode = r.choice([None, 1, 7, 100, 600]), r.choice(modes)
    indices = positions = counted = None
    order_BKS = torch.rand(B, K, S, generator=generator).argsort(-1)
    if mode == "selected":
        kept_BKN = order_BKS[..., : L + 1]
        is_new = (kept_BKN[..., None] == own_BKT[:, :, None]).any(-1)
        indices = torch.cat((kept_BKN.masked_fill(is_new, -1), own_BKT), dim=2)
    if mode == "in no order":
        window, positions = window or 33, order_BKS.int().scatter_(2, own_BKT, own_BKT.int())
    if mode == "scored":
        counted = None if r.random() < 0.5 else torch.rand(B, T, generator=generator) < 0.5
    if poisoned := r.random() < 0.3:
        x = (q, k.transpose(1, 2), v.transpose(1, 2))[r.randint(0, 2)]
        place = (
            r.randrange(B),
            r.randrange(min(T + L, x.shape[1])),
            r.randrange(x.shape[2]),
            r.randrange(D),
        )
        x[place] = r.choice([math.nan, math.inf, -math.inf])
    with threads(r.randint(1, 4)):
        if mode == "scored":
            ours = attend_scored(CppAttention(), q, k, v, seqlens, window, counted)
        else:
            ours = (attend(CppAttention(), q, k, v, seqlens, window, indices, positions),)
    right = definition(q, k, v, seqlens, window, indices, positions, counted)
    for mine, expected, terms in zip(ours[: 1 if poisoned else 2], right, (1, J * T), strict=False):
        # What is not finite must not seem to be; but one such number may spoil more than it should.
        finite, tolerance = mine.isfinite(), terms * TOLERANCE[dtype]
        assert poisoned or finite.all()
        torch.testing.assert_close(
            mine[finite].double(), expected[finite], atol=tolerance, rtol=tolerance
        )


@DRAWN
@settings(max_examples=60)
@torch.inference_mode()
def test_a_pass(r):
    K = r.choice([1, 2, 3])
    num_layers = r.choice([1, 3])
    head_dim = 8 * r.randint(1, 9)
    sliding = r.random() < 0.3
    sizes = {
        "num_layers": num_layers,
        "num_heads": K * r.choice([1, 2, 3, 5, 8]),
        "num_kv_heads": K,
    }
    sizes |= {
        "hidden_size": r.randint(8, 100),
        "intermediate_size": r.randint(1, 130),
        "head_dim": head_dim,
    }
    sizes |= {part: r.random() < 0.3 for part in ("qkv_bias", "output_bias", "qk_norm")}
    sizes |= {"sliding_window": r.choice([5, 33]), "sliding_layers": (0,)} if sliding else {}
    model = small_model(r.randint(0, 1000), 0.1, **sizes)
    if r.random() < 0.3:
        for layer, name in itertools.product(model.layers, passes.MATRICES):
            getattr(layer, name).weight.data = getattr(layer, name).weight.data.bfloat16()
    (B, T), L = (
        r.choice([(1, 1), (1, 7), (3, 4), (24, 1), (16, 8), (4, 32)]),
        r.choice([1, 31, 64, 130]),
    )
    generator = torch.Generator().manual_seed(r.randint(0, 1000))
    tokens_BT = torch.randint(0, model.config.vocab_size, (B, T), generator=generator)
    seqlens_B = torch.randint(0, L + 1, (B,), generator=generator)
    entries = torch.randn(2, num_layers, B, K, L + T, head_dim, generator=generator)
    found = []
    for attention in (SdpaAttention(), CppAttention()):
        model.attention, cache = attention, KVCache(model.config, B, L + T, model.dtype, "cpu")
        cache.k_LBKSD[:], cache.v_LBKSD[:], cache.seqlens_B[:] = *entries, seqlens_B
        with threads(r.randint(1, 4)):
            found.append((model(tokens_BT, cache), cache.k_LBKSD, cache.v_LBKSD))
    torch.testing.assert_close(*found, atol=1e-3, rtol=1e-3)
