"""Calls to libraries for GPUs against their own signatures, recorded by version and source: none is
installed here.
"""

import sys
from collections.abc import Callable
from inspect import Parameter, Signature
from types import SimpleNamespace

import pytest
import torch

from magicdec.attention.cuda.flash import FlashAttention
from magicdec.attention.cuda.flashinfer import FlashInferAttention
from tests.attention.twins import attend, case
from tests.gpu_rehearsal.fake import engine, fake_cuda, prefilled, rounds

# flash-attn 2.8.3, flash_attn/flash_attn_interface.py
FLASH_2 = (
    "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None"
    " cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None causal=False"
    " window_size=None softcap=0.0 rotary_interleaved=True alibi_slopes=None num_splits=0"
    " return_softmax_lse=False"
)
# flash-attn, hopper/flash_attn_interface.py at commit 01afd16d
FLASH_3 = (
    "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None cache_seqlens=None"
    " cache_batch_idx=None cache_leftpad=None page_table=None cu_seqlens_q=None"
    " cu_seqlens_k_new=None max_seqlen_q=None rotary_seqlens=None q_descale=None k_descale=None"
    " v_descale=None softmax_scale=None causal=False window_size=None attention_chunk=0 softcap=0.0"
    " rotary_interleaved=True scheduler_metadata=None num_splits=0 pack_gqa=None sm_margin=0"
    " return_softmax_lse=False"
)
# FlashInfer, flashinfer/prefill.py at commit c91093d3: BatchPrefillWithPagedKVCacheWrapper
FLASHINFER = {
    "__init__": (
        "float_workspace_buffer kv_layout=NHD use_cuda_graph=False qo_indptr_buf=None"
        " paged_kv_indptr_buf=None paged_kv_indices_buf=None paged_kv_last_page_len_buf=None"
        " custom_mask_buf=None mask_indptr_buf=None backend=auto jit_args=None jit_kwargs=None"
    ),
    "plan": (
        "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads"
        " num_kv_heads head_dim_qk page_size head_dim_vo=None custom_mask=None"
        " packed_custom_mask=None causal=False pos_encoding_mode=NONE use_fp16_qk_reduction=False"
        " sm_scale=None window_left=-1 logits_soft_cap=None rope_scale=None rope_theta=None"
        " q_data_type=float16 kv_data_type=None o_data_type=None non_blocking=True"
        " prefix_len_ptr=None"
    ),
    "run": "q paged_kv_cache k_scale=None v_scale=None out=None lse=None return_lse=False",
}


def recorded(signature: str, calls: list[dict], result: Callable = lambda _: None) -> Callable:
    """A function that takes no other arguments than these, and keeps them."""
    pairs = [word.partition("=") for word in signature.split()]
    kind = Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        Parameter(name, kind, default=value if eq else Parameter.empty) for name, eq, value in pairs
    ]

    def call(*args, **kwargs):
        calls.append(Signature(parameters).bind(*args, **kwargs).arguments)
        return result(calls[-1])

    return call


def check_flash(call: dict, rows: int) -> None:
    """Check what the library checks: types, contiguous entries, lengths in int32, whole groups of
    heads.
    """
    q, k, v, lengths = call["q"], call["k_cache"], call["v_cache"], call["cache_seqlens"]
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert k.shape == v.shape == (rows, k.shape[1], k.shape[2], q.shape[3])
    assert q.shape[2] % k.shape[2] == 0
    assert (lengths.dtype, lengths.shape, lengths.is_contiguous()) == (torch.int32, (rows,), True)
    assert call["causal"]


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(("num_new", "window"), [(1, None), (5, 60), (200, None)])
def test_flash(version, num_new, window, monkeypatch):
    calls: list[dict] = []
    function = recorded(
        FLASH_2 if version == 2 else FLASH_3, calls, lambda call: torch.empty_like(call["q"])
    )
    module = SimpleNamespace(flash_attn_with_kvcache=function)
    monkeypatch.setitem(sys.modules, {2: "flash_attn", 3: "flash_attn_interface"}[version], module)
    if version == 3:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    attention = FlashAttention()
    monkeypatch.undo()
    q, k, v, lengths = case(num_new, 4, 64, 300, torch.bfloat16)
    assert attend(attention, q, k, v, lengths, window).shape == q.shape
    (call,) = calls
    check_flash(call, len(q))
    assert call["window_size"] == ((-1, -1) if window is None else (window - 1, 0))


def test_flashinfer(monkeypatch):
    calls: list[dict] = []

    class Wrapper:
        def __init__(self, *args, **kwargs):
            recorded(FLASHINFER["__init__"], calls)(*args, **kwargs)

        def plan(self, *args, **kwargs):
            recorded(FLASHINFER["plan"], calls)(*args, **kwargs)

        def run(self, *args, **kwargs):
            return recorded(FLASHINFER["run"], calls, lambda call: torch.empty_like(call["q"]))(
                *args, **kwargs
            )

    monkeypatch.setitem(
        sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    )
    q, k, v, lengths = case(5, 4, 64, 300, torch.bfloat16)
    attend(FlashInferAttention(), q, k, v, lengths)
    made, planned, run = calls
    assert (made["kv_layout"], made["backend"]) == ("HND", "fa2")
    assert [
        planned[key] for key in ("num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size")
    ] == [8, 2, 64, 16]
    assert planned["q_data_type"] == torch.bfloat16
    # Its page.cuh finds an entry at page x stride(0) + head x stride(1) + slot x stride(2), in 64
    # bits.
    (keys, values), pages = run["paged_kv_cache"], planned["paged_kv_indices"]
    assert keys.stride() == values.stride()
    last = pages[planned["paged_kv_indptr"][1:].long() - 1].long() * keys.stride(0) + keys.stride(1)
    last += (planned["paged_kv_last_page_len"].long() - 1) * keys.stride(2)
    rows = torch.arange(3)
    assert torch.equal(k.flatten()[last], k[rows, 1, lengths.long() - 1, 0])


@pytest.mark.slow
def test_flash_adds_no_kernels_to_a_verification(monkeypatch):
    """Where Triton's kernel reads K and V once, FlashAttention-2 leaves it a verification, with no
    operator more.
    """
    calls: list[dict] = []
    function = recorded(FLASH_2, calls, lambda call: torch.empty_like(call["q"]))
    monkeypatch.setitem(
        sys.modules, "flash_attn", SimpleNamespace(flash_attn_with_kvcache=function)
    )
    counts = {}
    for attention in ("triton", "flash"):
        with fake_cuda() as recording:
            seen = rounds(prefilled(engine(attention=attention)), recording)
        assert not seen.faults
        counts[attention] = [seen.count(part) for part in ("verify", "propose")]
    assert counts["flash"][0] == counts["triton"][0]
    assert sum((counts["flash"][1] - counts["triton"][1]).values()) == 0
    assert {call["q"].shape[1] for call in calls} == {1}
