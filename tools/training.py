"""The common parts of training the bundled pair and draft heads: optimisers and their rates, the
clock, checkpoints.
"""

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from muon import Muon

MUON_LR = 0.02


class Trainer:
    """A training, from its first step or, with --resume, from its checkpoint.

    Hidden matrices are trained with Muon (Jordan et al. 2024), everything else with AdamW.
    """

    # Shares of the budget: the learning rate rises, is constant, and falls to its final value.
    warmup: ClassVar[float]
    decay_from: ClassVar[float]
    final_rate: ClassVar[float]  # a share of the peak
    # Attributes that a checkpoint holds.
    kept: ClassVar[tuple[str, ...]] = ("steps", "tokens", "seconds")

    def __init__(
        self,
        args: argparse.Namespace,
        model: torch.nn.Module,
        matrices: list[torch.nn.Parameter],
        adam: torch.optim.AdamW,
        checkpoint: Path,
    ):
        self.args, self.model, self.checkpoint = args, model, checkpoint
        self.optimisers = (Muon(matrices, lr=MUON_LR), adam)
        self.steps, self.tokens, self.seconds, self.last_s = 0, 0, 0.0, 0.0
        if args.resume and checkpoint.exists():
            self.restore()

    @property
    def progress(self) -> float:
        """Return the share of the budget that is spent."""
        raise NotImplementedError

    def train_step(self) -> Any:
        """Do one optimiser step."""
        raise NotImplementedError

    def rest_of_training(self) -> Iterator[Any]:
        """Do optimiser steps to the end of the budget, and yield what each has found."""
        while self.progress < 1:
            started = time.monotonic()
            found = self.train_step()
            self.last_s = time.monotonic() - started
            self.seconds += self.last_s
            yield found

    def is_due(self, every_s: float) -> bool:
        """Return whether another so many seconds of training have ended with the last step."""
        return not every_s or self.seconds // every_s > (self.seconds - self.last_s) // every_s

    def optimise(self, tokens: int) -> None:
        """Update the weights from their gradients, which come from so many tokens."""
        share = max(self.final_rate, min(1.0, (1 - self.progress) / (1 - self.decay_from)))
        if self.progress < self.warmup:
            share = max(self.progress / self.warmup, 0.05)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = optimiser.defaults["lr"] * share * self.args.lr_share
            optimiser.step()
        self.model.zero_grad()
        self.steps += 1
        self.tokens += tokens

    def save(self) -> None:
        """Write what `restore` needs, complete before it is moved into place."""
        optimisers = [optimiser.state_dict() for optimiser in self.optimisers]
        state = {"model": self.model.state_dict(), "optimisers": optimisers}
        temporary = self.checkpoint.with_suffix(".tmp")
        torch.save(state | {name: getattr(self, name) for name in self.kept}, temporary)
        os.replace(temporary, self.checkpoint)

    def restore(self) -> None:
        """Resume from the checkpoint in the work folder."""
        state = torch.load(
            self.checkpoint, map_location=next(self.model.parameters()).device, weights_only=True
        )
        self.model.load_state_dict(state["model"])
        for optimiser, known in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(known)
        for name in self.kept:
            setattr(self, name, state[name])


def parser(description: str | None, work: str, save_every: float) -> argparse.ArgumentParser:
    """Return a command line with the arguments that every training has."""
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = found.add_argument
    add(
        "--text",
        type=Path,
        help="folder of books (*.txt, UTF-8) to train on, next to the standard library's source",
    )
    add(
        "--work", type=Path, default=Path(work), help="folder for what --resume needs (%(default)s)"
    )
    add("--resume", action="store_true", help="continue from the work folder")
    add(
        "--log-every",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how often to log (%(default)g)",
    )
    add(
        "--save-every",
        type=float,
        default=save_every,
        metavar="MINUTES",
        help="how often to save (%(default)g)",
    )
    add(
        "--lr-share", type=float, default=1.0, help="of the usual peak learning rates (%(default)g)"
    )
    add("--seed", type=int, default=0, help="of the initial weights")
    return found
