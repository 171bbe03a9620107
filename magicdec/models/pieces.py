"""The tensors of a checkpoint, and which part of our parameters each fills.

V vocabulary, E hidden size, F MLP size, H query heads, K KV heads, D head dim.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from magicdec.architectures.block_config import BlockConfig
from magicdec.architectures.head_config import HeadConfig
from magicdec.architectures.model_config import ModelConfig
from magicdec.architectures.mtp_config import MtpConfig
from magicdec.models.parallel import ALONE, Share
from magicdec.models.unread import EMBEDDING, HEAD


class TensorPiece(NamedTuple):
    """One tensor of a checkpoint, the part that this rank needs, and the rows of a parameter of
    ours that it fills.
    """

    source: str
    parameter: str
    first_row: int
    shape: tuple[int, ...]  # of the whole tensor
    rows: slice = slice(None)
    columns: slice = slice(None)

    @property
    def part(self) -> tuple[slice, ...]:
        """Return the index of the part that is needed."""
        return (self.rows, self.columns)[: len(self.shape)]

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of the part that is needed."""
        return tuple(
            len(range(size)[part]) for size, part in zip(self.shape, self.part, strict=True)
        )


def pieces(config: ModelConfig, share: Share = ALONE) -> Iterator[TensorPiece]:
    """Yield every tensor that a checkpoint of this (whole) architecture holds, in the order of the
    forward pass.

    Queries, keys and values become the rows of one matrix, in this order, and so do gate and up:
    one matmul each. A rank has the rows that make its own heads and features, and of the matrices
    behind these the columns.
    """
    if config.is_head:
        yield from _PIECES_OF_HEADS[type(config)](config, share)
        return
    E = config.hidden_size
    vocabulary = share.vocabulary(config.vocab_size)
    yield TensorPiece(EMBEDDING, "embed.weight", 0, (config.vocab_size, E), vocabulary)
    for layer in range(config.num_layers):
        theirs = f"model.layers.{layer}."
        ours = f"layers.{layer}."
        yield TensorPiece(
            f"{theirs}input_layernorm.weight", f"{ours}attention_norm.weight", 0, (E,)
        )
        yield from _layer_pieces(config, share, theirs, ours)
    yield TensorPiece("model.norm.weight", "norm.weight", 0, (E,))
    if not config.tie_word_embeddings:
        yield TensorPiece(HEAD, "head.weight", 0, (config.vocab_size, E), vocabulary)


def _layer_pieces(
    config: ModelConfig, share: Share, theirs: str, ours: str
) -> Iterator[TensorPiece]:
    """Yield the tensors of one layer, but for the norm in front of attention."""
    E = config.hidden_size
    F = config.intermediate_size
    D = config.head_dim
    q = _features(share.part(config.num_heads), D)
    kv = _features(share.kv_heads(config.num_kv_heads), D)
    mlp = share.part(F)
    q_rows = _size(q)
    kv_rows = _size(kv)
    mlp_rows = _size(mlp)
    whole_q = config.num_heads * D
    whole_kv = config.num_kv_heads * D
    inputs = config.qkv_inputs
    qkv = (("q", 0, whole_q, q), ("k", q_rows, whole_kv, kv), ("v", q_rows + kv_rows, whole_kv, kv))
    for name, first_row, rows, part in qkv:
        yield TensorPiece(
            f"{theirs}self_attn.{name}_proj.weight",
            f"{ours}qkv.weight",
            first_row,
            (rows, inputs),
            part,
        )
        if config.qkv_bias:
            yield TensorPiece(
                f"{theirs}self_attn.{name}_proj.bias", f"{ours}qkv.bias", first_row, (rows,), part
            )
    if config.qk_norm:
        yield TensorPiece(f"{theirs}self_attn.q_norm.weight", f"{ours}q_norm.weight", 0, (D,))
        yield TensorPiece(f"{theirs}self_attn.k_norm.weight", f"{ours}k_norm.weight", 0, (D,))
    yield TensorPiece(
        f"{theirs}self_attn.o_proj.weight", f"{ours}output.weight", 0, (E, whole_q), columns=q
    )
    if config.output_bias:
        yield TensorPiece(f"{theirs}self_attn.o_proj.bias", f"{ours}output.bias", 0, (E,))
    yield TensorPiece(f"{theirs}post_attention_layernorm.weight", f"{ours}mlp_norm.weight", 0, (E,))
    yield TensorPiece(f"{theirs}mlp.gate_proj.weight", f"{ours}gate_up.weight", 0, (F, E), mlp)
    yield TensorPiece(f"{theirs}mlp.up_proj.weight", f"{ours}gate_up.weight", mlp_rows, (F, E), mlp)
    yield TensorPiece(f"{theirs}mlp.down_proj.weight", f"{ours}down.weight", 0, (E, F), columns=mlp)


