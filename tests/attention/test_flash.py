"""The flash backend against SDPA. flash-attn needs a GPU, so a stand-in follows its documentation:
what is tested is what we make of it.
"""

import sys
from types import SimpleNamespace

import pytest
import torch

from magicdec.attention.backends import choose
from magicdec.attention.base import Weighting
from magicdec.attention.cuda.flash import FlashAttention, Library
from magicdec.attention.cuda.triton import TritonAttention
from magicdec.attention.cuda.triton_fallback import LibraryAttention
from magicdec.engine.graphs import Captures, Step
from magicdec.errors import UserError
from magicdec.measure.footprint import Allocations
from tests.attention import twins
from tests.programs import ROOT

CUDA = torch.device("cuda")


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    *,
    cache_seqlens,
    causal,
    window_size,
    softcap=0.0,
    return_softmax_lse=False,
):
    """flash-attn 2.8's meaning of these: (B, T, H, D) over (B, S, K, D), the causal mask and the
    window aligned to the bottom right corner of each row's valid entries; a window does not count a
    token itself, and -1 is none.
    """
    assert q.shape[2] % k_cache.shape[2] == 0
    assert cache_seqlens.dtype == torch.int32
    assert causal
    left, right = window_size
    assert right in (-1, 0)
    keys, values = (x.transpose(1, 2) for x in (k_cache, v_cache))
    window, weighting = None if left < 0 else left + 1, Weighting(softcap=softcap or None)
    given = (q, keys, values, cache_seqlens, window)
    out = twins.definition(*given, weighting=weighting)[0].to(q.dtype)
    if not return_softmax_lse:
        return out
    # With a sink of 0 weights sum to e^lse / (e^lse + 1); values of 1 show that sum.
    with_sink = Weighting(torch.zeros(q.shape[2]), softcap or None)
    ones = torch.ones_like(values)
    given = (q, keys, ones, cache_seqlens, window)
    share_BTH = twins.definition(*given, weighting=with_sink)[0][..., 0]
    return out, torch.logit(share_BTH).transpose(1, 2)


@pytest.fixture
def calls(monkeypatch):
    """The library's calls, as (query tokens, query heads, causal)."""
    made = []

    def recorded(q, *args, **kwargs):
        made.append((q.shape[1], q.shape[2], kwargs.get("causal", False)))
        return flash_attn_with_kvcache(q, *args, **kwargs)

    monkeypatch.setitem(
        sys.modules, "flash_attn", SimpleNamespace(flash_attn_with_kvcache=recorded)
    )
    return made


@pytest.mark.parametrize("num_new", [1, 2, 5, 9, 40])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("window", [None, 3, 60])
def test_against_sdpa(calls, num_new, group, window):
    """The first row has no entries before its new ones; tolerances are those of fp32."""
    twins.check(FlashAttention(), num_new, group, 16, num_new + 90, window)


@pytest.mark.parametrize(("num_new", "group"), [(1, 4), (5, 1), (40, 2)])
def test_sinks_and_soft_caps(calls, num_new, group):
    twins.check_weightings(FlashAttention(), num_new, group, 16)
    assert calls


@pytest.fixture
def triton_calls(monkeypatch):
    """The kinds of Triton's calls, which return no numbers."""
    made = []
    monkeypatch.setattr(TritonAttention, "decode", lambda self, q, *_: made.append("decode") or q)
    monkeypatch.setattr(
        TritonAttention, "decode_scored", lambda self, q, *_: made.append("scored") or (q, q)
    )
    monkeypatch.setattr(LibraryAttention, "_triton_for", lambda self, *_: self._triton)
    return made


@pytest.mark.parametrize(
    ("num_new", "group", "packs", "by_triton"),
    [(1, 4, False, 0), (5, 4, False, 1), (5, 1, False, 0), (40, 4, False, 0), (5, 4, True, 0)],
)
def test_who_reads_keys_and_values_once(calls, triton_calls, num_new, group, packs, by_triton):
    """FlashAttention-2 reads them for each of several heads in a verification: that is Triton's."""
    attention = FlashAttention()
    attention._packs = packs
    twins.attend(attention, *twins.case(num_new, group, 16, num_new + 90))
    assert len(triton_calls) == by_triton
    assert calls == ([] if by_triton else [(num_new, 2 * group, True)])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_reduced_precision(calls, dtype, tolerance):
    twins.check(FlashAttention(), 5, 4, 64, 300, None, dtype, tolerance=tolerance)


def test_selected_slots_and_a_window_over_slots_in_no_order(calls):
    twins.check(FlashAttention(), 4, 4, 16, 90, chosen=50)
    twins.check_positions(FlashAttention(), 4, 4, 16, 90, 50, 6)
    assert not calls


@pytest.fixture
def without_triton(monkeypatch):
    """A machine on which Triton cannot be used."""
    monkeypatch.setattr(TritonAttention, "obstacle", classmethod(lambda *_: "is not installed"))


@pytest.mark.parametrize("packs", [True, False])
def test_triton_comes_first_until_a_library_is_measured_to_be_faster(calls, packs, monkeypatch):
    """Whichever version is installed: on an H200, Triton's kernel reads keys and values as fast as
    a copy.
    """
    monkeypatch.setattr(
        "magicdec.attention.cuda.flash.library", lambda: Library(None, packs, "FlashAttention")
    )
    assert FlashAttention.obstacle(torch.bfloat16, 128) is None
    assert choose("auto", CUDA, torch.bfloat16, [128]) == (
        "triton",
        "attention=auto: triton is the fastest at hand",
    )


