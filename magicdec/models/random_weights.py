"""Random weights, for models whose output nobody reads."""

from collections.abc import Iterable

import torch
from torch import Tensor

SPREAD = 0.02  # the standard deviation


@torch.no_grad()
def draw_matrices(weights: Iterable[Tensor], generator: torch.Generator) -> None:
    """Draw the matrices among the weights from a normal distribution; leave vectors as they are."""
    for weight in weights:
        if weight.dim() > 1:
            weight.normal_(0, SPREAD, generator=generator)
