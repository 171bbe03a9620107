"""Modules that predict further tokens (multi-token prediction, MTP: DeepSeek-AI 2024, arXiv
2412.19437, section 2.2), each a decoder layer behind a matrix that joins two vectors.

Module k makes a hidden state of place i, h(k, i), of h(k - 1, i) and the embedding of the token at
place i + k + 1, and predicts the token at place i + k + 2. h(-1, i) is what the target returns.
transformers' `MtpModel` runs the same formulas for published checkpoints.

B rows, T tokens, E hidden size, V vocabulary.
"""

from typing import cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from magicdec.architectures.mtp_config import MtpConfig
from magicdec.attention.base import Attention
from magicdec.models.head import Head
from magicdec.models.kv_cache import Place
from magicdec.models.operators import Operators
from magicdec.models.parallel import ALONE, Share
from magicdec.models.states_model import StatesModel
from magicdec.models.transformer import Layer, Transformer


class MtpLayer(Layer):
    """A decoder layer over an embedding and a hidden state, each normalised, side by side."""

    def __init__(self, config: MtpConfig, share: Share):
        super().__init__(config, share)
        E, epsilon = config.hidden_size, config.rms_norm_eps
        self.embedding_norm = nn.RMSNorm(E, epsilon)
        self.state_norm = nn.RMSNorm(E, epsilon)
        self.joined = nn.Linear(2 * E, E, bias=False)
        self.output_norm = nn.RMSNorm(E, epsilon)

    @override
    def before_attention(
        self,
        ops: Operators,
        x_BTE: Tensor,
        mlp_BTE: Tensor,
        cos: Tensor,
        sin: Tensor,
        place: Place | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream and the queries; see `Layer`. `x_BTE` are the hidden states,
        `mlp_BTE` the embeddings.
        """
        both = torch.cat((self.embedding_norm(mlp_BTE), self.state_norm(x_BTE)), dim=-1)
        joined_BTE = ops.linear(self.joined, both)
        none_BTE = torch.zeros_like(joined_BTE)
        return super().before_attention(ops, joined_BTE, none_BTE, cos, sin, place)


class MtpHead(Head):
    """The modules, which take embedding and output matrix from their target."""

    config: MtpConfig  # type: ignore[assignment]

    def __init__(self, config: MtpConfig, attention: Attention, share: Share = ALONE):
        """Allocate weights. `config` has the sizes of this rank's share."""
        StatesModel.__init__(self, config, attention, share)
        self.layers = nn.ModuleList(MtpLayer(config, share) for _ in range(config.num_layers))

    @property
    @override
    def num_modules(self) -> int:
        return len(self.layers)

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self.module(0).output_norm.weight.dtype

    @override
    def fused(self, hidden_BTN: Tensor) -> Tensor:
        return hidden_BTN.to(self.dtype)

    @override
    def output(self, module: int, x_BTE: Tensor) -> Tensor:
        normed_BTE: Tensor = self.module(module).output_norm(x_BTE)
        return normed_BTE

    def module(self, number: int) -> MtpLayer:
        """Return a module by its number."""
        return cast("MtpLayer", self.layers[number])

    logits = Transformer.logits  # of a module's output, which is normalised
