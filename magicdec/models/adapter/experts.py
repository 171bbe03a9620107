"""Routed experts of transformers' modules by the operators that go with attention.

A step reads each expert that its tokens choose once. PyTorch's products of a few rows on a CPU
repack the weights in every call, which takes longer than reading them.

N tokens, K experts that a token takes, M = N K products, E hidden size.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from magicdec.models.operators import Operators


class OperatorExperts(nn.Module):
    """The experts of a layer, whose products are our operators'. It shares the weights."""

    def __init__(self, experts: Any, operators: Operators):
        super().__init__()
        self.plain_experts = experts
        self.operators = operators
        self.num_experts = int(experts.num_experts)

    @override
    def forward(self, hidden_NE: Tensor, index_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """Return the weighted sum of what each token's experts make of it."""
        experts, matmul = self.plain_experts, self.operators.matmul
        index_M = index_NK.flatten()
        order_M = index_M.argsort(stable=True)
        x_ME = hidden_NE[order_M // index_NK.shape[1]]
        out_ME = torch.empty_like(x_ME)
        start = 0
        for expert, count in enumerate(index_M.bincount(minlength=self.num_experts).tolist()):
            if count:
                chosen = slice(start, start + count)
                gated = experts._apply_gate(matmul(x_ME[chosen], experts.gate_up_proj[expert]))
                out_ME[chosen] = matmul(gated, experts.down_proj[expert])
                start += count
        placed_ME = torch.empty_like(out_ME)
        placed_ME[order_M] = out_ME * weights_NK.flatten()[order_M, None]
        return placed_ME.view(*index_NK.shape, -1).sum(1).to(hidden_NE.dtype)


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is the routed experts of a layer, as transformers' interface has
    them.
    """
    return hasattr(module, "num_experts") and hasattr(module, "down_proj")


def fits(module: Any) -> bool:
    """Return whether our operators can do what these experts do: gated products without biases, of
    weights whose rows are outputs.
    """
    others = ("has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")
    return bool(getattr(module, "has_gate", False)) and not any(
        getattr(module, name, False) for name in others
    )


def experts_in(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a tree whose forward passes are those of a layer's experts."""
    inner: set[int] = set()
    for module in root.modules():
        if isinstance(module, OperatorExperts):
            inner.add(id(module.plain_experts))
            yield module
        elif is_experts(module) and id(module) not in inner:
            yield module
