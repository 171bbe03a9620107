"""Heads that propose one token after the other: EAGLE-3 (Li et al. 2025, arXiv 2503.01840) and a
module that predicts further tokens (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2).

As in EAGLE-3's paper, a head is trained on its own output: in the second step it reads what it made
of the first one, and so on ("training-time test"), with the entries of the text behind it.
Gradients go back through `--truncate` of these steps.

B pieces, T tokens, E hidden size, N hidden states of the target side by side, V draft vocabulary.
"""

import argparse
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from head_recipe import Recipe, Window, layer_keys, layer_sizes, shares
from tiny_corpus import Corpus
from torch import Tensor
from typing_extensions import override

from magicdec.architectures.head_config import LAYER, HeadConfig
from magicdec.architectures.model_config import ModelConfig
from magicdec.architectures.mtp_config import MtpConfig
from magicdec.attention.sdpa import SdpaAttention
from magicdec.models.head import Head
from magicdec.models.mtp_head import MtpHead
from magicdec.models.operators import PYTORCH
from magicdec.models.rope import frequencies_on
from magicdec.models.transformer import Transformer

CHAIN: dict[str, Any] = {"steps": 3, "alone": 0.3, "truncate": 3}


class ChainRecipe(Recipe):
    """Heads whose next step reads the output of the last one."""

    model: Head

    @override
    def losses(self, window: Window, progress: float) -> list[Tensor]:
        count = 1 if progress < self.args.alone else self.args.steps
        wanted_TV = self.wanted(window.last_TE)
        losses = []
        for step, logits_BTV in enumerate(self.steps(window, count)):
            wanted_BTV = self.in_pieces(wanted_TV, step + 1).softmax(-1)
            losses.append(F.cross_entropy(logits_BTV.flatten(0, 1), wanted_BTV.flatten(0, 1)))
        return losses

    @override
    def accepted(self, window: Window) -> list[float]:
        chosen_T = self.chosen(window.last_TE)
        accepted, rates = torch.ones(1, dtype=torch.bool), []
        for step, logits_BTV in enumerate(self.steps(window, self.args.steps)):
            proposed_BT = self.ids_V[logits_BTV.argmax(-1)]
            accepted = accepted & (proposed_BT == self.in_pieces(chosen_T, step + 1))
            rates.append(accepted.float().mean().item())
        return rates

    def steps(self, window: Window, count: int) -> list[Tensor]:
        """Return the logits of the first steps for the pieces of one window."""
        behind_BT = self.in_pieces(window.tokens_T, 1, extra=self.args.steps - 1)
        hidden_BTN = self.in_pieces(window.hidden_TN, 0)
        return steps(self.model, hidden_BTN, behind_BT, count, self.args.truncate)


class Eagle3Recipe(ChainRecipe):
    """EAGLE-3's head. It proposes the tokens that are most frequent in the text."""

    options: ClassVar[Mapping[str, Any]] = CHAIN | {"vocabulary": 32_000, "taps": ()}

    def __init__(self, args: argparse.Namespace, target: Transformer, corpus: Corpus):
        super().__init__(args, target, corpus)
        count = min(args.vocabulary, target.config.vocab_size)
        order = np.argsort(-shares(corpus, count), kind="stable")
        self.ids_V = torch.from_numpy(np.sort(order[:count]))
        config = eagle3_config(target.config, args, len(self.ids_V))
        self.model = new_eagle3(config, target, self.ids_V)

    @override
    def described(self) -> dict[str, Any]:
        c = self.model.config
        proposals = [{"proposal_type": "greedy", "speculative_tokens": self.args.steps}]
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": c.draft_vocab_size,
            "eagle_aux_hidden_state_layer_ids": list(c.taps),
            "norm_before_residual": c.norm_before_residual,
            LAYER: layer_keys(c, "llama") | {"mlp_bias": False},
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": proposals,
                "verifier": self.verifier(),
            },
        }


