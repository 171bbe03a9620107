"""Layers as torch.compile would emit them for a GPU: few kernels, and none whose configurations are tried on a cache.

To try configurations of a kernel that writes in place, Inductor first copies what it writes to: a layer's whole cache.
"""

from dataclasses import replace

import pytest
import torch

from magicdec.models.kv_cache import KVCache
from tests.gpu_rehearsal.fake import LLAMA_8B, fake_cuda, fake_model
from tests.gpu_rehearsal.inductor import autotuners, calls, emitted, pretended_gpu


def halves(num_new: int):
    """A layer's two halves on the fake device, and their arguments."""
    one, rows = replace(LLAMA_8B, num_layers=1), 24
    model, cache = fake_model(one), KVCache(one, rows, 32868, torch.bfloat16, "cuda")
    model.compile_layers()
    x = torch.empty(rows, num_new, 4096, dtype=torch.bfloat16, device="cuda")
    cos = torch.empty(rows, num_new, 1, 64, device="cuda")
    out = torch.empty(rows, num_new, 32, 128, dtype=torch.bfloat16, device="cuda")
    slots = torch.empty(rows, num_new, dtype=torch.int64, device="cuda")
    layer, ops = model.layers[0], model.operators
    yield layer.before_attention, (ops, x, torch.empty_like(x), cos, torch.empty_like(cos), cache.place(0, slots))
    yield layer.after_attention, (ops, x, out)


@pytest.mark.slow
@pytest.mark.parametrize("num_new", [1, 5])
def test_few_kernels_and_no_copy_of_a_cache(num_new):
    with pretended_gpu(), fake_cuda():
        before, after = (emitted(*half) for half in halves(num_new))
        launched = [[call for call in calls(source) if not call.startswith("aten")] for source in (before, after)]
        tuners = autotuners(before) | autotuners(after)
    assert list(map(len, launched)) == [4, 5]
    assert sum("mm" in call for part in launched for call in part) == 4
    (writing,) = (tuner for name, tuner in tuners.items() if "index_put" in name)
    assert len(writing.mutated_arg_names) == 2  # keys and values
    assert len(writing.configs) == 1
