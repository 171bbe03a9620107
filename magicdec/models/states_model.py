"""The base of models over a target's hidden states: their entries follow from hidden states that
the target leaves behind, and what they lack is the target's own.

B rows, T tokens, E hidden size, N hidden states of the target side by side, V draft vocabulary.
"""

from abc import abstractmethod
from copy import copy
from typing import Any, Self, cast

from torch import Tensor, nn
from typing_extensions import override

from magicdec.architectures.model_config import ModelConfig
from magicdec.attention.base import Attention
from magicdec.models.kv_cache import KVCache
from magicdec.models.parallel import ALONE, Share
from magicdec.models.transformer import Layer, Transformer


class StatesModel(Transformer):
    """A draft's layers. `embed` and `head` are the target's where it has none: see `on`."""

    target_ids_V: Tensor | None  # of the draft's tokens; None: they are the target's own
    embed: Any
    head: Any

    def __init__(self, config: ModelConfig, attention: Attention, share: Share = ALONE):
        """Have nothing of its own but what the layers of a subclass add. `config` has the sizes of
        this rank's share.
        """
        nn.Module.__init__(self)
        self.config, self.attention = config, attention
        self.share, self.is_compiled = share, False
        self.embed = self.head = None
        self.register_buffer("target_ids_V", None)

    @property
    def num_modules(self) -> int:
        """Return how many modules propose one after the other: module k takes the hidden states of
        module k - 1, and the tokens one place further on. The last one goes on by itself.
        """
        return 1

    def layer_of(self, number: int) -> Layer:
        """Return a layer, which is a module's own, by its number."""
        return cast("Layer", self.layers[number])

    def on(self, target: Transformer) -> Self:
        """Return the same layers with the embedding, and the output matrix, of a target where they
        have none of their own.
        """
        other = copy(self)
        other._modules = dict(self._modules)
        if self.embed is None:
            other.embed = target.embed
        if self.head is None:
            other.head = target.embed if target.head is None else target.head
        return other.eval()

    @abstractmethod
    def fused(self, hidden_BTN: Tensor) -> Tensor:
        """Return the hidden states (B, T, E) that the first layer reads, of those of the target."""

    @abstractmethod
    @override
    def forward(  # type: ignore[override]
        self, tokens_BT: Tensor, cache: KVCache, hidden_BTE: Tensor, module: int = 0
    ) -> Tensor:
        """Append T tokens, each with the hidden state of the token before it. Return the module's
        output (B, T, E).

        All modules write to the same slots, each to a layer of its own. The pass of the last one
        counts them as valid.
        """

    @abstractmethod
    def enter(
        self, tokens_BT: Tensor, cache: KVCache, hidden_BTE: Tensor, module: int = 0
    ) -> object:
        """Write the entries of T tokens behind the valid ones, as `forward` does, and attend to
        nothing.
        """
