"""The flashinfer backend against SDPA. The library needs a GPU, so a stand-in follows its
documentation: what is tested is what we tell it, above all where the pages lie.
"""

import sys
from types import SimpleNamespace

import pytest
import torch

from magicdec.attention.backends import choose
from magicdec.attention.cuda.flashinfer import PAGE, WORKSPACE, FlashInferAttention
from magicdec.errors import UserError
from magicdec.measure.footprint import Allocations
from tests.attention.twins import attend, case, check, check_positions, definition, expected

CUDA = torch.device("cuda")


class BatchPrefillWithPagedKVCacheWrapper:
    """flashinfer 0.2's interface and meaning: queries (all rows' tokens, H, D); keys and values in
    pages, in the layout HND (page, K, slot, D); a row's tokens are its last ones, causal;
    window_left does not count a token itself.
    """

    plans = 0

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, *, backend="auto"
    ):
        self.backend = backend
        assert (float_workspace_buffer.dtype, kv_layout, use_cuda_graph) == (
            torch.uint8,
            "HND",
            False,
        )

    def plan(self, *arguments, causal, window_left, q_data_type):
        tensors, sizes = arguments[:4], arguments[4:]
        _, pages, indices, last_page_lengths = tensors
        assert all(x.dtype == torch.int32 and x.device.type == "cpu" for x in tensors)
        assert len(indices) == pages[-1]
        assert sizes[-1] == PAGE
        assert ((last_page_lengths > 0) & (last_page_lengths <= PAGE)).all()
        assert causal
        self.told = *(x.tolist() for x in tensors), window_left
        self.sizes = *sizes, q_data_type
        type(self).plans += 1
        type(self).backends.append(self.backend)

    def run(self, q, paged_kv_cache):
        H, K, D, size, dtype = self.sizes
        queries, pages, indices, last, window_left = self.told
        k_pages, v_pages = paged_kv_cache
        assert q.dtype == dtype
        assert q.shape[1:] == (H, D)
        assert k_pages.shape[1:] == (K, size, D)
        assert k_pages.stride() == v_pages.stride()
        # The kernel follows strides, and reads no entry behind a row's last: the last page may end
        # outside of memory.
        shape = (k_pages.shape[0] + size - 1, K, D)
        strides = (k_pages.stride(2), k_pages.stride(1), 1)
        k_slots, v_slots = (
            x.as_strided(shape, strides, x.storage_offset()) for x in paged_kv_cache
        )
        of_page = k_pages.stride(0) // k_pages.stride(2)
        out = torch.empty_like(q)
        for b in range(len(last)):
            own = indices[pages[b] : pages[b + 1]]
            length = (len(own) - 1) * size + last[b]
            slots = (torch.tensor(own)[:, None] * of_page + torch.arange(size)).flatten()[:length]
            k, v = (x[slots].transpose(0, 1)[None] for x in (k_slots, v_slots))
            mine = slice(queries[b], queries[b + 1])
            window = None if window_left < 0 else window_left + 1
            out[mine] = definition(q[mine][None], k, v, torch.tensor([length]), window)[0][0].to(
                dtype
            )
        return out


@pytest.fixture
def library(monkeypatch):
    made = type("Wrapper", (BatchPrefillWithPagedKVCacheWrapper,), {"backends": []})
    monkeypatch.setitem(
        sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=made)
    )
    return made


@pytest.mark.parametrize("num_new", [1, 2, 5, 9, 40])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("window", [None, 3, 60])
@pytest.mark.parametrize("longest", [73, 80, 81])
def test_against_sdpa(library, num_new, group, window, longest):
    """Capacities that a page of 16 slots divides, and others: 80, 87 and 88. Few tokens are
    FlashAttention-2's.
    """
    check(FlashInferAttention(), num_new, group, 16, longest, window)
    assert library.backends == ["auto" if num_new == 40 else "fa2"]


def test_layers_share_a_plan(library):
    q, k, v, seqlens = case(5, 4, 16, 90)
    attention = FlashInferAttention()
    first = attend(attention, q, k, v, seqlens)
    assert torch.equal(attend(attention, q, k, v, seqlens), first)
    assert library.plans == 2
    [plan] = attention._planned.values()
    for _ in range(3):
        assert torch.equal(attention.attend(q, k, v, plan), first)
    assert library.plans == 2


def test_selected_slots_and_a_window_over_slots_in_no_order(library):
    check(FlashInferAttention(), 4, 4, 16, 90, chosen=50)
    check_positions(FlashInferAttention(), 4, 4, 16, 90, 50, 6)


def test_where_memory_is_foreseen_the_library_is_not_called(library):
    q, k, v, lengths = (x.to("meta") for x in case(5, 4, 16, 90))
    with Allocations([q, k, v, lengths]) as estimated:
        attend(FlashInferAttention(), q, k, v, lengths)
    assert library.plans == 0
    assert estimated.peak == WORKSPACE + q.nbytes


def test_where_it_is_chosen(library, monkeypatch):
    assert choose("flashinfer", CUDA, torch.bfloat16, [128])[0] == "flashinfer"
    assert choose("auto", CUDA, torch.bfloat16, [128])[0] != "flashinfer"
    for dtype, dim, said in (
        (torch.float32, 128, "not in float32"),
        (torch.float16, 96, "64, 128, 256, not 96"),
    ):
        with pytest.raises(UserError, match=said):
            choose("flashinfer", CUDA, dtype, [dim])
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(
        UserError, match=r"attention=flashinfer is not installed: .*'\.\[flashinfer\]'"
    ):
        choose("flashinfer", CUDA, torch.bfloat16, [128])


@pytest.mark.gpu
@pytest.mark.parametrize("num_new", [1, 5, 200])
def test_on_a_gpu(num_new):
    pytest.importorskip("flashinfer")
    arguments = [x.cuda() for x in case(num_new, 4, 128, 3000, torch.bfloat16)]
    out = attend(FlashInferAttention(), *arguments)
    torch.testing.assert_close(out.float(), expected(*arguments), atol=1e-2, rtol=1e-2)
