"""Addresses that the attention kernels read and write, in Triton's interpreter; test_interpreted.py
runs this file.
"""

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from magicdec.attention.cuda.triton import TritonAttention
from tests.attention.twins import attend, attend_scored, case, compacted, selection


@pytest.fixture
def used(monkeypatch):
    """Addresses that kernels read and write, and tensors that are made meanwhile."""
    addresses, tensors = [], []
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def note(pointers, mask):
        addresses.append(
            pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)].astype(
                np.uint64
            )
        )

    def loaded(self, pointers, mask, *rest):
        note(pointers, mask)
        return load(self, pointers, mask, *rest)

    def stored(self, pointers, value, mask, *rest):
        note(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", loaded)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", stored)
    empty = torch.empty

    def kept(*args, **kwargs):
        tensors.append(empty(*args, **kwargs))
        return tensors[-1]

    monkeypatch.setattr(torch, "empty", kept)
    return addresses, tensors


def surrounded(x):
    """The same numbers with NaN before and behind each row, head and slot."""
    B, K, S, D = x.shape
    large = torch.full((B + 2, K + 2, S + 6, D + 8), float("nan"))
    return large[1:-1, 1:-1, 3:-3, :D].copy_(x)


def within(addresses, tensor):
    """Return which addresses lie in the numbers of a tensor; its last dimension is contiguous."""
    starts = tensor.data_ptr() + tensor.element_size() * sum(
        np.arange(size).reshape(-1, *[1] * (tensor.dim() - 2 - i)) * stride
        for i, (size, stride) in enumerate(zip(tensor.shape[:-1], tensor.stride(), strict=False))
    )
    starts = np.unique(np.asarray(starts, dtype=np.uint64).ravel())
    place = np.searchsorted(starts, addresses, side="right")
    offset = addresses - starts[np.maximum(place, 1) - 1]
    return (place > 0) & (offset < tensor.shape[-1] * tensor.element_size())


KINDS = ["decode", "verify", "window", "prefill", "selected", "positions", "scored"]


@pytest.mark.parametrize(
    ("kind", "splits"), zip(KINDS, [1, 3, 3, 1, 3, 3, 1], strict=True), ids=KINDS
)
def test_nothing_beyond_the_valid_entries_is_touched(kind, splits, used, monkeypatch):
    """Rows have different lengths. Of K and V only the valid slots are read, and of a window only
    its own.
    """
    monkeypatch.setattr("magicdec.attention.cuda.triton_grid.split_count", lambda *_: splits)
    num_new, group = {"decode": (1, 4), "prefill": (35, 4)}.get(kind, (4, 4))
    window = 40 if kind == "window" else None
    q, k, v, seqlens = case(num_new, group, 80, 150)
    options = {}
    if kind == "selected":
        options["indices"] = selection(seqlens, num_new, 157, 60)
    if kind == "positions":
        k, v, seqlens, options["positions"], _ = compacted(k, v, seqlens, num_new, 90)
    k, v = surrounded(k), surrounded(v)
    addresses, tensors = used
    addresses.clear(), tensors.clear()
    if kind == "scored":
        out, _ = attend_scored(TritonAttention(), q, k, v, seqlens)
    else:
        out = attend(
            TritonAttention(), q, k, v, seqlens, 100 if kind == "positions" else window, **options
        )
    touched = np.unique(np.concatenate(addresses))
    valid = [
        x[row, :, max(0, length - num_new + 1 - window) if window else 0 : length]
        for x in (k, v)
        for row, length in enumerate(seqlens.tolist())
    ]
    allowed = [q, seqlens, *options.values(), *tensors, *valid]
    assert np.logical_or.reduce([within(touched, x) for x in allowed]).all()
    assert out.isfinite().all()
