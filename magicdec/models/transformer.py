"""One decoder-only transformer for the Llama, Mistral, Qwen2, Qwen3 and Yi families.

B rows, T tokens, E hidden size, H query heads, K KV heads, D head dim, V vocabulary. One forward
pass serves prefill (T = a chunk), decode (T = 1) and verify (T = gamma + 1): it appends T tokens to
the cache and attends over it. Under tensor parallelism, H and K are those of one rank, and only
what `Share` joins is complete.
"""

from copy import copy
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from magicdec.architectures.model_config import ModelConfig
from magicdec.attention.base import Attention
from magicdec.attention.sdpa import SdpaAttention
from magicdec.models import passes
from magicdec.models.kv_cache import KVCache, Place
from magicdec.models.operators import PYTORCH, Norms, Operators, operators_for
from magicdec.models.parallel import ALONE, Share
from magicdec.models.rope import angles_table, frequencies_on
from magicdec.models.taps import Taps

# Where layers are compiled.
COMPILED = ("before_attention", "between_sums", "after_attention", "angles", "normed")
MAX_COMPILED = 64  # shapes and models of a process; beyond that, PyTorch compiles no more


def embedding(num_tokens: int, size: int) -> nn.Embedding:
    """Return an embedding without values: drawing them would import PyTorch's compiler, which takes
    a second.
    """
    return nn.Embedding.from_pretrained(torch.empty(num_tokens, size))


