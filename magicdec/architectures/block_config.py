"""The architecture of a draft that proposes a block in one pass (DFlash: Chen et al. 2026, arXiv
2602.06036), from its config.json. Torch-free.

The layout is that of its authors: the keys of Qwen3's layers, `block_size` next to them or in
`dflash_config`, and there `mask_token_id` and `target_layer_ids`.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

from pydantic.dataclasses import dataclass
from typing_extensions import override

from magicdec.architectures.hugging_face import from_hugging_face, unread_keys
from magicdec.architectures.model_config import LONGEST, Layer, ModelConfig, TokenId, mismatches
from magicdec.errors import UserError
from magicdec.inputs.rules import JSON, STRICT, must, parse, whole

KEY = "dflash_config"  # by which such a config.json is known
# Keys that name the code that wrote the file, and the target.
BOOKKEEPING = ("auto_map", "num_target_layers", KEY)
MOST_TAPS = 5  # hidden states of the usual draft
BlockSize = Annotated[int, whole(2, LONGEST)]  # tokens: the last committed one and proposals
NAMED_LAYERS: Any = Annotated[
    list[Layer], must("must be a list of at least one layer", lambda ids: len(ids) > 0)
]


@dataclass(frozen=True, config=STRICT)
class BlockConfig(ModelConfig):
    """The sizes of one such draft. `vocab_size` is the target's."""

    is_head = True
    block_size: BlockSize = 16  # the last committed token and the places to fill
    mask_token_id: TokenId = 0  # what stands at these places
    # The target's layers in front of which its hidden states are read, 1 to num_layers.
    taps: tuple[Layer, ...] = (1,)

    @override
    def taps_of(self, target: ModelConfig) -> tuple[int, ...]:
        """Return the hidden states that are read. transformers, which drafts were trained with, has
        those behind the last layer normalised.
        """
        return tuple(tap + (tap == target.num_layers) for tap in self.taps)

    @property
    @override
    def fused_parameters(self) -> int:
        return len(self.taps) * self.hidden_size**2

    @property
    @override
    def num_parameters(self) -> int:
        """Return the draft's own weights."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        layers = super().num_parameters - embeddings
        return layers + self.fused_parameters + self.hidden_size

    @classmethod
    def like(cls, target: ModelConfig) -> "BlockConfig":
        """Return the usual draft of a target: five layers of its sizes, over as many of its hidden
        states, evenly spaced.
        """
        plain = target.sizes
        count = min(MOST_TAPS, target.num_layers)
        last = target.num_layers
        plain |= {"num_layers": count, "sliding_layers": (), "sliding_window": None}
        plain |= {"qk_norm": True, "qkv_bias": False}
        taps = tuple(max(1, (number + 1) * last // (count + 1)) for number in range(count))
        return cls(**plain, taps=taps)

    def check(self, target: ModelConfig) -> None:
        """Raise UserError for a draft that was made for another target."""
        sizes = {
            "hidden size": (self.hidden_size, target.hidden_size),
            "vocabulary": (self.vocab_size, target.vocab_size),
        }
        wrong = list(mismatches(sizes))
        if max(self.taps) > target.num_layers:
            wrong.append(f"layer {max(self.taps)} of {target.num_layers}")
        if self.mask_token_id >= self.vocab_size:
            wrong.append(
                f"mask token {self.mask_token_id:,} beyond a vocabulary of {self.vocab_size:,}"
            )
        if wrong:
            raise UserError(
                f"draft.model: the draft was made for another target: {wrong[0]}; set"
                " draft.model.path to one for this target, or to null in predictions"
            )


@dataclass(frozen=True, kw_only=True, config=JSON)
class DflashConfig:
    """The keys of `dflash_config` that are read."""

    target_layer_ids: NAMED_LAYERS
    mask_token_id: TokenId
    block_size: BlockSize | None = None


@dataclass(frozen=True, kw_only=True, config=JSON)
class BlockFile:
    """The keys of such a config.json that are read, besides those of its layers."""

    dflash_config: DflashConfig
    block_size: BlockSize | None = None


def block_from(plain: Mapping[str, Any], name: str = "config.json") -> BlockConfig:
    """Return the draft that a config.json describes; `name` is what errors call the file."""
    file = parse(BlockFile, plain, where=name)
    model = from_hugging_face(dict(plain) | {"tie_word_embeddings": False}, name)
    if model.sliding_layers:
        raise UserError(
            f"{name}: a draft of blocks whose layers have a sliding window is not supported; its"
            " `cache` bounds what it reads"
        )
    nested = file.dflash_config
    block_size = nested.block_size or file.block_size
    if block_size is None:
        raise UserError(f"{name}: block_size is missing, next to dflash_config or in it")
    values = model.sizes
    return BlockConfig(
        **values,
        block_size=block_size,
        mask_token_id=nested.mask_token_id,
        taps=tuple(layer + 1 for layer in nested.target_layer_ids),
    )


def unread_keys_of_block(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of such a config.json that `block_from` does not read, with their values."""
    read = {entry.name for entry in fields(DflashConfig)}
    nested = {key: value for key, value in plain[KEY].items() if key not in read}
    unread = unread_keys(plain, expected={*BOOKKEEPING, "block_size"})
    return unread | {f"{KEY}.{key}": value for key, value in nested.items()}
