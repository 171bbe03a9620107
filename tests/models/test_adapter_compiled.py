"""transformers' modules through torch.compile (hardware.compile): the same tokens, and an audit
that computes by itself.
"""

from typing import Any

import pytest
import torch

from magicdec.attention.base import Attention
from magicdec.attention.cpp import CppAttention
from magicdec.attention.sdpa import SdpaAttention
from magicdec.conformance.examine import both_ways
from magicdec.kernels.library import compiler
from magicdec.models.adapter.linears import OperatorLinear
from magicdec.models.transformer import Transformer
from tests.checkpoints import load_modules, load_reference, make_checkpoint, written
from tests.small import open_batch, random_prompts

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
LENGTHS, NEW_TOKENS, VOCABULARY = [21, 9], 6, 96
KEYS = {"policy": "streaming", "budget": 12, "num_sink": 2, "gamma": 2, "generate_len": NEW_TOKENS}


@pytest.fixture
def compiled(tmp_path) -> Any:
    """Return a function that makes a compiled target of a family, and what `generate` writes."""

    def make(family: str, attention: Attention, **changes: Any) -> tuple[Transformer, Any]:
        torch._dynamo.reset()
        folder = make_checkpoint(tmp_path, family, eos_token_id=None, **changes)
        prompts = random_prompts(LENGTHS, vocab=VOCABULARY)
        expected = written(load_reference(folder), prompts, NEW_TOKENS)
        target = load_modules(folder, attention=attention)
        target.compile_layers()
        return target, expected

    return make


def check(target: Transformer, expected: list[list[int]]) -> None:
    prompts = random_prompts(LENGTHS, vocab=VOCABULARY)
    batch = open_batch(target, prompts, draft_name="self", **KEYS)
    passed, plain, fast = both_ways(batch)
    assert passed
    assert plain.tokens == fast.tokens == expected


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "attention", "layers"),
    [
        pytest.param("qwen3-moe", CppAttention, 2, marks=pytest.mark.soak),
        pytest.param("gpt-oss", SdpaAttention, 2, marks=pytest.mark.soak),
        pytest.param("qwen3.5", CppAttention, 4, marks=pytest.mark.soak),
    ],
)
def test_compiled_targets_write_the_same_tokens(family, attention, layers, compiled):
    """Experts, sinks and recurrent states included."""
    check(*compiled(family, attention(), num_hidden_layers=layers))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_the_twin_of_the_audit_is_not_compiled(tmp_path):
    """It runs its own modules, by PyTorch's operators."""
    target = load_modules(make_checkpoint(tmp_path, "qwen3-moe"), attention=CppAttention())
    assert any(isinstance(module, OperatorLinear) for module in target.modules())
    target.compile_layers()
    assert not any(isinstance(module, OperatorLinear) for module in target.modules())
    assert all("forward" in vars(layer) for layer in target.layers)
    twin = target.plain()
    assert not any("forward" in vars(module) for module in twin.modules())
    assert (twin.is_compiled, target.is_compiled) == (False, True)
    assert isinstance(target.attention, CppAttention)
