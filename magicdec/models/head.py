"""A draft head: one decoder layer over a target's hidden states and the embedding of the token
behind each.

B rows, T tokens, E hidden size, N hidden states of the target side by side, V draft vocabulary. The
entry of a token consists of its embedding and the hidden state of the token before it. With one
layer, keys and values follow from these alone: nothing has to be attended to for storing the
entries of a context.
"""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from magicdec.architectures.head_config import HeadConfig
from magicdec.attention.base import Attention
from magicdec.models.kv_cache import KVCache, Place
from magicdec.models.operators import Operators
from magicdec.models.parallel import ALONE, Share
from magicdec.models.rope import frequencies_on
from magicdec.models.states_model import StatesModel
from magicdec.models.transformer import Layer, embedding


class HeadLayer(Layer):
    """A decoder layer whose queries, keys and values are made of an embedding and a hidden state,
    each normalised.
    """

    config: HeadConfig

    def __init__(self, config: HeadConfig, share: Share):
        super().__init__(config, share)
        self.embedding_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.qkv = nn.Linear(config.qkv_inputs, self.qkv.out_features, bias=config.qkv_bias)

    @override
    def before_attention(
        self,
        ops: Operators,
        x_BTE: Tensor,
        embedded_BTE: Tensor,
        cos: Tensor,
        sin: Tensor,
        place: Place | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream, which leaves the embedding out, and the queries; see
        `Layer`.
        """
        c, normed_BTE = self.config, self.attention_norm(x_BTE)
        both = torch.cat((self.embedding_norm(embedded_BTE), normed_BTE), dim=-1)
        qkv = ops.linear(self.qkv, both).unflatten(-1, (-1, c.head_dim))
        q_BTHD = ops.rotate(qkv, c.num_heads, self.norms, cos, sin, place)
        return normed_BTE if c.norm_before_residual else x_BTE, q_BTHD


class Head(StatesModel):
    """The layer with what is around it."""

    config: HeadConfig

    def __init__(self, config: HeadConfig, attention: Attention, share: Share = ALONE):
        """Allocate weights. `config` has the sizes of this rank's share."""
        super().__init__(config, attention, share)
        E = config.hidden_size
        joined = config.num_taps * config.target_hidden_size
        self.fc = nn.Linear(joined, E, bias=False)
        sizes = {
            "none": [],
            "joint": [joined],
            "each": [config.target_hidden_size] * config.num_taps,
        }
        self.input_norms = nn.ModuleList(
            nn.RMSNorm(n, config.rms_norm_eps) for n in sizes[config.input_norms]
        )
        self.layers = nn.ModuleList([HeadLayer(config, share)])
        self.norm = nn.RMSNorm(E, config.rms_norm_eps)
        self.embed: Any = (
            embedding(share.vocabulary_rows(config.vocab_size), E) if config.own_embedding else None
        )
        rows = share.vocabulary_rows(config.num_logits)
        self.head: Any = nn.Linear(E, rows, bias=False) if config.own_head else None
        ids = torch.zeros(config.num_logits, dtype=torch.int64) if config.maps_vocabulary else None
        self.register_buffer("target_ids_V", ids)

    @override
    def fused(self, hidden_BTN: Tensor) -> Tensor:
        if self.input_norms:
            parts = hidden_BTN.chunk(len(self.input_norms), dim=-1)
            hidden_BTN = torch.cat(
                [norm(part) for norm, part in zip(self.input_norms, parts, strict=True)], dim=-1
            )
        return self.operators.linear(self.fc, hidden_BTN.to(self.dtype))

    @override
    def forward(  # type: ignore[override]
        self, tokens_BT: Tensor, cache: KVCache, hidden_BTE: Tensor, module: int = 0
    ) -> Tensor:
        num_new = tokens_BT.shape[1]
        layer = self.layer_of(module)
        plan = cache.plan(self.attention, num_new, self.dtype)[module]
        x_BTE, q_BTHD = self.enter(tokens_BT, cache, hidden_BTE, module)
        out_BTHD = cache.attend(module, q_BTHD, self.attention, plan)
        x_BTE, mlp_BTE = layer.after_attention(self.operators, x_BTE, out_BTHD)
        if module == self.num_modules - 1:
            cache.advance(num_new)
        return self.output(module, x_BTE + mlp_BTE)

    @override
    def enter(
        self, tokens_BT: Tensor, cache: KVCache, hidden_BTE: Tensor, module: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Write the entries. Return the residual stream, and the queries."""
        num_new = tokens_BT.shape[1]
        angles = self.angles(
            *frequencies_on(self.config, tokens_BT.device), cache.positions_BT(num_new)
        )
        cos = angles[0][:, :, None]
        sin = angles[1][:, :, None]
        embedded_BTE = self.share.embed(tokens_BT, self.embed.weight).to(self.dtype)
        place = cache.place(module, cache.slots_BT(num_new))
        return self.layer_of(module).before_attention(
            self.operators, hidden_BTE, embedded_BTE, cos, sin, place
        )

    def output(self, module: int, x_BTE: Tensor) -> Tensor:
        """Return what the next step reads of a module's residual stream."""
        return self.norm(x_BTE) if self.config.norm_output else x_BTE

    @override
    def logits(self, hidden_BTE: Tensor) -> Tensor:
        """Return the logits (B, T, V) of draft tokens, from the layer's output."""
        normed_BTE = hidden_BTE if self.config.norm_output else self.norm(hidden_BTE)
        local_BTV = self.operators.matmul(normed_BTE, self.head.weight)
        return self.share.logits(local_BTV, self.config.num_logits)

    @property
    def layer(self) -> HeadLayer:
        """Return the only layer."""
        layer = self.layers[0]
        assert isinstance(layer, HeadLayer)
        return layer
