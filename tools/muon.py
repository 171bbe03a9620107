"""The optimiser Muon (Jordan et al. 2024), for the hidden matrices of the bundled pair."""

import torch

MOMENTUM = 0.95


class Muon:
    """Momentum whose update of each matrix is made nearly orthogonal by five Newton-Schulz steps."""

    def __init__(self, matrices: list[torch.nn.Parameter]) -> None:
        self.matrices = matrices
        self.momenta = [torch.zeros_like(matrix) for matrix in matrices]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update all matrices from their gradients."""
        for matrix, momentum in zip(self.matrices, self.momenta, strict=True):
            momentum.lerp_(matrix.grad, 1 - MOMENTUM)
            update = orthogonalised(matrix.grad.lerp(momentum, MOMENTUM))
            matrix.add_(update, alpha=-lr * max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5)


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix with its singular values brought near 1; the coefficients of the quintic are Muon's."""
    transposed = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if transposed else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if transposed else x
