"""The C++ backend against SDPA. Tolerances: 1e-5 in fp32; in bf16, against SDPA in fp32 on the same numbers, 1%."""

import itertools

import pytest
import torch

from magicdec.attention import cpp
from magicdec.attention.base import Shape
from magicdec.attention.sdpa import SdpaAttention
from magicdec.errors import UserError

if cpp.compiler() is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
ROWS, KV_HEADS = 3, 2


@pytest.fixture(scope="module")
def attention():
    return cpp.CppAttention()


def case(num_new, group, dim, longest, dtype=torch.float32):
    """Rows from no longer than their new tokens to `longest`; the cache has slots to spare, filled with noise."""
    generator = torch.Generator().manual_seed(num_new + group)
    q = torch.randn(ROWS, num_new, KV_HEADS * group, dim, generator=generator).to(dtype)
    k, v = torch.randn(2, ROWS, KV_HEADS, longest + 7, dim, generator=generator).to(dtype)
    seqlens = torch.tensor([num_new, (num_new + longest) // 2, longest], dtype=torch.int32)
    return q, k, v, seqlens


def both(attention, q, k, v, seqlens, window=None, indices=None):
    """What the backend gives, and SDPA in fp32."""
    outputs = []
    for backend, dtype in ((attention, q.dtype), (SdpaAttention(), torch.float32)):
        shape = Shape(q.shape[1], k.shape[2], q.shape[2] // KV_HEADS, dtype)
        plan = backend.plan(seqlens, shape, window)
        outputs.append(backend.attend(q.to(dtype), k.to(dtype), v.to(dtype), plan, indices))
    return outputs


@pytest.mark.parametrize("num_new", [1, 2, 5, 9, cpp.MAX_NEW_TOKENS, cpp.MAX_NEW_TOKENS + 1])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_against_sdpa(attention, num_new, group, dtype):
    """Lengths within a block, over several, and over several splits; head dims of one vector and of many."""
    for dim, longest, window in itertools.product((8, 80), (num_new + 30, 1300), (None, 3, 600)):
        out, expected = both(attention, *case(num_new, group, dim, longest, dtype), window)
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("num_new", [1, 4])
@pytest.mark.parametrize("window", [None, 6])
def test_selected_slots_against_sdpa(attention, num_new, window):
    """Distinct slots in any order, the new tokens among them, some negative, some behind the valid ones."""
    q, k, v, seqlens = case(num_new, 4, 64, 700)
    chosen = torch.stack([torch.randperm(707)[:601] for _ in range(ROWS * KV_HEADS)]).view(ROWS, KV_HEADS, -1)
    new = seqlens[:, None] - num_new + torch.arange(num_new)
    chosen[(chosen[..., None] == new[:, None, None]).any(-1)] = -1
    indices = torch.cat((chosen, new[:, None].expand(-1, KV_HEADS, -1)), dim=-1)
    out, expected = both(attention, q, k, v, seqlens, window, indices)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_views_of_larger_tensors(attention):
    """Queries as they come out of a joint projection, and a cache's layer: strides are the caller's."""
    q, k, v, seqlens = case(3, 2, 16, 100)
    out, _ = both(attention, q, k, v, seqlens)
    wide_q = torch.cat((q, q), dim=2)[:, :, : q.shape[2]]
    wide_k = torch.cat((k, k), dim=3).transpose(1, 2).contiguous().transpose(1, 2)[..., : k.shape[3]]
    again, _ = both(attention, wide_q, wide_k, v, seqlens)
    assert torch.equal(out, again)


def test_what_lies_behind_the_valid_entries_is_never_read(attention):
    q, k, v, seqlens = case(2, 2, 16, 600)
    for b, length in enumerate(seqlens.tolist()):
        k[b, :, length:], v[b, :, length:] = float("nan"), float("nan")
    out, _ = both(attention, q, k, v, seqlens)
    assert out.isfinite().all()


def test_a_row_depends_neither_on_its_neighbours_nor_on_threads(attention):
    q, k, v, seqlens = case(2, 2, 64, 1300)
    together, _ = both(attention, q, k, v, seqlens)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(both(attention, q, k, v, seqlens)[0], together)
    finally:
        torch.set_num_threads(threads)
    for b in range(ROWS):
        one = slice(b, b + 1)
        assert torch.equal(both(attention, q[one], k[one], v[one], seqlens[one])[0], together[one])


def test_scores_are_those_of_sdpa(attention):
    q, k, v, seqlens = case(3, 2, 16, 100)
    shape = Shape(3, k.shape[2], 2, q.dtype)
    ours = attention.attend_scored(q, k, v, attention.plan(seqlens, shape, None))
    theirs = SdpaAttention().attend_scored(q, k, v, SdpaAttention().plan(seqlens, shape, None))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_it_is_built_once_and_the_compiler_s_error_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(cpp, "library", lambda: tmp_path / "cache" / "kernel.so")
    assert "attention=cpp" in cpp.CppAttention.delay()
    monkeypatch.setattr(cpp, "SOURCE", tmp_path / "broken.cpp")
    (tmp_path / "broken.cpp").write_text("int main( {")
    with pytest.raises(UserError, match=r"^attention=cpp: \S+ failed: .*error.*; use attention=sdpa$"):
        cpp.build()
    assert list((tmp_path / "cache").iterdir()) == []
    (tmp_path / "broken.cpp").write_text("int fine;")
    built = cpp.build()
    monkeypatch.setattr(cpp, "compiler", lambda: None)
    assert cpp.build() == built
    assert cpp.CppAttention.delay() is None
    built.unlink()
    with pytest.raises(UserError, match="needs a C\\+\\+ compiler"):
        cpp.build()
