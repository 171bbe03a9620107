"""PyTorch's attention for rows of different lengths over our cache, against a stand-in written from
its documentation, and its own function without storage. The kernel runs on GPUs.
"""

import sys
from inspect import signature
from types import ModuleType

import pytest
import torch
from torch.utils._pytree import tree_map_only

from magicdec.attention.backends import choose
from magicdec.attention.cuda import varlen
from magicdec.attention.cuda.varlen import VarlenAttention
from magicdec.errors import UserError
from tests.attention.twins import attend, case, check, check_positions, definition, expected

CUDA = torch.device("cuda")


def described(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size, enable_gqa, seqused_k
):
    """As documented: sequence i has the queries from cu_seq_q[i] on, and the first seqused_k[i] of
    the keys from cu_seq_k[i] on; the last query sees up to the last key.
    """
    left, right = window_size
    assert right == 0, "causal"
    assert all(x.dtype == torch.int32 for x in (cu_seq_q, cu_seq_k, seqused_k))
    assert max_k >= int(seqused_k.max())
    assert enable_gqa == (query.shape[1] != key.shape[1])
    out = torch.empty_like(query)
    for i, length in enumerate(seqused_k.tolist()):
        mine, first = slice(int(cu_seq_q[i]), int(cu_seq_q[i + 1])), int(cu_seq_k[i])
        assert mine.stop - mine.start <= max_q
        k, v = (x[first : first + length].transpose(0, 1)[None] for x in (key, value))
        window = None if left < 0 else left + 1
        right_out, _ = definition(query[mine][None], k, v, torch.tensor([length]), window)
        out[mine] = right_out[0].to(out.dtype)
    return out


@pytest.fixture
def calls(monkeypatch):
    """Let the stand-in answer; a list of the arguments of each call, and its output."""
    made = []

    def answer(*arguments, **given):
        out = described(*arguments, **given)
        made.append((arguments, given, out))
        return out

    monkeypatch.setattr(varlen, "library", lambda: answer)
    return made


@pytest.mark.parametrize("num_new", [1, 5, 40])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("window", [None, 3, 60])
def test_against_the_definition(calls, num_new, group, window):
    """Without Triton, every pass is the library's."""
    check(VarlenAttention(), num_new, group, 16, 73, window)
    assert len(calls) == 1


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("window", [None, 3])
def test_pytorch_takes_the_same_arguments(calls, group, window):
    try:
        from torch.nn.attention.varlen import varlen_attn

        if missing := varlen.NEEDED - signature(varlen_attn).parameters.keys():
            pytest.skip(f"this PyTorch's function has no {', '.join(sorted(missing))}")
    except ImportError:
        pytest.skip("this PyTorch has no attention for rows of different lengths")
    check(VarlenAttention(), 5, group, 16, 73, window)
    [(arguments, given, out)] = calls
    arguments, given = tree_map_only(torch.Tensor, lambda x: x.to("meta"), (arguments, given))
    assert varlen_attn(*arguments, **given).shape == out.shape


def test_selected_slots_and_a_window_over_slots_in_no_order(calls):
    check(VarlenAttention(), 4, 4, 16, 90, chosen=50)
    check_positions(VarlenAttention(), 4, 4, 16, 90, 50, 6)


def test_decoding_and_verification_are_left_to_triton(calls):
    q, k, *_ = case(33, 4, 64, 90)
    assert VarlenAttention().takes(q, k)
    assert not VarlenAttention().takes(q[:, :32], k)


def test_what_the_kernel_does_not_take_is_named(calls):
    assert choose("varlen", CUDA, torch.bfloat16, [128])[0] == "varlen"
    assert choose("auto", CUDA, torch.bfloat16, [128])[0] != "varlen"
    for dtype, dim, said in (
        (torch.float32, 128, "not in float32"),
        (torch.float16, 260, "at most 256, not 260"),
    ):
        with pytest.raises(UserError, match=said):
            choose("varlen", CUDA, dtype, [dim])
    with pytest.raises(UserError, match="does not have attention sinks"):
        choose("varlen", CUDA, torch.bfloat16, [128], {"attention sinks"})


def test_what_pytorch_lacks_is_named(monkeypatch):
    def early(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size=(-1, -1)): ...

    module = ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = early
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    with pytest.raises(UserError, match=r"varlen_attn has no enable_gqa, seqused_k\); use"):
        choose("varlen", CUDA, torch.bfloat16, [128])
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    with pytest.raises(UserError, match="attention=varlen needs a newer PyTorch than"):
        choose("varlen", CUDA, torch.bfloat16, [128])


@pytest.mark.gpu
@pytest.mark.parametrize("num_new", [5, 40, 700])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("group", [1, 4])
def test_on_a_gpu(num_new, window, group):
    if obstacle := VarlenAttention.obstacle(torch.bfloat16, 128):
        pytest.skip(f"attention=varlen {obstacle}")
    arguments = [x.cuda() for x in case(num_new, group, 128, 3000, torch.bfloat16)]
    out = attend(VarlenAttention(), *arguments, window)
    torch.testing.assert_close(out.float(), expected(*arguments, window), atol=1.6e-2, rtol=1.6e-2)
