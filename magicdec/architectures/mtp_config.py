"""The architecture of modules that predict further tokens (multi-token prediction, MTP: DeepSeek-AI
2024, arXiv 2412.19437, section 2.2), over a target that our own transformer runs.

Torch-free. Modules of a checkpoint that transformers' modules run: see modules_config.py.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pydantic.dataclasses import dataclass
from typing_extensions import override

from magicdec.architectures.head_config import BOOKKEEPING, layer_of, unread_keys_around
from magicdec.architectures.hugging_face import from_hugging_face
from magicdec.architectures.model_config import Layers, ModelConfig, mismatches
from magicdec.errors import UserError
from magicdec.inputs.rules import JSON, STRICT, parse


@dataclass(frozen=True, config=STRICT)
class MtpConfig(ModelConfig):
    """The sizes of such modules. Each is one layer, and `num_layers` counts them; `vocab_size` is
    the target's.
    """

    is_head = True

    @override
    def taps_of(self, target: ModelConfig) -> tuple[int, ...]:
        """Return which hidden states of the target are read: what it returns, normalised."""
        return (target.num_layers + 1,)

    @property
    @override
    def joined_inputs(self) -> int:
        return 2 * self.hidden_size

    @property
    @override
    def fused_parameters(self) -> int:
        return self.joined_inputs * self.hidden_size

    @property
    @override
    def num_fusions(self) -> int:
        """Return how often hidden states are joined: in each module."""
        return self.num_layers

    @property
    @override
    def num_parameters(self) -> int:
        """Return the modules' own weights."""
        whole = super().num_parameters - self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return whole - embeddings + self.num_layers * (self.fused_parameters + 3 * self.hidden_size)

    @classmethod
    def like(cls, target: ModelConfig) -> "MtpConfig":
        """Return one module of a target: a layer of its sizes."""
        plain = target.sizes
        return cls(**plain | {"num_layers": 1, "sliding_layers": (), "sliding_window": None})

    def check(self, target: ModelConfig) -> None:
        """Raise UserError for modules that were made for another target."""
        sizes = {
            "hidden size": (self.hidden_size, target.hidden_size),
            "vocabulary": (self.vocab_size, target.vocab_size),
        }
        if wrong := list(mismatches(sizes)):
            raise UserError(
                f"draft.model: the modules were made for another target: {wrong[0]}; set"
                " draft.model.path to some for this target, or to null for those in its own"
                " checkpoint"
            )


@dataclass(frozen=True, kw_only=True, config=JSON)
class MtpFile:
    """The keys of a config.json of such modules that are read, besides those of their layers."""

    transformer_layer_config: dict[str, Any] | None = None
    num_nextn_predict_layers: Layers = 1


def mtp_from(plain: Mapping[str, Any], name: str = "config.json") -> MtpConfig:
    """Return the modules that a config.json describes; `name` is what errors call the file."""
    file = parse(MtpFile, plain, where=name)
    model = from_hugging_face(dict(layer_of(plain)) | {"tie_word_embeddings": False}, name)
    values = model.sizes
    return MtpConfig(**values | {"num_layers": file.num_nextn_predict_layers})


def unread_keys_of_mtp(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of such a config.json that `mtp_from` does not read, with their values."""
    read = {entry.name for entry in fields(MtpFile)} | {*BOOKKEEPING}
    return unread_keys_around(plain, read)