class Layer(nn.Module):
    """Attention and a gated MLP, each behind an RMS norm; QKV and gate-up are single matmuls."""

    def __init__(self, config: ModelConfig, share: Share):
        super().__init__()
        self.config, self.share = config, share
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.qkv = nn.Linear(config.hidden_size, q_size + 2 * kv_size, bias=config.qkv_bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
        self.output = nn.Linear(q_size, config.hidden_size, bias=config.output_bias)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    @property
    def norms(self) -> Norms:
        """Return the norms of queries and keys, if the model has them."""
        return (self.q_norm, self.k_norm) if self.config.qk_norm else None

    def before_attention(
        self,
        ops: Operators,
        x_BTE: Tensor,
        mlp_BTE: Tensor,
        cos: Tensor,
        sin: Tensor,
        place: Place | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream with the last MLP's output added, and queries (B, T, H, D),
        rotated.

        Rotated keys, and values (B, T, K, D), are written to their place, if there is one.
        """
        c = self.config
        x_BTE, normed_BTE = ops.add_norm(self.attention_norm, x_BTE, mlp_BTE)
        qkv = ops.linear(self.qkv, normed_BTE).unflatten(-1, (-1, c.head_dim))
        return x_BTE, ops.rotate(qkv, c.num_heads, self.norms, cos, sin, place)

    def after_attention(
        self, ops: Operators, x_BTE: Tensor, out_BTHD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream behind attention, and the MLP's output, which the next norm
        adds.
        """
        out_BTE = self.share.summed(ops, self.output, out_BTHD.flatten(2))
        x_BTE, gated_BTF = self.between_sums(ops, x_BTE, out_BTE)
        return x_BTE, self.share.summed(ops, self.down, gated_BTF)

    def between_sums(self, ops: Operators, x_BTE: Tensor, out_BTE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream with attention's output added, and the MLP's hidden features
        (B, T, F).
        """
        x_BTE, normed_BTE = ops.add_norm(self.mlp_norm, x_BTE, out_BTE)
        return x_BTE, ops.gated(ops.linear(self.gate_up, normed_BTE))


class Transformer(nn.Module):
    """The model: weights and an attention backend. The tokens so far are in the cache that is
    passed to it.
    """

    def __init__(self, config: ModelConfig, attention: Attention, share: Share = ALONE):
        """Allocate weights. `config` has the sizes of this rank's share."""
        super().__init__()
        self.config, self.attention = config, attention
        self.share, self.is_compiled = share, False
        vocabulary = share.vocabulary_rows(config.vocab_size)
        self.embed = embedding(vocabulary, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, share) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = (
            None
            if config.tie_word_embeddings
            else nn.Linear(config.hidden_size, vocabulary, bias=False)
        )

    @override
    def forward(self, tokens_BT: Tensor, cache: KVCache, taps: Taps | None = None) -> Tensor:
        """Append T tokens to every row of the cache. Return the normalised hidden states (B, T, E).

        `taps` take the hidden states in front of their layers.
        """
        num_new = tokens_BT.shape[1]
        x_BTE, angles = self._embedded(tokens_BT, cache)
        plans = cache.plan(self.attention, num_new, x_BTE.dtype)
        hidden_BTE = None
        if self.share.size == 1 and not self.is_compiled:
            hidden_BTE = passes.run(
                self.layers, self.norm, self.attention, x_BTE, angles, cache, plans, taps
            )
        if hidden_BTE is None:
            hidden_BTE = self._layer_by_layer(x_BTE, angles, cache, plans, taps)
        if taps:
            taps.take(len(self.layers) + 1, hidden_BTE)
        cache.advance(num_new)
        return hidden_BTE

    def first_entries(self, tokens_BT: Tensor, cache: KVCache) -> None:
        """Write the entries of the first layer alone, which depend on tokens and positions only."""
        x_BTE, angles = self._embedded(tokens_BT, cache)
        cos = angles[0][:, :, None]
        sin = angles[1][:, :, None]
        place = cache.place(0, cache.slots_BT(tokens_BT.shape[1]))
        first = cast("Layer", self.layers[0])
        first.before_attention(self.operators, x_BTE, torch.zeros_like(x_BTE), cos, sin, place)

    def _embedded(self, tokens_BT: Tensor, cache: KVCache) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the embeddings of the next tokens of every row (B, T, E), and the angles of their
        positions.
        """
        frequencies_D2, factor = frequencies_on(self.config, tokens_BT.device)
        angles = self.angles(frequencies_D2, factor, cache.positions_BT(tokens_BT.shape[1]))
        return self.share.embed(tokens_BT, self.embed.weight).to(self.dtype), angles

    def _layer_by_layer(
        self,
        x_BTE: Tensor,
        angles: tuple[Tensor, Tensor],
        cache: KVCache,
        plans: list[Any],
        taps: Taps | None,
    ) -> Tensor:
        """Return the normalised output of all layers."""
        ops = self.operators
        slots_BT = cache.slots_BT(x_BTE.shape[1])
        cos = angles[0][:, :, None]
        sin = angles[1][:, :, None]
        mlp_BTE = torch.zeros_like(x_BTE)
        for i, layer in enumerate(cast("list[Layer]", self.layers)):
            x_BTE, q_BTHD = layer.before_attention(
                ops, x_BTE, mlp_BTE, cos, sin, cache.place(i, slots_BT)
            )
            if taps:
                taps.take(i, x_BTE)
            out_BTHD = cache.attend(i, q_BTHD, self.attention, plans[i])
            del q_BTHD, mlp_BTE  # memory peaks in the MLP
            x_BTE, mlp_BTE = layer.after_attention(ops, x_BTE, out_BTHD)
        x_BTE, normed_BTE = self.normed(ops, x_BTE, mlp_BTE)
        if taps:
            taps.take(len(self.layers), x_BTE)
        return normed_BTE

    def angles(
        self, frequencies_D2: Tensor, factor: float, positions_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (B, T, D2) of the rotations."""
        return angles_table(frequencies_D2, factor, positions_BT)

    def normed(self, ops: Operators, x_BTE: Tensor, mlp_BTE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream behind the last layer, and the same normalised."""
        return ops.add_norm(self.norm, x_BTE, mlp_BTE)

    def logits(self, hidden_BTE: Tensor) -> Tensor:
        """Return next-token logits (B, T, V); kept apart so that prefill computes only the ones it
        needs.
        """
        weight_VE = self.embed.weight if self.head is None else self.head.weight
        return self.share.logits(
            self.operators.matmul(hidden_BTE, weight_VE), self.config.vocab_size
        )

    @property
    def dtype(self) -> torch.dtype:
        """The type of activations. Matrices may be stored in fewer bits."""
        return self.norm.weight.dtype

    @property
    def operators(self) -> Operators:
        """The operators around attention: those that go with its backend, unless they are
        compiled.
        """
        return PYTORCH if self.is_compiled else operators_for(type(self.attention))

    def step_weight_bytes(self, num_tokens: int) -> float:
        """Return the bytes of weights that a step of so many tokens reads: here always the same,
        few rows of an embedding that is not the head.
        """
        unread = 0 if self.head is None else self.embed.weight.nbytes
        return sum(weight.nbytes for weight in self.parameters()) - unread

    def experts(self) -> list[nn.Module]:
        """Return the modules of routed experts, one for each layer that has any: here none."""
        return []

    def first_layers(self, num_layers: int) -> "Transformer":
        """Return a model of the first layers, with the same embedding and head; the weights are
        shared.
        """
        with torch.device("meta"):
            part = Transformer(self.config.layers(0, num_layers), self.attention, self.share)
        part.embed = self.embed
        part.layers = self.layers[:num_layers]
        part.norm, part.head = self.norm, self.head
        part.is_compiled = self.is_compiled
        return part.eval()

    def keep_layers(self, num_layers: int) -> None:
        """Drop all layers but the first ones. What was allocated for the others stays."""
        self.layers = self.layers[:num_layers]

    def plain(self) -> "Transformer":
        """Return the same model by PyTorch's operators and attention, not compiled; the weights are
        shared.
        """
        twin = _uncompiled(self)
        twin._modules = {**self._modules, "layers": nn.ModuleList(map(_uncompiled, self.layers))}
        twin.attention, twin.is_compiled = SdpaAttention(), False
        return twin

    def compile_layers(self) -> None:
        """Fuse what surrounds attention in each layer: sums with norms, rotation with the write to
        the cache, SwiGLU; and, before and behind the layers, the table of rotations and the last
        norm.

        All layers share the compiled code. A single token has its own version. For other numbers of
        tokens, and for batches, the second one compiles for any.
        """
        self.is_compiled = True
        torch._dynamo.config.recompile_limit = MAX_COMPILED
        for layer in self.layers:
            # The first half writes to the cache: trying configurations of its kernel would copy a
            # layer's whole cache.
            compile_parts(layer, "before_attention", options={"triton.autotune_pointwise": False})
            # Matmuls that write into symmetric memory stay as they are, and with them the sums.
            compile_parts(layer, "between_sums" if self.share.sums else "after_attention")
        compile_parts(self, "angles", "normed")


Part = TypeVar("Part", bound=nn.Module)


def _uncompiled(module: Part) -> Part:
    """Return a copy that shares the weights, with its own methods in place of compiled ones."""
    twin = copy(module)
    for name in COMPILED:
        vars(twin).pop(name, None)
    return twin


def compile_parts(owner: object, *methods: str, **settings: Any) -> None:
    """Replace methods of an object by what torch.compile makes of them."""
    for method in methods:
        setattr(owner, method, torch.compile(getattr(owner, method), **settings))
