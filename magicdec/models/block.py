"""A draft that proposes a block in one pass (DFlash: Chen et al. 2026, arXiv 2602.06036).

Its layers attend to two kinds of entries. Those of the context follow from the target's hidden
states alone: one vector for each token, of which every layer makes keys and values. Those of the
block are made as in any layer, of the last committed token and of masks behind it, which all see
each other. The output at a mask predicts the token of its place.

B rows, T tokens of a block, E hidden size, N hidden states of the target side by side, H query
heads, K KV heads, J = H / K, D head dim.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from magicdec.architectures.block_config import BlockConfig
from magicdec.attention.base import Attention, Shape
from magicdec.models.kv_cache import KVCache, Place
from magicdec.models.parallel import ALONE, Share
from magicdec.models.rope import frequencies_on
from magicdec.models.states_model import StatesModel
from magicdec.models.transformer import Layer


class BlockPlanner:
    """An attention backend that plans for the query heads of several tokens as for those of one."""

    def __init__(self, attention: Attention, num_tokens: int):
        self.attention, self.num_tokens = attention, num_tokens

    def plan(
        self,
        seqlens_B: Tensor,
        shape: Shape,
        window: int | None,
        positions_BKS: Tensor | None = None,
    ) -> Any:
        """Plan as the backend does, with `num_tokens` times the query heads."""
        wide = replace(shape, group_size=self.num_tokens * shape.group_size)
        return self.attention.plan(seqlens_B, wide, window, positions_BKS)


class BlockHead(StatesModel):
    """The layers, which take embedding and output matrix from their target."""

    config: BlockConfig

    def __init__(self, config: BlockConfig, attention: Attention, share: Share = ALONE):
        """Allocate weights. `config` has the sizes of this rank's share."""
        super().__init__(config, attention, share)
        E = config.hidden_size
        self.fc = nn.Linear(len(config.taps) * E, E, bias=False)
        self.state_norm = nn.RMSNorm(E, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, share) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(E, config.rms_norm_eps)

    @property
    @override
    def num_modules(self) -> int:
        """Return 0: entries need no token, so that none waits for its place to be decided."""
        return 0

    @override
    def fused(self, hidden_BTN: Tensor) -> Tensor:
        joined_BTE = self.operators.linear(self.fc, hidden_BTN.to(self.dtype))
        normed_BTE: Tensor = self.state_norm(joined_BTE)
        return normed_BTE

    @override
    def enter(self, tokens_BT: Tensor, cache: KVCache, hidden_BTE: Tensor, module: int = 0) -> None:
        """Write the entries of T hidden states in all layers. Tokens have no part in them."""
        (cos, sin), slots_BT = self._angles(cache, hidden_BTE.shape[1])
        for number in range(len(self.layers)):
            self.write_context(number, hidden_BTE, cos, sin, cache.place(number, slots_BT))

    def write_context(
        self, number: int, hidden_BTE: Tensor, cos: Tensor, sin: Tensor, place: Place | None
    ) -> None:
        """Write the entries of T hidden states in one layer to their place."""
        layer = self.layer_of(number)
        qkv = self.operators.linear(layer.qkv, hidden_BTE)
        qkv = qkv.unflatten(-1, (-1, self.config.head_dim))
        self.operators.rotate(qkv, self.config.num_heads, layer.norms, cos, sin, place)

    @override
    def forward(  # type: ignore[override]
        self, tokens_BT: Tensor, cache: KVCache, is_block: bool = True
    ) -> Tensor:
        """Append T tokens, which all see each other in a block; otherwise each sees those before
        it, as when a context is scored. Return the output (B, T, E).
        """
        num_new = tokens_BT.shape[1]
        num_kv_heads = self.config.num_kv_heads
        ops = self.operators
        (cos, sin), slots_BT = self._angles(cache, num_new)
        # Before the block counts as valid, which would move the places.
        places = [cache.place(number, slots_BT) for number in range(len(self.layers))]
        plans = (
            self._plans(cache, num_new)
            if is_block
            else cache.plan(self.attention, num_new, self.dtype)
        )
        x_BTE = self.share.embed(tokens_BT, self.embed.weight).to(self.dtype)
        mlp_BTE = torch.zeros_like(x_BTE)
        for number in range(len(self.layers)):
            layer = self.layer_of(number)
            x_BTE, q_BTHD = layer.before_attention(ops, x_BTE, mlp_BTE, cos, sin, places[number])
            q = as_one_token(q_BTHD, num_kv_heads) if is_block else q_BTHD
            out = cache.attend(number, q, self.attention, plans[number])
            out_BTHD = as_tokens(out, num_kv_heads, num_new) if is_block else out
            x_BTE, mlp_BTE = layer.after_attention(ops, x_BTE, out_BTHD)
        cache.advance(1 if is_block else num_new)
        return self.normed(ops, x_BTE, mlp_BTE)[1]

    def _plans(self, cache: KVCache, num_new: int) -> list[Any]:
        """Return plans for a block as one token with as many times the query heads, and count all
        its tokens but one as valid: so they see each other in any backend.
        """
        cache.advance(num_new - 1)
        planner = BlockPlanner(self.attention, num_new)
        return cache.plan(planner, 1, self.dtype)  # type: ignore[arg-type]

    def _angles(self, cache: KVCache, num_new: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return cosines and sines of the next tokens, and their slots."""
        frequencies = frequencies_on(self.config, cache.seqlens_B.device)
        cos_BTD, sin_BTD = self.angles(*frequencies, cache.positions_BT(num_new))
        return (cos_BTD[:, :, None], sin_BTD[:, :, None]), cache.slots_BT(num_new)


def as_one_token(q_BTHD: Tensor, num_kv_heads: int) -> Tensor:
    """Return queries (B, 1, K x T x J, D) of one token, in which the heads of all tokens that share
    a KV head are neighbours.
    """
    q_BTKJD = q_BTHD.unflatten(2, (num_kv_heads, -1))
    return q_BTKJD.transpose(1, 2).flatten(1, 3)[:, None].contiguous()


def as_tokens(out_B1QD: Tensor, num_kv_heads: int, num_tokens: int) -> Tensor:
    """Return what `as_one_token` has taken apart as (B, T, H, D)."""
    out_BKTJD = out_B1QD[:, 0].unflatten(1, (num_kv_heads, num_tokens, -1))
    return out_BKTJD.transpose(1, 2).flatten(2, 3).contiguous()
