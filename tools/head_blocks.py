"""A head that fills a block of masks in one pass (DFlash: Chen et al. 2026, arXiv 2602.06036).

In training, blocks begin all over a piece of text. Each sees the entries of the text in front of
it, and itself. A place of a block is filled without the tokens before it. It matters in a round
only if these are what the target chooses, so that a place counts in full where they are that in the
text.

B pieces, T tokens of a piece, A blocks of a piece, G places of a block that are filled, M = G + 1
tokens of a block, N hidden states of the target side by side, V vocabulary.
"""

import argparse
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from head_chains import Recorder
from head_recipe import Recipe, Window, layer_keys, layer_sizes, shares
from tiny_corpus import Corpus
from torch import Tensor
from typing_extensions import override

from magicdec.architectures.block_config import KEY, BlockConfig
from magicdec.attention.sdpa import SdpaAttention
from magicdec.models.block import BlockHead
from magicdec.models.operators import PYTORCH
from magicdec.models.rope import frequencies_on
from magicdec.models.transformer import Transformer

STRIDE = 8  # tokens from one block to the next
WHOLE = 0.5  # share of the optimiser steps with whole blocks; the others have fewer places
OFF_PATH = 0.2  # weight of a place behind a token that the target would not have chosen


class BlockRecipe(Recipe):
    """A draft of blocks. It proposes by the target's output matrix."""

    options: ClassVar[Mapping[str, Any]] = {"steps": 7, "layers": 5, "taps": ()}

    model: BlockHead

    def __init__(self, args: argparse.Namespace, target: Transformer, corpus: Corpus):
        super().__init__(args, target, corpus)
        vocabulary = target.config.vocab_size
        self.ids_V = torch.arange(vocabulary)
        config = BlockConfig(
            **layer_sizes(target.config, args) | {"num_layers": args.layers, "qk_norm": True},
            block_size=args.steps + 1,
            mask_token_id=int(shares(corpus, vocabulary).argmin()),
            taps=tuple(args.taps) or BlockConfig.like(target.config).taps,
        )
        self.model = new_block(config, target)

    @override
    def losses(self, window: Window, progress: float) -> list[Tensor]:
        places = self.args.steps
        if torch.rand(()) > WHOLE:
            places = int(torch.randint(1, places + 1, ()))
        first = int(torch.randint(1, STRIDE + 1, ()))
        anchors_A = torch.arange(first, self.args.piece, STRIDE)
        logits_BAGV = self.filled(window, anchors_A, places)
        wanted_TV = self.wanted(window.last_TE)
        wanted_BAGV = self._ahead(wanted_TV, anchors_A, places).softmax(-1)
        on_path_BAG = self._on_path(window, wanted_TV.argmax(-1), anchors_A, places)
        losses = []
        for place in range(places):
            loss_N = F.cross_entropy(
                logits_BAGV[:, :, place].flatten(0, 1),
                wanted_BAGV[:, :, place].flatten(0, 1),
                reduction="none",
            )
            weight_N = torch.where(on_path_BAG[:, :, place].flatten(), 1.0, OFF_PATH)
            losses.append((weight_N * loss_N).sum() / weight_N.sum())
        return losses

    @override
    def accepted(self, window: Window) -> list[float]:
        """Return the shares; see `Recipe`. What the target chooses behind a place is known where
        the text has what it chooses at that place, so that each share is the product of those
        places' own.
        """
        anchors_A, places = torch.arange(1, self.args.piece, STRIDE), self.args.steps
        chosen_T = self.chosen(window.last_TE)
        proposed_BAG = self.filled(window, anchors_A, places).argmax(-1)
        right_BAG = proposed_BAG == self._ahead(chosen_T, anchors_A, places)
        on_path_BAG = self._on_path(window, chosen_T, anchors_A, places)
        accepted_BAG = right_BAG.cumprod(dim=-1).bool()
        rates, rate = [], 1.0
        for place in range(places):
            asked_BA = on_path_BAG[:, :, place]
            if place:
                asked_BA = asked_BA & accepted_BAG[:, :, place - 1]
            count = int(asked_BA.sum())
            rate *= int((asked_BA & right_BAG[:, :, place]).sum()) / count if count else 0.0
            rates.append(rate)
        return rates

    def filled(self, window: Window, anchors_A: Tensor, places: int) -> Tensor:
        """Return the logits (B, A, G, V) of blocks that begin with the tokens at `anchors_A`."""
        hidden_BTN = self.in_pieces(window.hidden_TN, 0)
        last_BA = self.in_pieces(window.tokens_T, 0)[:, anchors_A]
        return fill(self.model, hidden_BTN, last_BA, anchors_A, places)

    def _ahead(self, x_T: Tensor, anchors_A: Tensor, places: int) -> Tensor:
        """Return what a window has at the anchors of its pieces and the places behind them (B, A,
        G): of the target's logits, those of the tokens to fill in.
        """
        x_BT = self.in_pieces(x_T, 0, extra=places - 1)
        return x_BT[:, anchors_A[:, None] + torch.arange(places)]

    def _on_path(self, window: Window, chosen_T: Tensor, anchors_A: Tensor, places: int) -> Tensor:
        """Return whether the text in front of each place of a block (B, A, G) is what the target
        chooses there.
        """
        agrees_T = torch.zeros_like(chosen_T, dtype=torch.bool)
        agrees_T[:-1] = chosen_T[:-1] == window.tokens_T[1:]
        agrees_BAG = self._ahead(agrees_T, anchors_A, places).cumprod(dim=-1).bool()
        return F.pad(agrees_BAG[..., :-1], (1, 0), value=True)

    @override
    def described(self) -> dict[str, Any]:
        c = self.model.config
        layers = [tap - 1 for tap in c.taps]
        return {
            "architectures": ["DFlashDraftModel"],
            **layer_keys(c, "qwen3"),
            "num_target_layers": self.target.config.num_layers,
            "block_size": c.block_size,
            KEY: {"mask_token_id": c.mask_token_id, "target_layer_ids": layers},
        }


