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
from magicdec.models.transformer import Layer, Transformer, embedding


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
        norms = (self.q_norm, self.k_norm) if c.qk_norm else None
        q_BTHD = ops.rotate(qkv, c.num_heads, norms, cos, sin, place)
        return normed_BTE if c.norm_before_residual else x_BTE, q_BTHD


class Head(Transformer):
    """The layer with what is around it. `embed` and `head` are the target's where it has none: see
    `on`.
    """

    config: HeadConfig
    target_ids_V: Tensor | None  # of the draft's tokens

    def __init__(self, config: HeadConfig, attention: Attention, share: Share = ALONE):
        """Allocate weights. `config` has the sizes of this rank's share."""
        nn.Module.__init__(self)
        self.config, self.attention = config, attention
        self.share, self.is_compiled = share, False
        E, joined = config.hidden_size, config.num_taps * config.target_hidden_size
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

    def on(self, target: Transformer) -> "Head":
        """Return the same head with the embedding, and the output matrix, of a target where it has
        none of its own.
        """
        with torch.device("meta"):
            other = Head(self.config, self.attention, self.share)
        for name, module in self._modules.items():
            setattr(other, name, module)
        other.target_ids_V, other.is_compiled = self.target_ids_V, self.is_compiled
        if self.embed is None:
            other.embed = target.embed
        if self.head is None:
            other.head = target.embed if target.head is None else target.head
        return other.eval()

    def fused(self, hidden_BTN: Tensor) -> Tensor:
        """Return the hidden states (B, T, E) that the layer reads, of those of the target."""
        if self.input_norms:
            parts = hidden_BTN.chunk(len(self.input_norms), dim=-1)
            hidden_BTN = torch.cat(
                [norm(part) for norm, part in zip(self.input_norms, parts, strict=True)], dim=-1
            )
        return self.operators.linear(self.fc, hidden_BTN.to(self.dtype))

    @override
    def forward(self, tokens_BT: Tensor, cache: KVCache, hidden_BTE: Tensor) -> Tensor:  # type: ignore[override]
        """Append T tokens, each with the hidden state of the token before it. Return the layer's
        output (B, T, E).
        """
        num_new = tokens_BT.shape[1]
        plan = cache.plan(self.attention, num_new, self.dtype)[0]
        x_BTE, q_BTHD = self.enter(tokens_BT, cache, hidden_BTE)
        out_BTHD = cache.attend(0, q_BTHD, self.attention, plan)
        x_BTE, mlp_BTE = self.layer.after_attention(self.operators, x_BTE, out_BTHD)
        cache.advance(num_new)
        x_BTE = x_BTE + mlp_BTE
        return self.norm(x_BTE) if self.config.norm_output else x_BTE

    def enter(self, tokens_BT: Tensor, cache: KVCache, hidden_BTE: Tensor) -> tuple[Tensor, Tensor]:
        """Write the entries of T tokens behind the valid ones. Return the residual stream, and the
        queries.
        """
        num_new = tokens_BT.shape[1]
        angles = self.angles(
            *frequencies_on(self.config, tokens_BT.device), cache.positions_BT(num_new)
        )
        cos, sin = angles[0][:, :, None], angles[1][:, :, None]
        embedded_BTE = self.share.embed(tokens_BT, self.embed.weight).to(self.dtype)
        place = cache.place(0, cache.slots_BT(num_new))
        return self.layer.before_attention(
            self.operators, hidden_BTE, embedded_BTE, cos, sin, place
        )

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
