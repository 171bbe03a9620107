"""A forward pass in one call against the same pass operator by operator: the same numbers, bit for
bit.
"""

import copy

import pytest
import torch
from torch import nn

from magicdec.attention.cpp import CppAttention
from magicdec.attention.sdpa import SdpaAttention
from magicdec.config.choices import CacheSpec
from magicdec.config.registry import POLICIES
from magicdec.kernels.library import compiler
from magicdec.models import passes
from magicdec.models.kv_cache import KVCache
from magicdec.models.quantize import quantized
from magicdec.models.transformer import Transformer
from tests.small import VOCAB, cache_config, small_model
from tests.threads import threads

if compiler() is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)

LENGTHS = torch.tensor([40, 23, 5], dtype=torch.int32)
SHAPES = {"plain": {}, "odd sizes": {"hidden_size": 27, "intermediate_size": 37, "num_layers": 3}}
SHAPES |= {"biased": {"qkv_bias": True, "output_bias": True}, "normed": {"qk_norm": True}}
SHAPES |= {"sliding": {"sliding_window": 7, "sliding_layers": (1,)}}


@pytest.fixture
def calls(monkeypatch):
    """Count the passes that were made in one call."""
    made = []

    def counted(*arguments):
        out = run(*arguments)
        made.append(out is not None)
        return out

    run = passes.run
    monkeypatch.setattr(passes, "run", counted)
    return made


def model_of(**sizes) -> Transformer:
    model = small_model(**sizes)
    model.attention = CppAttention()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases, and the weights of norms
            parameter.data += torch.linspace(-0.5, 0.5, len(parameter))
    return model


def both_ways(
    model: Transformer, cache: KVCache, tokens_BT: torch.Tensor, monkeypatch
) -> list[tuple]:
    """A pass in one call returns and writes the same as operator by operator."""
    found = []
    lengths_B = cache.seqlens_B.clone()
    for name in ("run", None):
        if name is None:
            monkeypatch.setattr(passes, "run", lambda *_: None)
        hidden_BTE = model(tokens_BT, cache)
        assert torch.equal(cache.seqlens_B, lengths_B + tokens_BT.shape[1])
        found.append((hidden_BTE, cache.k_LBKSD.clone(), cache.v_LBKSD.clone()))
        cache.rollback(lengths_B)
    return found


def prefilled(model: Transformer) -> KVCache:
    cache = KVCache(model.config, 3, 64, model.dtype, "cpu")
    model(torch.arange(3 * 40).view(3, 40) % VOCAB, cache)
    cache.rollback(LENGTHS)
    return cache