class MtpRecipe(ChainRecipe):
    """One module that predicts further tokens, over what the target returns. It proposes by the
    target's output matrix.
    """

    options: ClassVar[Mapping[str, Any]] = CHAIN

    def __init__(self, args: argparse.Namespace, target: Transformer, corpus: Corpus):
        super().__init__(args, target, corpus)
        self.ids_V = torch.arange(target.config.vocab_size)
        self.model = new_mtp(MtpConfig(**layer_sizes(target.config, args)), target)

    @override
    def described(self) -> dict[str, Any]:
        return {
            "architectures": ["MTPSpeculator"],
            "speculators_model_type": "mtp",
            "num_nextn_predict_layers": 1,
            LAYER: layer_keys(self.model.config, "llama") | {"mlp_bias": False},
            "speculators_config": {"algorithm": "mtp", "verifier": self.verifier()},
        }


def eagle3_config(target: ModelConfig, args: argparse.Namespace, vocabulary: int) -> HeadConfig:
    """Return a head of the target's width."""
    return HeadConfig(
        **layer_sizes(target, args),
        taps=tuple(args.taps) or HeadConfig.like(target).taps_of(target),
        draft_vocab_size=vocabulary,
        target_hidden_size=target.hidden_size,
        # A target's hidden states are many times as large as what a layer adds.
        norm_before_residual=True,
    )


def new_eagle3(config: HeadConfig, target: Transformer, ids_V: Tensor) -> Head:
    """Return a head that begins with what the target has: its late hidden state, its last norm and
    its output matrix.
    """
    head, E = Head(config, SdpaAttention()), config.hidden_size
    with torch.no_grad():
        begin(head)
        head.fc.weight[:, :-E] *= 0.1
        head.fc.weight[:, -E:] = torch.eye(E)
        head.norm.weight.copy_(target.norm.weight)
        head.head.weight.copy_((target.embed if target.head is None else target.head).weight[ids_V])
        head.target_ids_V.copy_(ids_V)
    return head.on(target)


def new_mtp(config: MtpConfig, target: Transformer) -> MtpHead:
    """Return a module that begins with what the target returns, in the direction of its output
    matrix.
    """
    head, E = MtpHead(config, SdpaAttention()), config.hidden_size
    with torch.no_grad():
        begin(head)
        module = head.module(0)
        module.joined.weight[:, E:] = torch.eye(E)
        module.output_norm.weight.fill_(target.norm.weight.square().mean().sqrt())
    return head.on(target)


def begin(head: Head) -> None:
    """Draw the weights of a head.

    Queries begin as the keys of their group, so that a token attends to itself: its embedding comes
    in on no other way in EAGLE-3's head.
    """
    for parameter in head.parameters():
        if parameter.ndim == 2:
            parameter.normal_(0, parameter.shape[1] ** -0.5)
    c, layer = head.config, head.layer_of(0)
    D, kv = c.head_dim, c.num_kv_heads * c.head_dim
    q, k, _ = layer.qkv.weight.split((c.num_heads * D, kv, kv))
    q.copy_(k.unflatten(0, (-1, D)).repeat_interleave(c.group_size, dim=0).flatten(0, 1))
    layer.down.weight.zero_()


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
    x_BTE, T, keys = head.fused(hidden_BTN), hidden_BTN.shape[1], []
    layer, logits = head.layer_of(0), []
    for step in range(count):
        positions_T = torch.arange(step, step + T)
        cos, sin = (
            x[None, :, None]
            for x in head.angles(*frequencies_on(head.config, x_BTE.device), positions_T)
        )
        embedded_BTE = F.embedding(tokens_BT[:, step : step + T], head.embed.weight).to(x_BTE.dtype)
        kept: list[tuple[Tensor, Tensor]] = []
        x_BTE, q_BTHD = layer.before_attention(
            PYTORCH, x_BTE, embedded_BTE, cos, sin, Recorder(kept)
        )
        keys += kept
        x_BTE, mlp_BTE = layer.after_attention(PYTORCH, x_BTE, attend(q_BTHD, keys[0], keys[1:]))
        x_BTE = head.output(0, x_BTE + mlp_BTE)
        logits.append(head.logits(x_BTE))
        if (step + 1) % truncate == 0:
            x_BTE = x_BTE.detach()
    return logits
