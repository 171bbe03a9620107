"""The data of a head's training: a target that reads text, and the head's own steps over it, with
gradients.

B pieces, T tokens, E hidden size, N hidden states of the target side by side, V draft vocabulary.
"""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.attention import backends
from magicdec.config.registry import BACKENDS
from magicdec.models import checkpoint, description
from magicdec.models.head import Head
from magicdec.models.kv_cache import KVCache
from magicdec.models.operators import PYTORCH
from magicdec.models.rope import frequencies_on
from magicdec.models.taps import Taps
from magicdec.models.transformer import Transformer

CHUNK = 512  # tokens of the target's passes


def load_target(folder: Path) -> Transformer:
    """Return a target in float32, ready for this machine's CPU."""
    config = description.read_config(folder)
    name, _ = backends.choose("auto", torch.device("cpu"), torch.float32, [config.head_dim])
    with torch.device("meta"):
        target = Transformer(config, BACKENDS[name].work())
    target.load_state_dict(checkpoint.load(folder, config, torch.float32, "cpu"), assign=True)
    return target.eval().requires_grad_(False)


class Reader:
    """A target that reads text, and hands out its hidden states and distributions."""

    def __init__(self, target: Transformer, taps: tuple[int, ...]):
        self.target, self.taps = target, Taps(taps)

    @torch.no_grad()
    def read(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states side by side (B, T, N x E), and the last ones normalised (B, T,
        E).
        """
        cache = KVCache(
            self.target.config, len(tokens_BT), tokens_BT.shape[1], torch.float32, "cpu"
        )
        hidden, last = [], []
        for part_BT in tokens_BT.split(CHUNK, dim=1):
            last.append(self.target(part_BT, cache, self.taps))
            hidden.append(self.taps.hidden_BTN)
        return torch.cat(hidden, dim=1), torch.cat(last, dim=1)


class Recorder:
    """A stand-in for a place in a cache: it keeps what is written."""

    def __init__(self, kept: list[tuple[Tensor, Tensor]]):
        self.kept = kept

    def write(self, k_BTKD: Tensor, v_BTKD: Tensor) -> None:
        """Keep keys and values."""
        self.kept.append((k_BTKD, v_BTKD))


def attend(q_BTHD: Tensor, text: tuple[Tensor, Tensor], own: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return attention over the entries of the text up to each token, and over the head's own
    entries of later steps, of which each token sees those that were made for it.
    """
    group, scale = q_BTHD.shape[2] // text[0].shape[2], q_BTHD.shape[-1] ** -0.5
    text_k, text_v = (x.repeat_interleave(group, dim=2) for x in text)
    scores_BHTS = torch.einsum("bthd,bshd->bhts", q_BTHD * scale, text_k)
    T = q_BTHD.shape[1]
    scores_BHTS = scores_BHTS.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
    own_k, own_v = ([one[i].repeat_interleave(group, dim=2) for one in own] for i in (0, 1))
    own_scores = [(q_BTHD * scale * k).sum(-1).movedim(1, 2)[..., None] for k in own_k]
    weights = torch.cat((scores_BHTS, *own_scores), dim=-1).softmax(-1)
    out_BTHD = torch.einsum("bhts,bshd->bthd", weights[..., :T], text_v)
    for number, v in enumerate(own_v):
        out_BTHD = out_BTHD + weights[..., T + number].movedim(1, 2)[..., None] * v
    return out_BTHD


def steps(
    head: Head, hidden_BTN: Tensor, tokens_BT: Tensor, count: int, truncate: int
) -> list[Tensor]:
    """Return the logits (B, T, V) of each step, for as many tokens as there are hidden states.

    `tokens_BT` has the token behind each hidden state, and count - 1 more. A step reads the text's
    own tokens.
    """
    # the head's own `fused` may take an operator of its own, which gives no gradient
    x_BTE, T, keys = F.linear(hidden_BTN, head.fc.weight), hidden_BTN.shape[1], []
    logits = []
    for step in range(count):
        positions_T = torch.arange(step, step + T)
        cos, sin = (
            x[None, :, None]
            for x in head.angles(*frequencies_on(head.config, x_BTE.device), positions_T)
        )
        embedded_BTE = F.embedding(tokens_BT[:, step : step + T], head.embed.weight).to(x_BTE.dtype)
        kept: list[tuple[Tensor, Tensor]] = []
        x_BTE, q_BTHD = head.layer.before_attention(
            PYTORCH, x_BTE, embedded_BTE, cos, sin, Recorder(kept)
        )
        keys += kept
        x_BTE, mlp_BTE = head.layer.after_attention(
            PYTORCH, x_BTE, attend(q_BTHD, keys[0], keys[1:])
        )
        x_BTE = x_BTE + mlp_BTE
        logits.append(F.linear(head.norm(x_BTE), head.head.weight))
        if (step + 1) % truncate == 0:
            x_BTE = x_BTE.detach()
    return logits


def pieces(x_T: Tensor, start: int, size: int, count: int, extra: int = 0) -> Tensor:
    """Cut one window, from `start` on, into pieces of `size`, with `extra` tokens each that the
    next one has, too.

    There are as many as leave room for `count` steps.
    """
    number = (len(x_T) - count) // size
    return torch.stack(
        [x_T[start + i * size : start + (i + 1) * size + extra] for i in range(number)]
    )
