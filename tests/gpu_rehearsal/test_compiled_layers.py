"""Layers as torch.compile would emit them for a GPU: few kernels, and none whose configurations are tried on a cache.

To try configurations of a kernel that writes in place, Inductor first copies what it writes to: a layer's whole cache.
"""

from dataclasses import replace

import pytest
import torch

from magicdec.costmodel.hardware import hardware_named
from magicdec.costmodel.round import CODE_ROWS, Setup
from magicdec.decoding.state import TARGET, State
from magicdec.drafts.self import SelfSpeculation
from magicdec.models import quantize
from magicdec.models.kv_cache import KVCache
from magicdec.verification.accept import Verdict
from tests.gpu_rehearsal.fake import LLAMA_8B, fake_cuda, fake_model
from tests.gpu_rehearsal.inductor import autotuners, calls, emitted, pretended_gpu


def halves(num_new: int, rows: int = 24, quantization: str = "none", **architecture: bool):
    """A layer's two halves on the fake device, and their arguments."""
    one = replace(LLAMA_8B, num_layers=1, **architecture)
    model, cache = fake_model(one), KVCache(one, rows, 32868, torch.bfloat16, "cuda")
    if quantization != "none":
        for name in quantize.MATRICES:
            setattr(model.layers[0], name, quantize.coded(getattr(model.layers[0], name), quantization))
    model.compile_layers()
    x = torch.empty(rows, num_new, 4096, dtype=torch.bfloat16, device="cuda")
    cos = torch.empty(rows, num_new, 1, 64, device="cuda")
    out = torch.empty(rows, num_new, 32, 128, dtype=torch.bfloat16, device="cuda")
    slots = torch.empty(rows, num_new, dtype=torch.int64, device="cuda")
    layer, ops = model.layers[0], model.operators
    yield layer.before_attention, (ops, x, torch.empty_like(x), cos, torch.empty_like(cos), cache.place(0, slots))
    yield layer.after_attention, (ops, x, out)


def compiled_halves(*args, **kwargs):
    """What each half launches, and the autotuners of all kernels."""
    with pretended_gpu(), fake_cuda():
        sources = [emitted(*half) for half in halves(*args, **kwargs)]
        launched = [[call for call in calls(source) if not call.startswith("aten")] for source in sources]
        return launched, autotuners(sources[0]) | autotuners(sources[1])


def check_writing(tuners):
    """Check that one kernel writes keys and values, and has one configuration."""
    (writing,) = (tuner for name, tuner in tuners.items() if "index_put" in name)
    assert len(writing.mutated_arg_names) == 2
    assert len(writing.configs) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_new", "architecture", "before"), [(1, {}, 4), (5, {}, 4), (5, {"qk_norm": True, "qkv_bias": True}, 7)]
)
def test_few_kernels_and_no_copy_of_a_cache(num_new, architecture, before):
    launched, tuners = compiled_halves(num_new, **architecture)
    assert list(map(len, launched)) == [before, 5]
    assert sum("mm" in call for part in launched for call in part) == 4
    check_writing(tuners)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_layers_move_what_the_cost_model_counts(quantization):
    """Up to CODE_ROWS rows codes alone; beyond, one kernel writes each decoded weight, and its matmul reads it."""
    pytest.importorskip("torchao")
    for rows, decoding in ((CODE_ROWS, 0), (CODE_ROWS + 1, 4)):
        launched, tuners = compiled_halves(1, rows, quantization)
        called = [*launched[0], *launched[1]]
        by_codes, by_weights = (sum(word in call for call in called) for word in ("code_matmul.default", "kernels.mm"))
        assert (by_codes, by_weights) == ((0, 4) if decoding else (4, 0))
        assert len(called) == 9 + decoding
        check_writing(tuners)
        setup = Setup(LLAMA_8B, hardware_named("H100"), rows, 4096, SelfSpeculation(quantization=quantization))
        assert setup.moved_weight_bytes(rows) == setup.draft_weight_bytes + decoding


@pytest.mark.slow
def test_a_round_beside_its_layers_copies_no_tokens():
    """Two kernels that look for infinite logits, three that commit, all in place; no operator is left as it is."""
    with fake_cuda():
        state = State([[0] * 32768] * 24, 96, 5, (2,), "cuda:0")
        logits = torch.empty(24, 5, LLAMA_8B.vocab_size, dtype=torch.bfloat16, device="cuda")
        tokens = torch.empty(24, 5, dtype=torch.int64, device="cuda")
        accepted = torch.empty(24, dtype=torch.int64, device="cuda")
        with pretended_gpu():
            inspecting = emitted(torch.compile(state.inspect), (logits, TARGET))
            committing = emitted(torch.compile(state.commit), (Verdict(accepted, tokens),))
            tuners = autotuners(committing)
    assert list(map(len, map(calls, (inspecting, committing)))) == [2, 3]
    assert all(call.endswith(".run") for call in calls(inspecting) + calls(committing))
    numels = [tuner.size_hints["x"] for tuner in tuners.values()]
    assert max(numels) < state.tokens_BS.shape[1]
