"""Cases for kernels of few new tokens, and SDPA's answer to each in fp32: the twin that every backend is to meet."""

import torch

from magicdec.attention.base import Attention, Shape
from magicdec.attention.sdpa import SdpaAttention

ROWS, KV_HEADS = 3, 2


def case(num_new, group, dim, longest, dtype=torch.float32):
    """Rows from no longer than their new tokens to `longest`; the cache has slots to spare, filled with noise."""
    generator = torch.Generator().manual_seed(num_new + group)
    q = torch.randn(ROWS, num_new, KV_HEADS * group, dim, generator=generator).to(dtype)
    k, v = torch.randn(2, ROWS, KV_HEADS, longest + 7, dim, generator=generator).to(dtype)
    seqlens = torch.tensor([num_new, (num_new + longest) // 2, longest], dtype=torch.int32)
    return q, k, v, seqlens


def selection(seqlens, num_new, capacity, count):
    """Distinct slots in any order, the new tokens among them, some negative, some behind the valid ones."""
    generator = torch.Generator().manual_seed(count)
    orders = [torch.randperm(capacity, generator=generator)[:count] for _ in range(ROWS * KV_HEADS)]
    chosen = torch.stack(orders).view(ROWS, KV_HEADS, -1)
    new = seqlens[:, None] - num_new + torch.arange(num_new)
    chosen[(chosen[..., None] == new[:, None, None]).any(-1)] = -1
    return torch.cat((chosen, new[:, None].expand(-1, KV_HEADS, -1)), dim=-1)


def attend(backend: Attention, q, k, v, seqlens, window=None, indices=None):
    """One call of a backend."""
    shape = Shape(q.shape[1], k.shape[2], q.shape[2] // k.shape[1], q.dtype)
    return backend.attend(q, k, v, backend.plan(seqlens, shape, window), indices)


def attend_scored(backend: Attention, q, k, v, seqlens, window=None, counted=None):
    """One call of a backend that returns scores, with a score for every slot."""
    shape = Shape(q.shape[1], k.shape[2], q.shape[2] // k.shape[1], q.dtype)
    out, scores = backend.attend_scored(q, k, v, backend.plan(seqlens, shape, window), counted)
    return out, torch.nn.functional.pad(scores, (0, k.shape[2] - scores.shape[-1]))


def some_tokens(num_new):
    """Which new tokens count: in one row all, in one none, in one the last; all in one piece only when transposed."""
    return torch.stack((torch.ones(num_new), torch.zeros(num_new), torch.arange(num_new) == num_new - 1), 1).bool().T


def expected(q, k, v, seqlens, window=None, indices=None):
    """SDPA on the same numbers, in fp32."""
    return attend(SdpaAttention(), q.float(), k.float(), v.float(), seqlens, window, indices)


def expected_scored(q, k, v, seqlens, window=None, counted=None):
    """The same with scores."""
    return attend_scored(SdpaAttention(), q.float(), k.float(), v.float(), seqlens, window, counted)
