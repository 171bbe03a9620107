"""The flash backend against SDPA. flash-attn needs a GPU, so a stand-in follows its documentation: what is tested is
what we make of it, above all the merging of old and new entries.
"""

import sys
from types import SimpleNamespace

import pytest
import torch

from magicdec.attention.choice import choose
from magicdec.attention.flash import FlashAttention
from magicdec.errors import UserError
from magicdec.measure.footprint import Allocations
from tests.attention.twins import attend, attend_scored, case, check_positions, expected, selection

CUDA = torch.device("cuda")


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    """flash-attn 2.8's signature and meaning: (B, T, H, D) over (B, S, K, D), the causal mask and the window aligned to
    the bottom right corner of each row's valid entries; the log-sum-exp is (B, H, T), +inf where nothing is seen.
    """
    assert k is None
    assert v is None
    assert q.shape[2] % k_cache.shape[2] == 0
    (B, T, _, D), S = q.shape, k_cache.shape[1]
    if cache_seqlens is None:
        cache_seqlens = torch.full((B,), S, dtype=torch.int32)
    assert cache_seqlens.dtype == torch.int32
    group = q.shape[2] // k_cache.shape[2]
    keys, values = (x.repeat_interleave(group, 2).float() for x in (k_cache, v_cache))
    scores = torch.einsum("bthd,bshd->bhts", q.float(), keys) * (softmax_scale or D**-0.5)
    own = torch.arange(T)[:, None] + cache_seqlens[:, None, None] - T
    slot = torch.arange(S)
    hidden = (slot >= cache_seqlens[:, None, None]).expand(B, T, S).clone()
    right = 0 if causal else window_size[1]
    hidden |= (slot > own + right) if right >= 0 else False
    hidden |= (slot < own - window_size[0]) if window_size[0] >= 0 else False
    scores = scores.masked_fill(hidden[:, None], float("-inf"))
    lse = scores.logsumexp(-1)
    out = torch.einsum("bhts,bshd->bthd", scores.softmax(-1).nan_to_num(0), values).to(q.dtype)
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    return (out, lse) if return_softmax_lse else out


@pytest.fixture
def calls(monkeypatch):
    """The library's calls, as (query tokens, query heads, causal)."""
    made = []

    def recorded(q, *args, **kwargs):
        made.append((q.shape[1], q.shape[2], kwargs.get("causal", False)))
        return flash_attn_with_kvcache(q, *args, **kwargs)

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_with_kvcache=recorded))
    return made


@pytest.mark.parametrize("num_new", [1, 2, 5, 9, 40])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("window", [None, 3, 60])
def test_against_sdpa(calls, num_new, group, window):
    """The first row has no entries before its new ones; tolerances are those of fp32."""
    q, k, v, seqlens = case(num_new, group, 16, num_new + 90)
    out = attend(FlashAttention(), q, k, v, seqlens, window)
    torch.testing.assert_close(out, expected(q, k, v, seqlens, window), atol=1e-5, rtol=1e-5)


def test_a_verification_reads_the_cache_for_all_heads_at_once(calls):
    """As 5 x 4 tokens of the 2 KV heads, unmasked; then the new tokens causally, every head for itself."""
    attend(FlashAttention(), *case(5, 4, 16, 90))
    assert calls == [(20, 2, False), (5, 8, True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reduced_precision(calls, dtype):
    """Each part is rounded once before the merge, and their sum once: 1% in bf16, a tenth of that in fp16."""
    q, k, v, seqlens = case(5, 4, 64, 300, dtype)
    out = attend(FlashAttention(), q, k, v, seqlens)
    assert out.dtype == dtype
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(out.float(), expected(q, k, v, seqlens), atol=tolerance, rtol=tolerance)


def test_selected_slots(calls):
    q, k, v, seqlens = case(4, 4, 16, 90)
    indices = selection(seqlens, 4, 97, 50)
    out = attend(FlashAttention(), q, k, v, seqlens, None, indices)
    torch.testing.assert_close(out, expected(q, k, v, seqlens, None, indices), atol=1e-5, rtol=1e-5)


def test_a_window_over_slots_in_no_order(calls):
    check_positions(FlashAttention(), 4, 4, 16, 90, 50, 6)
    assert not calls


def test_a_library_that_packs_is_called_once(calls):
    attention = FlashAttention()
    attention._packs = True
    q, k, v, seqlens = case(5, 4, 16, 90)
    torch.testing.assert_close(attend(attention, q, k, v, seqlens), expected(q, k, v, seqlens), atol=1e-5, rtol=1e-5)
    assert calls == [(5, 8, True)]


def test_where_it_is_chosen(calls):
    assert choose("auto", CUDA, torch.bfloat16, [128])[0] == "flash"
    for dtype, dim, said in ((torch.float32, 128, "not in float32"), (torch.float16, 320, "at most 256, not 320")):
        with pytest.raises(UserError, match=said):
            choose("flash", CUDA, dtype, [dim])
        assert choose("auto", CUDA, dtype, [dim])[0] != "flash"


def test_where_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(UserError, match=r"attention=flash cannot be imported .*pip install .*'\.\[flash\]'"):
        choose("flash", CUDA, torch.bfloat16, [128])
    name, why = choose("auto", CUDA, torch.bfloat16, [128])
    assert name in ("triton", "sdpa")
    assert "flash cannot be imported" in why


@pytest.mark.parametrize(("num_new", "parts"), [(1, 1), (5, 2), (40, 1)])
def test_where_memory_is_foreseen_the_library_is_not_called(calls, num_new, parts):
    """Each part is an output, and its log-sum-exp where two are merged; the merge computes in fp32."""
    q, k, v, _ = (x.to("meta") for x in case(num_new, 4, 16, 90))
    lengths = torch.zeros(len(q), dtype=torch.int32, device="meta")
    with Allocations([q, k, v, lengths]) as estimated:
        assert attend(FlashAttention(), q, k, v, lengths).shape == q.shape
    assert calls == []
    assert parts * q.nbytes <= estimated.peak <= (parts**3 + 1) * q.nbytes


def test_what_the_library_cannot_do_is_left_to_triton_on_a_gpu(calls, monkeypatch):
    """Selected slots and scores; where Triton cannot be had, and on this CPU, it is sdpa that does them."""
    pytest.importorskip("triton")
    from magicdec.attention.triton import TritonAttention

    asked = []
    monkeypatch.setattr(TritonAttention, "decode", lambda self, q, *_: asked.append("decode") or q)
    monkeypatch.setattr(TritonAttention, "decode_scored", lambda self, q, *_: asked.append("scored") or (q, q))
    q, k, v, seqlens = case(2, 4, 64, 90, torch.bfloat16)
    indices = selection(seqlens, k.shape[1], k.shape[2], 20)
    for device in ("cpu", "meta"):
        arguments = [x.to(device) for x in (q, k, v, seqlens)]
        attend(FlashAttention(), *arguments, None, indices.to(device))
        attend_scored(FlashAttention(), *arguments)
    assert asked == ["decode", "scored"]
    assert calls == []


@pytest.mark.gpu
@pytest.mark.parametrize("num_new", [1, 5])
def test_on_a_gpu(num_new):
    pytest.importorskip("flash_attn")
    arguments = [x.cuda() for x in case(num_new, 4, 128, 3000, torch.bfloat16)]
    out = attend(FlashAttention(), *arguments)
    torch.testing.assert_close(out.float(), expected(*arguments), atol=1e-2, rtol=1e-2)
