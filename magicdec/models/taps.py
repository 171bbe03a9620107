"""Hidden states inside a model, returned by its forward pass on request.

B rows, T tokens, E hidden size, N listed layers.
"""

import torch
from torch import Tensor


class Taps:
    """The residual stream in front of listed layers, of the last forward pass that was given these
    taps.

    A model of L layers has taps 0, its embeddings, to L, what the last norm reads, and L + 1, what
    that norm returns.
    """

    def __init__(self, layers: tuple[int, ...]):
        self.layers = layers
        self._hidden: dict[int, Tensor] = {}

    def take(self, layer: int, x_BTE: Tensor) -> None:
        """Keep the hidden states in front of a layer, if it is listed. They must not be overwritten
        later.
        """
        if layer in self.layers:
            self._hidden[layer] = x_BTE

    @property
    def hidden_BTN(self) -> Tensor:
        """Return the hidden states of all listed layers, side by side (B, T, N x E)."""
        return torch.cat([self._hidden[layer] for layer in self.layers], dim=-1)
