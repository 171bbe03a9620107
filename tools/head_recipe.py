"""The recipe of a kind of head, as its training asks for it: how a head is made, what it learns
from a window of text, how its proposals are judged, and which config.json describes it.

B pieces, T tokens, E hidden size, N hidden states of the target side by side, V tokens that the
head proposes.
"""

import argparse
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tiny_corpus import CODE_SHARE, Corpus
from torch import Tensor

from magicdec.architectures.model_config import ModelConfig
from magicdec.attention import backends
from magicdec.config.registry import BACKENDS
from magicdec.models import checkpoint, description
from magicdec.models.kv_cache import KVCache
from magicdec.models.states_model import StatesModel
from magicdec.models.taps import Taps
from magicdec.models.transformer import Transformer

CHUNK = 512  # tokens of the target's passes


class Window(NamedTuple):
    """A window of text, and what the target makes of it."""

    tokens_T: Tensor
    hidden_TN: Tensor  # what the head reads
    last_TE: Tensor  # behind the last layer, normalised


class Recipe(ABC):
    """One kind of head for one target."""

    # Settings of the command line that this kind has, with their defaults.
    options: ClassVar[Mapping[str, Any]]

    model: StatesModel  # with the target's embedding and output matrix where it has none
    ids_V: Tensor  # of the target's tokens

    def __init__(self, args: argparse.Namespace, target: Transformer, corpus: Corpus):
        self.args, self.target = args, target
        self.teacher_VE = target.embed.weight if target.head is None else target.head.weight

    @abstractmethod
    def losses(self, window: Window, progress: float) -> list[Tensor]:
        """Return the mean cross entropy of each step ahead, in nats, against the target's
        distribution over the draft's tokens. `progress` is the share of the time that is spent.
        """

    @abstractmethod
    def accepted(self, window: Window) -> list[float]:
        """Return, for each step ahead, the share of proposals that are accepted together with all
        those before them.
        """

    @abstractmethod
    def described(self) -> dict[str, Any]:
        """Return the config.json of the head."""

    def verifier(self) -> dict[str, Any]:
        """Return how a config.json in the layout of speculators names the target."""
        theirs = json.loads((self.args.target / "config.json").read_text())
        name = self.args.verifier or str(self.args.target)
        return {"name_or_path": name, "architectures": theirs["architectures"]}

    def read(self, tokens_T: Tensor) -> Window:
        """Return a window of these tokens."""
        return read(self.target, self.model.config.taps_of(self.target.config), tokens_T)

    def wanted(self, last_TE: Tensor) -> Tensor:
        """Return the target's logits of the draft's tokens (T, V)."""
        return F.linear(last_TE, self.teacher_VE[self.ids_V].float())

    def chosen(self, last_TE: Tensor) -> Tensor:
        """Return the tokens (T) that the target chooses."""
        parts = [
            self.target.logits(part_TE[None])[0].argmax(-1) for part_TE in last_TE.split(CHUNK)
        ]
        return torch.cat(parts)

    def in_pieces(self, x_T: Tensor, start: int, extra: int = 0) -> Tensor:
        """Cut a window, from `start` on, into pieces of `--piece` tokens, with `extra` tokens each
        that the next one has, too. There are as many as leave room for `--steps` more.
        """
        size = self.args.piece
        number = (len(x_T) - self.args.steps) // size
        parts = [x_T[start + i * size : start + (i + 1) * size + extra] for i in range(number)]
        return torch.stack(parts)


def load_target(folder: Path) -> Transformer:
    """Return a target in float32, ready for this machine's CPU."""
    config = description.read_config(folder)
    name, _ = backends.choose("auto", torch.device("cpu"), torch.float32, [config.head_dim])
    with torch.device("meta"):
        target = Transformer(config, BACKENDS[name].work())
    target.load_state_dict(checkpoint.load(folder, config, torch.float32, "cpu"), assign=True)
    return target.eval().requires_grad_(False)


@torch.no_grad()
def read(target: Transformer, layers: tuple[int, ...], tokens_T: Tensor) -> Window:
    """Return a window whose hidden states are those in front of the listed layers."""
    taps = Taps(layers)
    cache = KVCache(target.config, 1, len(tokens_T), torch.float32, "cpu")
    hidden, last = [], []
    for part_T in tokens_T.split(CHUNK):
        last.append(target(part_T[None], cache, taps)[0])
        hidden.append(taps.hidden_BTN[0])
    return Window(tokens_T, torch.cat(hidden), torch.cat(last))


def shares(corpus: Corpus, count: int) -> np.ndarray:
    """Return the share of each of the first `count` tokens, or of more if there are more, in the
    training text.
    """
    kinds = {"stdlib": CODE_SHARE, "books": 1 - CODE_SHARE}
    size = max(count, 1 + max(int(ids.max()) for ids in corpus.train.values()))
    found: np.ndarray = sum(
        kinds[kind] * np.bincount(ids, minlength=size) / len(ids)
        for kind, ids in corpus.train.items()
    )
    return found


def layer_sizes(target: ModelConfig, args: argparse.Namespace) -> dict[str, Any]:
    """Return the sizes of one layer of a head: a target's, but for its MLP and its trained length,
    with the switches that `layer_keys` writes.
    """
    values = target.sizes | {"num_layers": 1, "sliding_layers": (), "sliding_window": None}
    values |= dict.fromkeys(("qk_norm", "qkv_bias", "output_bias", "tie_word_embeddings"), False)
    mlp = args.mlp or target.intermediate_size
    values |= {"intermediate_size": mlp, "max_position_embeddings": args.piece}
    return values | {"rope_scaling": None, "eos_token_ids": ()}


def layer_keys(config: ModelConfig, family: str) -> dict[str, Any]:
    """Return the keys of a config.json that describe the layers of a head."""
    alike = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
    )
    keys: dict[str, Any] = {"model_type": family, "hidden_act": "silu"}
    keys |= {"num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads}
    keys |= {"num_key_value_heads": config.num_kv_heads, "attention_bias": False}
    keys |= {name: getattr(config, name) for name in alike}
    return keys | {"tie_word_embeddings": False}
