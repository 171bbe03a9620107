"""One decoder-only transformer for the Llama, Mistral, Qwen2, Qwen3 and Yi families.

B rows, T tokens, E hidden size, H query heads, K KV heads, D head dim, V vocabulary. One forward pass serves prefill
(T = a chunk), decode (T = 1) and verify (T = gamma + 1): it appends T tokens to the cache and attends over it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magicdec.attention.base import Attention
from magicdec.cache.kv_cache import KVCache
from magicdec.models.config import ModelConfig
from magicdec.models.rope import rope_table, rotate


class Layer(nn.Module):
    """Attention and a gated MLP, each behind an RMS norm; QKV and gate-up are single matmuls."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.config, self.index = config, index
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.qkv = nn.Linear(config.hidden_size, q_size + 2 * kv_size, bias=config.qkv_bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
        self.output = nn.Linear(q_size, config.hidden_size, bias=config.output_bias)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(
        self, x_BTE: Tensor, rope: tuple[Tensor, Tensor], cache: KVCache, slots_BT: Tensor, attention: Attention, plan
    ) -> Tensor:
        """Append this layer's keys and values to the cache and return the residual stream."""
        c = self.config
        qkv = self.qkv(self.attention_norm(x_BTE)).unflatten(-1, (-1, c.head_dim))
        qk, v_BTKD = qkv[:, :, : c.num_heads + c.num_kv_heads], qkv[:, :, c.num_heads + c.num_kv_heads :]
        if c.qk_norm:
            qk = torch.cat((self.q_norm(qk[:, :, : c.num_heads]), self.k_norm(qk[:, :, c.num_heads :])), dim=2)
        qk = rotate(qk, *rope)
        q_BTHD, k_BTKD = qk[:, :, : c.num_heads], qk[:, :, c.num_heads :]
        cache.append(self.index, slots_BT, k_BTKD, v_BTKD)
        out = attention.attend(q_BTHD, cache.k_LBKSD[self.index], cache.v_LBKSD[self.index], plan)
        x_BTE = x_BTE + self.output(out.flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x_BTE)).chunk(2, dim=-1)
        return x_BTE + self.down(F.silu(gate) * up)


class Transformer(nn.Module):
    """The model. It holds weights and an attention backend; what a sequence has seen is in the cache it is given."""

    def __init__(self, config: ModelConfig, attention: Attention):
        super().__init__()
        self.config, self.attention = config, attention
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens_BT: Tensor, cache: KVCache) -> Tensor:
        """Append T tokens to every row of the cache; returns the normalised hidden states (B, T, E)."""
        num_new = tokens_BT.shape[1]
        slots_BT = cache.slots_BT(num_new)
        cos, sin = rope_table(self.config, cache.positions_BT(num_new))
        rope = (cos[:, :, None], sin[:, :, None])
        x_BTE = self.embed(tokens_BT)
        plans = {
            window: self.attention.plan(cache.seqlens_B + num_new, num_new, cache.capacity, window, x_BTE.dtype)
            for window in {self.config.window_of(i) for i in range(self.config.num_layers)}
        }
        for i, layer in enumerate(self.layers):
            x_BTE = layer(x_BTE, rope, cache, slots_BT, self.attention, plans[self.config.window_of(i)])
        cache.advance(num_new)
        return self.norm(x_BTE)

    def logits(self, hidden_BTE: Tensor) -> Tensor:
        """Next-token logits (B, T, V) of hidden states; kept apart so that prefill computes only the ones it needs."""
        return F.linear(hidden_BTE, self.embed.weight if self.head is None else self.head.weight)
