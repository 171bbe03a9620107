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


@pytest.fixture
def triton_calls(monkeypatch):
    """The kinds of Triton's calls, which return no numbers."""
    pytest.importorskip("triton")
    from magicdec.attention.triton import TritonAttention

    made = []
    monkeypatch.setattr(TritonAttention, "decode", lambda self, q, *_: made.append("decode") or q)
    monkeypatch.setattr(TritonAttention, "decode_scored", lambda self, q, *_: made.append("scored") or (q, q))
    monkeypatch.setattr(TritonAttention, "obstacle", lambda *_: None)
    return made


@pytest.mark.parametrize(
    ("num_new", "group", "packs", "by_triton"),
    [(1, 4, False, 0), (5, 4, False, 1), (5, 1, False, 0), (40, 4, False, 0), (5, 4, True, 0)],
)
def test_who_reads_keys_and_values_once(calls, triton_calls, num_new, group, packs, by_triton):
    """FlashAttention-2 reads them for each of several heads in a verification: that is Triton's."""
    attention = FlashAttention()
    attention._packs = packs
    attend(attention, *case(num_new, group, 16, num_new + 90))
    assert len(triton_calls) == by_triton
    assert calls == ([] if by_triton else [(num_new, 2 * group, True)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reduced_precision(calls, dtype):
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


@pytest.mark.parametrize("num_new", [1, 5, 40])
def test_a_memory_estimate_does_not_call_the_library(calls, num_new):
    q, k, v, _ = (x.to("meta") for x in case(num_new, 4, 16, 90))
    lengths = torch.zeros(len(q), dtype=torch.int32, device="meta")
    with Allocations([q, k, v, lengths]) as estimated:
        assert attend(FlashAttention(), q, k, v, lengths).shape == q.shape
    assert calls == []
    assert estimated.peak == q.nbytes


def test_what_the_library_cannot_do_is_left_to_triton_on_a_gpu(calls, triton_calls, monkeypatch):
    """Selected slots and scores; where Triton cannot be had, and on this CPU, it is sdpa that does them."""
    q, k, v, seqlens = case(2, 4, 64, 90, torch.bfloat16)
    indices = selection(seqlens, k.shape[1], k.shape[2], 20)
    attend(FlashAttention(), q, k, v, seqlens, None, indices)
    attend_scored(FlashAttention(), q, k, v, seqlens)
    assert triton_calls == ["decode", "scored"]
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_with_kvcache=None))
    out = attend(FlashAttention(), q, k, v, seqlens, None, indices)
    torch.testing.assert_close(out.float(), expected(q, k, v, seqlens, None, indices), atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("num_new", [1, 5])
def test_on_a_gpu(num_new):
    pytest.importorskip("flash_attn")
    arguments = [x.cuda() for x in case(num_new, 4, 128, 3000, torch.bfloat16)]
    out = attend(FlashAttention(), *arguments)
    torch.testing.assert_close(out.float(), expected(*arguments), atol=1e-2, rtol=1e-2)
