"""Train a draft head for a target (EAGLE-3, Li et al. 2025, arXiv 2503.01840), on local text.

    python tools/train_head.py --target magicdec/models/tiny/target --text FOLDER_OF_BOOKS --out
    FOLDER python tools/train_head.py ... --resume      # continue from the work folder, which
    Ctrl-C leaves complete

The target reads long windows of text, and the head learns from the hidden states and the
distributions that it finds there. As in the paper, the head is trained on its own output: in the
second step it reads what it made of the first one, and so on ("training-time test"), with the
entries of the text behind it. Gradients go back through `--truncate` of these steps. A head
proposes the tokens that are most frequent in the text. What is held out is held out by name
(tools/tiny_corpus.py); every few minutes the acceptance there is measured, and noted in
training.json. The result is a folder in the layout of the speculators library, with weights in
bfloat16.

What it learns from is in head_steps.py, and its folder is written by head_export.py.

B pieces, T tokens, E hidden size, N hidden states of the target side by side, V draft vocabulary.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from head_export import export
from head_steps import CHUNK, Reader, load_target, pieces, steps
from tiny_corpus import CODE_SHARE, Corpus
from torch import Tensor
from training import Trainer, parser

from magicdec.architectures.head_config import HeadConfig
from magicdec.models.head import Head
from magicdec.models.transformer import Transformer

ADAM_LR = 2e-3
STEP_WEIGHT = 0.8  # of a step's loss, against that of the step before it
HELD_OUT_WINDOWS = 8  # of each kind of text


class HeadTrainer(Trainer):
    """A head's training."""

    warmup, decay_from, final_rate = 0.02, 0.4, 0.03
    kept = (*Trainer.kept, "curve")

    def __init__(self, args: argparse.Namespace):
        torch.manual_seed(args.seed)
        target = load_target(args.target)
        self.corpus = Corpus.load(args.text, args.target)
        self.ids_V = frequent_tokens(self.corpus, min(args.vocabulary, target.config.vocab_size))
        self.config = head_config(target, args, len(self.ids_V))
        self.reader = Reader(target, self.config.taps)
        self.teacher = target.embed.weight if target.head is None else target.head.weight
        self.head = new_head(self.config, target, self.ids_V)
        self.head.embed.requires_grad_(False)
        named = {name: p for name, p in self.head.named_parameters() if name != "embed.weight"}
        matrices = [p for name, p in named.items() if p.ndim == 2 and name != "head.weight"]
        others = [p for name, p in named.items() if p.ndim == 1 or name == "head.weight"]
        adam = torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0)
        self.curve: list[dict[str, Any]] = []
        super().__init__(args, self.head, matrices, adam, args.work / "head.pt")

    @property
    def progress(self) -> float:
        """Return the share of the time that is spent."""
        return self.seconds / 60 / self.args.minutes

    def run(self) -> None:
        """Train to the end of the time, measuring and saving on the way. Save when interrupted,
        too.
        """
        try:
            self.train()
        except KeyboardInterrupt:
            print(f"interrupted at {self.progress:.1%}; --resume continues from there", flush=True)
        else:
            self.measure()
        self.save()

    def train(self) -> None:
        """Do optimiser steps to the end of the time."""
        if not self.curve:
            self.measure()
        for loss in self.rest_of_training():
            if self.is_due(self.args.log_every):
                rate = self.tokens / self.seconds
                print(
                    f"{self.progress:6.1%} step {self.steps} loss {loss:.3f} {rate:,.0f} tokens/s",
                    flush=True,
                )
            if self.is_due(60 * self.args.save_every):
                self.measure()
                self.save()

    def train_step(self) -> float:
        """Do one optimiser step, on one window. Return the mean loss of the first step ahead, in
        nats.
        """
        window = training_window(self.corpus, self.steps, self.args.context + self.args.steps)
        losses = self.losses(torch.from_numpy(window)[None])
        weights = [STEP_WEIGHT**step for step in range(len(losses))]
        (sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)).backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.optimise(self.args.context)
        return losses[0].item()

    def losses(self, tokens_BT: Tensor) -> list[Tensor]:
        """Return the mean cross entropy of each step, against the target's distribution over the
        draft's tokens.
        """
        hidden_BTN, last_BTE = self.reader.read(tokens_BT)
        teacher_BTV = F.linear(last_BTE, self.teacher[self.ids_V].float())
        count, size = self.args.steps, self.args.piece
        found = self.in_pieces(
            hidden_BTN, tokens_BT, 1 if self.progress < self.args.alone else count
        )
        losses = []
        for step, logits_BTV in enumerate(found):
            wanted_BTV = pieces(teacher_BTV[0], step + 1, size, count).softmax(-1)
            losses.append(F.cross_entropy(logits_BTV.flatten(0, 1), wanted_BTV.flatten(0, 1)))
        return losses

    def in_pieces(self, hidden_BTN: Tensor, tokens_BT: Tensor, number: int) -> list[Tensor]:
        """Return the logits of the first steps for the pieces of one window."""
        count, size = self.args.steps, self.args.piece
        behind_BT = pieces(tokens_BT[0], 1, size, count, extra=count - 1)
        return steps(
            self.head, pieces(hidden_BTN[0], 0, size, count), behind_BT, number, self.args.truncate
        )

    @torch.no_grad()
    def measure(self) -> None:
        """Add the acceptance on held-out text to the curve: accepted proposals over `--steps`,
        greedy.
        """
        found = {}
        for kind, ids in self.corpus.held_out.items():
            size = self.args.context + self.args.steps
            starts = np.linspace(0, len(ids) - size, HELD_OUT_WINDOWS).astype(int)
            rates = [
                self.acceptance(torch.from_numpy(ids[start : start + size])[None])
                for start in starts
            ]
            found[kind] = round(float(np.mean(rates)), 4)
        self.curve.append(
            {"minutes": round(self.seconds / 60, 1), "tokens": self.tokens, "acceptance": found}
        )
        print(f"held out, accepted of {self.args.steps} proposals: {found}", flush=True)

    def acceptance(self, tokens_BT: Tensor) -> float:
        """Return the share of accepted proposals on one window."""
        hidden_BTN, last_BTE = self.reader.read(tokens_BT)
        parts = last_BTE[0].split(CHUNK)
        chosen_T = torch.cat(
            [self.reader.target.logits(part_TE[None])[0].argmax(-1) for part_TE in parts]
        )
        accepted = torch.ones(1, dtype=torch.bool)
        total = 0.0
        for step, logits_BTV in enumerate(self.in_pieces(hidden_BTN, tokens_BT, self.args.steps)):
            proposed_BT = self.ids_V[logits_BTV.argmax(-1)]
            accepted = accepted & (
                proposed_BT == pieces(chosen_T, step + 1, self.args.piece, self.args.steps)
            )
            total += accepted.float().mean().item()
        return total / self.args.steps

    def save(self) -> None:
        """Write what `restore` needs, and the head as it is used."""
        super().save()
        export(
            self.head,
            self.ids_V,
            self.args.target,
            self.args.verifier,
            self.args.steps,
            self.args.out,
        )
        facts = {
            "minutes": round(self.seconds / 60, 1),
            "tokens": self.tokens,
            "optimiser_steps": self.steps,
        }
        facts |= {
            "threads": torch.get_num_threads(),
            "complete": self.progress >= 1,
            "held_out": self.curve,
        }
        (self.args.out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")


def training_window(corpus: Corpus, number: int, context: int) -> np.ndarray:
    """Return a random window of the training text, which depends on the number of the step
    alone.
    """
    generator = np.random.default_rng([23, number])
    return corpus.training_window(generator, generator.random() < CODE_SHARE, context)


def frequent_tokens(corpus: Corpus, count: int) -> Tensor:
    """Return the tokens that are most frequent in the training text, in ascending order."""
    shares = {"stdlib": CODE_SHARE, "books": 1 - CODE_SHARE}
    size = max(count, 1 + max(int(ids.max()) for ids in corpus.train.values()))
    weight = sum(
        shares[kind] * np.bincount(ids, minlength=size) / len(ids)
        for kind, ids in corpus.train.items()
    )
    return torch.from_numpy(np.sort(np.argsort(-weight, kind="stable")[:count]))


def head_config(target: Transformer, args: argparse.Namespace, vocabulary: int) -> HeadConfig:
    """Return a head of the target's width."""
    config = HeadConfig.like(target.config)
    values = {name: getattr(config, name) for name in config.__dataclass_fields__}
    values |= {
        "taps": tuple(args.taps) or config.taps_of(target.config),
        "draft_vocab_size": vocabulary,
    }
    # A target's hidden states are many times as large as what a layer adds.
    values |= {"norm_before_residual": True}
    values |= {
        "intermediate_size": args.mlp or config.intermediate_size,
        "max_position_embeddings": args.piece,
    }
    return HeadConfig(**values)


def new_head(config: HeadConfig, target: Transformer, ids_V: Tensor) -> Head:
    """Return a head that begins with what the target has: its late hidden state, its last norm and
    its output matrix.

    Queries begin as the keys of their group, so that a token attends to itself: its embedding comes
    in on no other way.
    """
    torch.manual_seed(0)
    head = Head(config, target.attention)
    E, D, kv = config.hidden_size, config.head_dim, config.num_kv_heads * config.head_dim
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
        q, k, _ = head.layer.qkv.weight.split((config.num_heads * D, kv, kv))
        q.copy_(k.unflatten(0, (-1, D)).repeat_interleave(config.group_size, dim=0).flatten(0, 1))
        head.layer.down.weight.zero_()
        head.fc.weight[:, :-E] *= 0.1
        head.fc.weight[:, -E:] = torch.eye(E)
        head.norm.weight.copy_(target.norm.weight)
        head.head.weight.copy_((target.embed if target.head is None else target.head).weight[ids_V])
        head.target_ids_V.copy_(ids_V)
    return head.on(target)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    found = parser(__doc__, "build/train_head", save_every=5.0)
    add = found.add_argument
    add("--target", type=Path, required=True, help="folder of the target, with its tokenizer.json")
    add("--out", type=Path, required=True, help="folder for the head")
    add("--verifier", help="how config.json calls the target; default: its folder")
    add(
        "--minutes", type=float, default=60.0, help="time to train, without measuring (%(default)g)"
    )
    add("--steps", type=int, default=3, help="steps ahead to train (%(default)d)")
    alone = "share of the time in which only the first step is trained (%(default)g)"
    add("--alone", type=float, default=0.3, help=alone)
    add(
        "--truncate",
        type=int,
        default=3,
        help="steps through which gradients go back (%(default)d)",
    )
    add(
        "--vocabulary", type=int, default=32_000, help="tokens that the head proposes (%(default)d)"
    )
    add("--mlp", type=int, help="features of its MLP; default: the target's")
    add(
        "--taps",
        type=int,
        nargs="*",
        default=[],
        help="layers of the target to read in front of; default: EAGLE-3's",
    )
    add(
        "--context",
        type=int,
        default=1024,
        help="tokens that the target reads at a time (%(default)d)",
    )
    add(
        "--piece",
        type=int,
        default=512,
        help="tokens that the head reads at a time, its trained length (%(default)d)",
    )
    return found.parse_args()


def main() -> None:
    """Train."""
    args = arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    HeadTrainer(args).run()


if __name__ == "__main__":
    main()
