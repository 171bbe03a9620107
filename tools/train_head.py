"""Train a draft head for a target on local text: EAGLE-3, a module that predicts further tokens
(MTP), or a draft of blocks (DFlash).

    HEAD="--target magicdec/models/tiny/target --text FOLDER_OF_BOOKS --out FOLDER"
    python tools/train_head.py $HEAD --kind mtp
    python tools/train_head.py $HEAD --kind mtp --resume    # after Ctrl-C, or for more minutes

The target reads long windows of text, and the head learns from the hidden states and the
distributions that it finds there. What is held out is held out by name (tools/tiny_corpus.py);
every few minutes the acceptance there is measured, and noted in training.json. The weights of the
result are in bfloat16.

What each kind learns is in head_chains.py and head_blocks.py, and its folder is written by
head_export.py.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from head_blocks import BlockRecipe
from head_chains import Eagle3Recipe, MtpRecipe
from head_export import export
from head_recipe import Recipe, load_target
from tiny_corpus import CODE_SHARE, Corpus
from training import Trainer, parser

ADAM_LR = 2e-3
STEP_WEIGHT = 0.8  # of a step's loss, against that of the step before it
HELD_OUT_WINDOWS = 8  # of each kind of text
KINDS: dict[str, type[Recipe]] = {
    "eagle3": Eagle3Recipe,
    "mtp": MtpRecipe,
    "dflash": BlockRecipe,
}


class HeadTrainer(Trainer):
    """A head's training."""

    warmup, decay_from, final_rate = 0.02, 0.4, 0.03
    kept = (*Trainer.kept, "curve")

    def __init__(self, args: argparse.Namespace):
        torch.manual_seed(args.seed)
        target = load_target(args.target)
        self.corpus = Corpus.load(args.text, args.target)
        self.recipe = KINDS[args.kind](args, target, self.corpus)
        model = self.recipe.model
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        matrices = [p for name, p in named.items() if p.ndim == 2 and name != "head.weight"]
        others = [p for name, p in named.items() if p.ndim == 1 or name == "head.weight"]
        adam = torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0)
        self.curve: list[dict[str, Any]] = []
        super().__init__(args, model, matrices, adam, args.work / f"{args.kind}.pt")

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
        tokens_T = training_window(self.corpus, self.steps, self.args.context + self.args.steps)
        window = self.recipe.read(torch.from_numpy(tokens_T))
        losses = self.recipe.losses(window, self.progress)
        weights = [STEP_WEIGHT**step for step in range(len(losses))]
        (sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimise(self.args.context)
        return losses[0].item()

    @torch.no_grad()
    def measure(self) -> None:
        """Add the acceptance on held-out text to the curve: accepted proposals over `--steps`,
        greedy.
        """
        found = {}
        for kind, ids in self.corpus.held_out.items():
            size = self.args.context + self.args.steps
            starts = np.linspace(0, len(ids) - size, HELD_OUT_WINDOWS).astype(int)
            windows = [torch.from_numpy(ids[start : start + size]) for start in starts]
            rates = [self.recipe.accepted(self.recipe.read(window)) for window in windows]
            found[kind] = round(float(np.mean(rates)), 4)
        self.curve.append(
            {"minutes": round(self.seconds / 60, 1), "tokens": self.tokens, "acceptance": found}
        )
        print(f"held out, accepted of {self.args.steps} proposals: {found}", flush=True)

    def save(self) -> None:
        """Write what `restore` needs, and the head as it is used."""
        super().save()
        export(self.recipe.model, self.recipe.described(), self.args.out)
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


# What only some kinds of heads have: the type of the value, and the help.
OPTIONS: dict[str, tuple[type, str]] = {
    "steps": (int, "steps ahead to train, or places of a block to fill"),
    "alone": (float, "share of the time in which only the first step is trained"),
    "truncate": (int, "steps through which gradients go back"),
    "vocabulary": (int, "tokens that the head proposes"),
    "layers": (int, "layers of the head"),
}


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    found = parser(__doc__, "build/train_head", save_every=5.0)
    add = found.add_argument
    add("--kind", choices=KINDS, default="eagle3", help="kind of head (%(default)s)")
    add("--target", type=Path, required=True, help="folder of the target, with its tokenizer.json")
    add("--out", type=Path, required=True, help="folder for the head")
    add("--verifier", help="how config.json calls the target; default: its folder")
    add(
        "--minutes", type=float, default=60.0, help="time to train, without measuring (%(default)g)"
    )
    add("--mlp", type=int, help="features of an MLP; default: the target's")
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
    add_options(found)
    args = found.parse_args()
    options = KINDS[args.kind].options
    for name in (*OPTIONS, "taps"):
        if getattr(args, name) is None:
            setattr(args, name, options.get(name))
        elif name not in options:
            found.error(f"--{name} has no effect with --kind {args.kind}")
    return args


def add_options(found: argparse.ArgumentParser) -> None:
    """Add the arguments that only some kinds of heads have, with their defaults by kind."""
    for name, (value, text) in OPTIONS.items():
        recipes = {kind: recipe for kind, recipe in KINDS.items() if name in recipe.options}
        defaults = [f"{recipe.options[name]} for {kind}" for kind, recipe in recipes.items()]
        found.add_argument(f"--{name}", type=value, help=f"{text} ({', '.join(defaults)})")
    found.add_argument(
        "--taps",
        type=int,
        nargs="*",
        help="layers of the target to read in front of; default: as published heads do",
    )


def main() -> None:
    """Train."""
    args = arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    HeadTrainer(args).run()


if __name__ == "__main__":
    main()