def _features(heads: slice, head_dim: int) -> slice:
    """Return the features of some heads."""
    return slice(heads.start * head_dim, heads.stop * head_dim)


def _size(part: slice) -> int:
    return int(part.stop - part.start)


def _head_pieces(config: HeadConfig, share: Share) -> Iterator[TensorPiece]:
    """Yield the tensors of a head that it does not take from its target."""
    E, read = config.hidden_size, config.target_hidden_size
    theirs = config.layer_prefix
    yield TensorPiece("fc.weight", "fc.weight", 0, (E, config.num_taps * read))
    if config.input_norms == "joint":
        yield TensorPiece("input_norm.weight", "input_norms.0.weight", 0, (config.num_taps * read,))
    if config.input_norms == "each":
        for number in range(config.num_taps):
            yield TensorPiece(
                f"fc_norm.{number}.weight", f"input_norms.{number}.weight", 0, (read,)
            )
    yield TensorPiece(f"{theirs}input_layernorm.weight", "layers.0.embedding_norm.weight", 0, (E,))
    yield TensorPiece(f"{theirs}hidden_norm.weight", "layers.0.attention_norm.weight", 0, (E,))
    yield from _layer_pieces(config, share, theirs, "layers.0.")
    yield TensorPiece("norm.weight", "norm.weight", 0, (E,))
    if config.own_embedding:
        vocabulary = share.vocabulary(config.vocab_size)
        yield TensorPiece(
            "embed_tokens.weight", "embed.weight", 0, (config.vocab_size, E), vocabulary
        )
    if config.own_head:
        vocabulary = share.vocabulary(config.num_logits)
        yield TensorPiece(HEAD, "head.weight", 0, (config.num_logits, E), vocabulary)


def _mtp_pieces(config: MtpConfig, share: Share) -> Iterator[TensorPiece]:
    """Yield the tensors of modules that predict further tokens, as DeepSeek and GLM name them."""
    E = config.hidden_size
    for module in range(config.num_layers):
        theirs = f"layers.{module}."
        ours = f"layers.{module}."
        for name, parameter in (("enorm", "embedding_norm"), ("hnorm", "state_norm")):
            yield TensorPiece(f"{theirs}{name}.weight", f"{ours}{parameter}.weight", 0, (E,))
        yield TensorPiece(f"{theirs}eh_proj.weight", f"{ours}joined.weight", 0, (E, 2 * E))
        norms = (("input_layernorm", "attention_norm"), ("shared_head.norm", "output_norm"))
        for name, parameter in norms:
            yield TensorPiece(f"{theirs}{name}.weight", f"{ours}{parameter}.weight", 0, (E,))
        yield from _layer_pieces(config, share, theirs, ours)


def _block_pieces(config: BlockConfig, share: Share) -> Iterator[TensorPiece]:
    """Yield the tensors of a draft that proposes blocks, as DFlash's authors name them."""
    E = config.hidden_size
    yield TensorPiece("fc.weight", "fc.weight", 0, (E, len(config.taps) * E))
    yield TensorPiece("hidden_norm.weight", "state_norm.weight", 0, (E,))
    for number in range(config.num_layers):
        prefix = f"layers.{number}."
        yield TensorPiece(
            f"{prefix}input_layernorm.weight", f"{prefix}attention_norm.weight", 0, (E,)
        )
        yield from _layer_pieces(config, share, prefix, prefix)
    yield TensorPiece("norm.weight", "norm.weight", 0, (E,))


_PIECES_OF_HEADS: dict[type, Any] = {
    HeadConfig: _head_pieces,
    MtpConfig: _mtp_pieces,
    BlockConfig: _block_pieces,
}