def test_where_it_is_chosen(calls, without_triton):
    assert choose("auto", CUDA, torch.bfloat16, [128])[0] == "flash"
    for dtype, dim, said in (
        (torch.float32, 128, "not in float32"),
        (torch.float16, 320, "at most 256, not 320"),
    ):
        with pytest.raises(UserError, match=said):
            choose("flash", CUDA, dtype, [dim])
        assert choose("auto", CUDA, dtype, [dim])[0] != "flash"


@pytest.fixture
def machine(monkeypatch):
    """A GPU that is not there, and a PyTorch of another version."""

    def become(capability, version="2.13.0+cu130", cuda="13.0"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (capability, 0))
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        for module in (
            "flash_attn_3",
            "flash_attn_3.flash_attn_interface",
            "flash_attn_interface",
            "flash_attn",
        ):
            monkeypatch.setitem(sys.modules, module, None)

    return become


@pytest.mark.parametrize(
    ("capability", "installed", "packs", "found"),
    [
        (9, ["flash_attn_interface"], True, "FlashAttention-3"),
        (9, ["flash_attn_3.flash_attn_interface", "flash_attn"], True, "FlashAttention-3"),
        (
            9,
            ["flash_attn"],
            False,
            "FlashAttention-2; FlashAttention-3 cannot be imported (import of flash_attn_in",
        ),
        (8, ["flash_attn_interface", "flash_attn"], False, "FlashAttention-2"),
    ],
)
def test_the_version_that_is_found(
    machine, without_triton, monkeypatch, capability, installed, packs, found
):
    machine(capability)
    for module in installed:
        monkeypatch.setitem(
            sys.modules, module, SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
        )
        monkeypatch.setitem(
            sys.modules, module.partition(".")[0], SimpleNamespace(**vars(sys.modules[module]))
        )
    assert FlashAttention()._packs == packs
    assert FlashAttention.version().startswith(found)
    _, why = choose("auto", CUDA, torch.bfloat16, [128])
    assert why.startswith(f"attention=auto: flash is the fastest at hand; {found}")


INDEX = "pip install --no-deps flash-attn-3 --index-url https://download.pytorch.org/whl"


@pytest.mark.parametrize(
    ("machine_is", "typed"),
    [
        ((9, "2.13.0+cu130", "13.0"), f"{INDEX}/cu130"),
        ((9, "2.13.0+cu128", "12.8"), f"{INDEX}/cu128"),
        ((8, "2.13.0", "13.0"), None),
        ((10, "2.13.0", "13.0"), None),
        ((9, "2.13.0", "13.2"), None),
    ],
)
def test_where_it_is_not_installed(machine, without_triton, machine_is, typed):
    """One line says why, and what to type; the page of attention backends has the same commands."""
    machine(*machine_is)
    with pytest.raises(UserError) as error:
        choose("flash", CUDA, torch.bfloat16, [128])
    said = str(error.value)
    assert said.startswith("attention=flash is not installed: FlashAttention-")
    assert (
        f"; install it: {typed}; use" in said
        if typed
        else "; no wheel is known for this GPU, PyTorch" in said
    )
    name, why = choose("auto", CUDA, torch.bfloat16, [128])
    assert name == "sdpa"
    assert "flash is not installed" in why
    if typed:
        assert typed.replace("cu128", "cu130") in (ROOT / "docs/attention.md").read_text(
            encoding="utf-8"
        )


@pytest.mark.parametrize("num_new", [1, 5, 40])
def test_a_memory_estimate_does_not_call_the_library(calls, num_new):
    q, k, v, _ = (x.to("meta") for x in twins.case(num_new, 4, 16, 90))
    lengths = torch.zeros(len(q), dtype=torch.int32, device="meta")
    with Allocations([q, k, v, lengths]) as estimated:
        assert twins.attend(FlashAttention(), q, k, v, lengths).shape == q.shape
    assert calls == []
    assert estimated.peak == q.nbytes


def test_what_the_library_cannot_do_is_left_to_triton_on_a_gpu(calls, triton_calls, monkeypatch):
    """Selected slots and scores; where Triton cannot be had, and on this CPU, it is sdpa that does
    them.
    """
    q, k, v, seqlens = twins.case(2, 4, 64, 90, torch.bfloat16)
    indices = twins.selection(seqlens, k.shape[1], k.shape[2], 20)
    twins.attend(FlashAttention(), q, k, v, seqlens, None, indices)
    twins.attend_scored(FlashAttention(), q, k, v, seqlens)
    assert triton_calls == ["decode", "scored"]
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_with_kvcache=None))
    out = twins.attend(FlashAttention(), q, k, v, seqlens, None, indices)
    torch.testing.assert_close(
        out.float(), twins.expected(q, k, v, seqlens, None, indices), atol=2e-2, rtol=2e-2
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("window", [None, 3, 700])
@pytest.mark.parametrize("num_new", [*range(1, 10), 200])
def test_on_a_gpu(num_new, window, dim):
    """Whichever version is installed, called as it is and captured; a replay reads the lengths of
    its time.
    """
    try:
        attention = FlashAttention()
    except ImportError as error:
        pytest.skip(str(error))
    q, k, v, lengths = (x.cuda() for x in twins.case(num_new, 4, dim, 3000, torch.bfloat16))
    out = twins.attend(attention, q, k, v, lengths, window)
    torch.testing.assert_close(
        out.float(), twins.expected(q, k, v, lengths, window), atol=1e-2, rtol=1e-2
    )

    def again() -> None:
        out.copy_(twins.attend(attention, q, k, v, lengths, window))

    step = Step(again, Captures(lengths.device))
    for fewer in (0, 1, 33):
        lengths[1:] -= fewer
        step()
        torch.testing.assert_close(
            out.float(), twins.expected(q, k, v, lengths, window), atol=1e-2, rtol=1e-2
        )