@pytest.mark.parametrize("num_new", [1, 4])
@pytest.mark.parametrize("dtypes", ["float32", "bfloat16 weights", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_a_pass_over_a_plain_cache(shape, dtypes, num_new, calls, monkeypatch):
    model = model_of(**SHAPES[shape]).to(torch.bfloat16 if dtypes == "bfloat16" else torch.float32)
    if dtypes == "bfloat16 weights":
        for layer in model.layers:
            for name in passes.MATRICES:
                getattr(layer, name).weight.data = getattr(layer, name).weight.data.bfloat16()
    ours, right = both_ways(
        model, prefilled(model), torch.arange(3 * num_new).view(3, num_new), monkeypatch
    )
    assert calls == [False, True]  # the prefill has many rows
    assert right[0].float().std() > 0.1
    assert all(map(torch.equal, ours, right))


@pytest.mark.parametrize("sliding", [False, True])
@torch.inference_mode()
def test_a_pass_over_a_draft_s_compact_cache(sliding, calls, monkeypatch):
    model = model_of(**SHAPES["sliding" if sliding else "plain"])
    target = prefilled(model)
    spec = CacheSpec(cache_config("streaming", budget=12, num_sink=2), 2, 64, False)
    cache = POLICIES["streaming"].work.build(spec, model.config, 3, model.dtype, "cpu", target)
    cache.load(target)
    ours, right = both_ways(model, cache, torch.tensor([[3], [1], [4]]), monkeypatch)
    assert calls == [False, True]
    assert all(map(torch.equal, ours, right))


@torch.inference_mode()
def test_a_row_depends_neither_on_the_others_nor_on_threads():
    model, tokens_BT = model_of(), torch.arange(9).view(3, 3)

    def hidden(rows: slice) -> torch.Tensor:
        cache = KVCache(model.config, len(tokens_BT[rows]), 64, model.dtype, "cpu")
        cache.k_LBKSD[:], cache.v_LBKSD[:], cache.seqlens_B[:] = 0.1, 0.2, LENGTHS[rows]
        return model(tokens_BT[rows], cache)

    together = hidden(slice(None))
    for row in range(3):
        assert torch.equal(hidden(slice(row, row + 1)), together[row : row + 1])
    with threads(2):
        assert torch.equal(hidden(slice(None)), together)


def hidden(model: Transformer) -> torch.Tensor:
    return model(torch.tensor([[1, 2]]), KVCache(model.config, 1, 8, model.dtype, "cpu"))


@torch.inference_mode()
def test_weights_that_were_replaced_are_used(calls):
    model, fresh = model_of(), model_of(seed=1)
    before = hidden(model)
    model.load_state_dict(fresh.state_dict(), assign=True)
    assert not torch.equal(hidden(model), before)
    assert torch.equal(hidden(model), hidden(fresh))
    assert hidden(model.bfloat16()).dtype == torch.bfloat16
    assert all(calls)


def replace(part: str, layers: nn.ModuleList) -> None:
    """Put something else in the place of a part of the inner layer."""
    first, inner, _ = layers
    match part:
        case "parameter":
            inner.down.weight = nn.Parameter(-inner.down.weight.data, requires_grad=False)
        case "data":
            inner.mlp_norm.weight.data = -inner.mlp_norm.weight.data
        case "bias":
            inner.qkv.bias = None
        case "module":
            inner.output = copy.deepcopy(first.output)
        case "layer":
            layers[1] = copy.deepcopy(first)


@pytest.mark.parametrize("part", ["parameter", "data", "bias", "module", "layer"])
@torch.inference_mode()
def test_whatever_is_replaced_in_an_inner_layer_is_used(part, calls, monkeypatch):
    model = model_of(num_layers=3, qkv_bias=True)
    before = hidden(model)
    replace(part, model.layers)
    after = hidden(model)
    assert calls == [True, True]
    assert not torch.equal(after, before)
    monkeypatch.setattr(passes, "run", lambda *_: None)
    assert torch.equal(after, hidden(model))


@torch.inference_mode()
def test_weights_that_do_not_lie_row_by_row_go_operator_by_operator(calls):
    model = model_of()
    before = hidden(model)
    down = model.layers[1].down
    down.weight = nn.Parameter(down.weight.data.T.contiguous().T, requires_grad=False)
    torch.testing.assert_close(hidden(model), before)
    assert calls == [True, False]


@torch.inference_mode()
def test_other_passes_go_operator_by_operator(calls):
    model = model_of()

    def run(**changes) -> bool:
        for name, value in changes.items():
            setattr(model, name, value)
        cache = KVCache(model.config, 1, 128, model.dtype, "cpu")
        model(torch.zeros(1, 2, dtype=torch.int64), cache)
        return calls[-1] if calls else False

    assert run()
    # The others are in float32.
    model.layers[1].down.weight.data = model.layers[1].down.weight.data.bfloat16()
    assert not run()
    model = model_of()
    assert run()
    assert not run(attention=SdpaAttention())


@torch.inference_mode()
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_quantized_weights_go_operator_by_operator_in_every_pass(bits, calls):
    model = quantized(model_of(hidden_size=64, intermediate_size=64), bits, "cpu")
    model.attention = CppAttention()
    cache = KVCache(model.config, 1, 8, model.dtype, "cpu")
    for _ in range(2):
        model(torch.tensor([[1, 2]]), cache)
    assert calls == [False, False]
