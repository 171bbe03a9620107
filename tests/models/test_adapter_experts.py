"""Experts of transformers' modules by our operators: what transformers' own experts make."""

import pytest
import torch

from magicdec.attention.cpp import CppAttention
from magicdec.attention.sdpa import SdpaAttention
from magicdec.kernels.library import compiler
from magicdec.models.adapter.experts import OperatorExperts, fits
from magicdec.models.operators import PYTORCH, Operators, operators_for
from tests.checkpoints import load_modules
from tests.models.adapter_cases import target_of

needs_compiler = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")


def operators(kind: str) -> Operators:
    return PYTORCH if kind == "pytorch" else operators_for(CppAttention)


@pytest.mark.parametrize("kind", ["pytorch", pytest.param("cpp", marks=needs_compiler)])
@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "glm4-moe", "deepseek-v3"])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_outputs_are_those_of_transformers(kind, family, num_tokens, folders):
    experts = target_of(folders(family)).experts()[0]
    assert fits(experts)
    generator = torch.Generator().manual_seed(num_tokens)
    width = experts.down_proj.shape[1]
    hidden_NE = torch.randn(num_tokens, width, generator=generator)
    score_NX = torch.rand(num_tokens, experts.num_experts, generator=generator)
    weights_NK, index_NK = score_NX.topk(2)
    ours_NE = OperatorExperts(experts, operators(kind))(hidden_NE, index_NK, weights_NK)
    theirs_NE = experts(hidden_NE, index_NK, weights_NK)
    torch.testing.assert_close(ours_NE, theirs_NE, rtol=1e-5, atol=1e-5)


@needs_compiler
def test_a_row_does_not_depend_on_its_neighbours(folders):
    experts = target_of(folders("qwen3-moe")).experts()[0]
    ours = OperatorExperts(experts, operators("cpp"))
    generator = torch.Generator().manual_seed(0)
    hidden_NE = torch.randn(9, experts.down_proj.shape[1], generator=generator)
    weights_NK, index_NK = torch.rand(9, 8, generator=generator).topk(2)
    together_NE = ours(hidden_NE, index_NK, weights_NK)
    for row in range(9):
        alone_1E = ours(*(x[row : row + 1] for x in (hidden_NE, index_NK, weights_NK)))
        assert torch.equal(alone_1E[0], together_NE[row])


@needs_compiler
@pytest.mark.parametrize(("family", "is_ours"), [("qwen3-moe", True), ("gpt-oss", False)])
def test_which_experts_are_ours(family, is_ours, folders):
    """Not those with biases and transposed weights, nor any in the twin of the audit."""
    target = load_modules(folders(family), attention=CppAttention())
    assert len(target.experts()) == 3
    assert all(isinstance(each, OperatorExperts) is is_ours for each in target.experts())
    twin = target.plain()
    assert not any(isinstance(module, OperatorExperts) for module in twin.modules())
    assert isinstance(twin.attention, SdpaAttention)
