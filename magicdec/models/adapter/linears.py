"""Linear layers of transformers' modules by the operators that go with attention.

F.linear on a CPU repacks the weights in every call with few rows, which takes longer than the
product.
"""

from collections.abc import Callable
from copy import copy
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from magicdec.models.adapter.experts import OperatorExperts, fits, is_experts
from magicdec.models.operators import Operators


class OperatorLinear(nn.Module):
    """A linear layer whose product is one of our operators'. It shares weight and bias."""

    def __init__(self, linear: nn.Linear, operators: Operators):
        super().__init__()
        self.plain_linear = linear
        self.operators = operators

    @property
    def weight(self) -> Tensor:
        """Return the weight of the layer that it replaces."""
        return self.plain_linear.weight

    @property
    def bias(self) -> Tensor | None:
        """Return the bias of the layer that it replaces."""
        return self.plain_linear.bias

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return x times the transposed weight, plus the bias."""
        return self.operators.matmul(x, self.weight, self.bias)


def by_operators(root: nn.Module, operators: Operators) -> Any:
    """Return the same modules, whose linear layers, and experts, use these operators."""

    def change(module: nn.Module) -> nn.Module | None:
        if is_experts(module) and fits(module):
            return OperatorExperts(module, operators)
        return OperatorLinear(module, operators) if type(module) is nn.Linear else None

    return changed(root, change)


def by_pytorch(root: nn.Module) -> Any:
    """Return the same modules with PyTorch's linear layers and transformers' experts."""

    def change(module: nn.Module) -> nn.Module | None:
        if isinstance(module, OperatorExperts):
            return module.plain_experts
        return module.plain_linear if isinstance(module, OperatorLinear) else None

    return changed(root, change)


def changed(root: nn.Module, change: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """Return a copy of a tree of modules, with others where `change` returns one. Parameters are
    shared.
    """
    other = change(root)
    if other is not None:
        return other
    twin = copy(root)
    vars(twin).pop("forward", None)  # a compiled one, which runs the original's children
    children = {name: child for name, child in root._modules.items() if child is not None}
    twin._modules = root._modules | {
        name: changed(child, change) for name, child in children.items()
    }
    return twin
