"""Muon (Jordan et al. 2024) in the precision of the weights.

PyTorch's own orthogonalises in bfloat16. On a CPU without instructions for that type it takes
longer than the rest of a small model's optimiser step.
"""

import torch
from torch import Tensor
from typing_extensions import override

COEFFICIENTS = (3.4445, -4.775, 2.0315)
ITERATIONS = 5
MOMENTUM = 0.95
TINY = 1e-7


class Muon(torch.optim.Muon):
    """torch.optim.Muon with its defaults, but for the type that it computes in and weight decay,
    which it leaves out.
    """

    def __init__(self, matrices: list[torch.nn.Parameter], lr: float):
        super().__init__(matrices, lr=lr, weight_decay=0.0)

    @override
    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Move each matrix against the orthogonal factor of its momentum."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                momentum = state["momentum_buffer"].lerp_(weight.grad, 1 - MOMENTUM)
                update = orthogonal(weight.grad.lerp(momentum, MOMENTUM))
                rows, columns = weight.shape
                weight.sub_(update, alpha=group["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return nearly the orthogonal factor of a matrix, by a quintic Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=TINY)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