def new_block(config: BlockConfig, target: Transformer) -> BlockHead:
    """Return a draft that begins with the last of the target's hidden states that it reads."""
    head, E = BlockHead(config, SdpaAttention()), config.hidden_size
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
        for number in range(config.num_layers):
            head.layer_of(number).down.weight.zero_()
        head.fc.weight[:, :-E] *= 0.1
        head.fc.weight[:, -E:] = torch.eye(E)
        head.norm.weight.fill_(target.norm.weight.square().mean().sqrt())
    return head.on(target)


def fill(
    head: BlockHead, hidden_BTN: Tensor, last_BA: Tensor, anchors_A: Tensor, places: int
) -> Tensor:
    """Return the logits (B, A, G, V) of the places behind tokens at `anchors_A` of a piece, each in
    a block of its own.
    """
    context_BTE, B = head.fused(hidden_BTN), len(hidden_BTN)
    masks_BAG = last_BA.new_full((*last_BA.shape, places), head.config.mask_token_id)
    tokens_BX = torch.cat((last_BA[..., None], masks_BAG), dim=-1).flatten(1)
    positions_X = (anchors_A[:, None] + torch.arange(places + 1)).flatten()
    context_angles = angles(head, torch.arange(context_BTE.shape[1]))
    block_angles = angles(head, positions_X)
    visible_XS = visible(anchors_A, context_BTE.shape[1], places + 1)
    x_BXE = F.embedding(tokens_BX, head.embed.weight).to(context_BTE.dtype)
    mlp_BXE = torch.zeros_like(x_BXE)
    for number in range(len(head.layers)):
        kept: list[tuple[Tensor, Tensor]] = []
        layer, place = head.layer_of(number), Recorder(kept)
        head.write_context(number, context_BTE, *context_angles, place)
        x_BXE, q_BXHD = layer.before_attention(PYTORCH, x_BXE, mlp_BXE, *block_angles, place)
        k_BKSD, v_BKSD = (
            torch.cat(parts, dim=1).transpose(1, 2) for parts in zip(*kept, strict=True)
        )
        out_BHXD = F.scaled_dot_product_attention(
            q_BXHD.transpose(1, 2), k_BKSD, v_BKSD, attn_mask=visible_XS, enable_gqa=True
        )
        x_BXE, mlp_BXE = layer.after_attention(PYTORCH, x_BXE, out_BHXD.transpose(1, 2))
    output_BXE = head.normed(PYTORCH, x_BXE, mlp_BXE)[1]
    output_BAME = output_BXE.view(B, len(anchors_A), places + 1, -1)
    return head.logits(output_BAME[:, :, 1:])


def angles(head: BlockHead, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of positions, for all pieces and heads."""
    cos_TD, sin_TD = head.angles(*frequencies_on(head.config, positions_T.device), positions_T)
    return cos_TD[None, :, None], sin_TD[None, :, None]


def visible(anchors_A: Tensor, context: int, size: int) -> Tensor:
    """Return which entries each token of the blocks sees (A x M, T + A x M): of the text, those in
    front of its block, and behind them its own block.
    """
    anchor_X = anchors_A.repeat_interleave(size)
    in_context = torch.arange(context) < anchor_X[:, None]
    in_block = anchor_X == anchor_X[:, None]
    return torch.cat((in_context, in_block), dim=1)
