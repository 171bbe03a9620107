"""Bytes that the attention kernels load, counted by the interpreter of Triton; test_interpreted.py
runs this file.
"""

from collections import defaultdict

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from magicdec.attention.base import Shape
from magicdec.attention.cuda.triton import TritonAttention, Variant
from magicdec.kernels.split_kv import INTERPRETED
from tests.gpu_rehearsal.replay import loads_from_memory

assert INTERPRETED


@pytest.fixture
def loads(monkeypatch):
    """Call attention; return the slots (row x KV head, slot) of K that each program loads, by its
    number, in order.
    """

    def attend(num_rows, num_new, group, num_heads, lengths, dim=64):
        seen = defaultdict(list)
        q = torch.randn(num_rows, num_new, group * num_heads, dim, dtype=torch.bfloat16)
        k, v = torch.randn(2, num_rows, num_heads, max(lengths), dim, dtype=torch.bfloat16)
        k = k.contiguous()
        first, last, entry = k.data_ptr(), k.data_ptr() + k.nbytes, dim * k.element_size()
        load = InterpreterBuilder.create_masked_load

        def recorded(self, pointers, mask, *args):
            addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
            addresses = addresses[(addresses >= first) & (addresses < last)]
            if len(addresses):
                (x, y, z), (width, height, _) = self.grid_idx, self.grid_dim
                slots = (addresses - first) // entry
                seen[x + width * (y + height * z)] += [int(slot) for slot in np.unique(slots)]
                assert len(addresses) == dim * len(np.unique(slots))
            return load(self, pointers, mask, *args)

        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", recorded)
        plan = (attention := TritonAttention()).plan(
            torch.tensor(lengths, dtype=torch.int32),
            Shape(num_new, max(lengths), group, q.dtype),
            None,
        )
        attention.attend(q, k, v, plan)
        return [seen[number] for number in sorted(seen)]

    return attend


@pytest.mark.parametrize(("num_new", "group"), [(1, 4), (5, 4), (9, 8), (17, 4), (32, 4)])
def test_a_verification_reads_keys_once(loads, num_new, group):
    """Up to the largest tile, 128 query rows of a KV head, whatever the length of a row."""
    lengths = [300, 77]
    slots = [slot for program in loads(2, num_new, group, 2, lengths) for slot in program]
    assert len(slots) == len(set(slots)) == 2 * sum(lengths)


def test_a_prefill_reads_keys_from_memory_once(loads, monkeypatch):
    """The tiles of a head run at the same time: with heads first, each would find the cache filled
    by other heads.
    """
    monkeypatch.setattr(Variant, "tile", 64)
    programs = loads(3, 128, 2, 2, [256] * 3)
    tiles, slots = 4, 3 * 2 * 256
    assert len(programs) == 3 * 2 * tiles
    missed, total = loads_from_memory(map(iter, programs), 2 * tiles, 2 * 256)
    assert total > 0.7 * tiles * slots
    assert missed == slots
