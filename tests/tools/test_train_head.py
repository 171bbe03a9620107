"""Training a head of each kind: what is trained is what a run computes, the acceptance on held-out
text rises, and an interrupted training resumes where it was.
"""

import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from magicdec.attention.sdpa import SdpaAttention
from magicdec.models.checkpoint import load
from magicdec.models.description import read_config
from magicdec.models.heads import HEADS
from magicdec.models.kv_cache import KVCache
from magicdec.models.states_model import StatesModel

TARGET = Path("magicdec/models/tiny/target")
STEPS = {"eagle3": 30, "mtp": 60, "dflash": 60}  # of one second each, until it has learnt something
MORE = 5
SMALL = ["--context", "256", "--piece", "128", "--mlp", "64", "--lr-share", "0.3"]
KINDS = {
    "eagle3": ["--vocabulary", "64"],
    "mtp": [],
    "dflash": ["--steps", "3", "--layers", "2", "--taps", "2", "4", "6"],
}


@pytest.fixture
def train_head(monkeypatch):
    """The program, with a text that repeats itself."""
    monkeypatch.syspath_prepend("tools")
    module = importlib.import_module("train_head")
    ids = np.tile(np.random.default_rng(0).integers(3, 1000, 48), 100)
    corpus = module.Corpus(None, {"stdlib": ids}, {"stdlib": ids[:1000]}, {})
    monkeypatch.setattr(module.Corpus, "load", lambda *_: corpus)
    return module


@pytest.fixture
def typed(monkeypatch, tmp_path):
    """Set the command line."""

    def line(kind: str, *more: str) -> None:
        folders = ["--out", str(tmp_path / "head"), "--work", str(tmp_path / "work")]
        words = ["--kind", kind, "--target", str(TARGET), *folders, *SMALL, *KINDS[kind], *more]
        monkeypatch.setattr("sys.argv", ["train_head.py", *words])

    return line


@pytest.fixture
def train(monkeypatch, tmp_path, train_head, typed):
    """Train for some steps; return the facts that are written next to the head."""
    windows = train_head.training_window

    def run(kind: str, steps: int, *more: str, interrupted_at: int | None = None) -> dict:
        def window(corpus, number, context):
            if number == interrupted_at:
                raise KeyboardInterrupt
            return windows(corpus, number, context)

        monkeypatch.setattr(train_head, "training_window", window)
        clock = itertools.count()
        monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
        typed(kind, "--minutes", str(steps / 60), *more)
        train_head.main()
        return json.loads((tmp_path / "head" / "training.json").read_text())

    return run


def written(trainer: Any, folder: Path) -> StatesModel:
    """Write the head that is being trained, after some change, and read it as a run does."""
    generator = torch.Generator().manual_seed(1)
    for weight in trainer.model.parameters():
        if weight.requires_grad:
            noise = 0.05 * torch.randn(weight.shape, generator=generator)
            weight.data = (weight + noise).bfloat16().float()
    trainer.save()
    config = read_config(folder)
    with torch.device("meta"):
        head = HEADS[type(config)](config, SdpaAttention())
    head.load_state_dict(load(folder, config, torch.float32, "cpu"), assign=True)
    return head.on(trainer.recipe.target)


def logits_of_chain(head: StatesModel, window: Any, start: int, count: int) -> list[Tensor]:
    """Return the logits behind place `start` as rounds compute them: the text's places, then one
    more for each step, which reads the output of the last one and the text's own token.
    """
    cache = KVCache(head.config, 1, start + count, torch.float32, "cpu")
    tokens_1T, hidden_1TE = window.tokens_T[None], head.fused(window.hidden_TN[None])
    output_1TE = head(tokens_1T[:, 1 : start + 2], cache, hidden_1TE[:, : start + 1])
    logits = [head.logits(output_1TE[:, -1:])[0, 0]]
    for step in range(1, count):
        token_11 = tokens_1T[:, start + 1 + step : start + 2 + step]
        output_1TE = head(token_11, cache, output_1TE[:, -1:])
        logits.append(head.logits(output_1TE)[0, 0])
    return logits


def logits_of_block(head: Any, window: Any, start: int, count: int) -> list[Tensor]:
    """Return the logits of the places behind place `start` as a round computes them."""
    cache = KVCache(head.config, 1, start + count + 1, torch.float32, "cpu")
    hidden_1TE = head.fused(window.hidden_TN[None, :start])
    head.enter(window.tokens_T[None], cache, hidden_1TE)
    cache.advance(start)
    masks = [head.config.mask_token_id] * count
    block_1T = torch.tensor([[int(window.tokens_T[start]), *masks]])
    return list(head.logits(head(block_1T, cache)[:, 1:])[0])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_what_is_trained_is_what_a_round_computes(kind, train_head, typed, tmp_path):
    typed(kind)
    args = train_head.arguments()
    args.work.mkdir()
    trainer = train_head.HeadTrainer(args)
    head = written(trainer, args.out)
    recipe = trainer.recipe
    ids = train_head.training_window(trainer.corpus, 0, args.context + args.steps)
    window = recipe.read(torch.from_numpy(ids))
    for start in (1, 50, 127):
        if kind == "dflash":
            trained = recipe.filled(window, torch.tensor([start]), args.steps)[0, 0]
            run = logits_of_block(head, window, start, args.steps)
        else:
            trained = [logits[0, start] for logits in recipe.steps(window, args.steps)]
            run = logits_of_chain(head, window, start, args.steps)
        for ours, theirs in zip(trained, run, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_muon_takes_the_steps_of_pytorchs_own(monkeypatch):
    monkeypatch.syspath_prepend("tools")
    muon = importlib.import_module("muon")
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in ((24, 8), (8, 24), (16, 16))]
    ours, theirs = ([torch.nn.Parameter(matrix.clone()) for matrix in start] for _ in range(2))
    optimisers = (muon.Muon(ours, 0.1), torch.optim.Muon(theirs, lr=0.1, weight_decay=0.0))
    for _ in range(3):
        for pair in zip(ours, theirs, strict=True):
            gradient = torch.randn(pair[0].shape, generator=generator)
            for weight in pair:
                weight.grad = gradient.clone()
        for optimiser in optimisers:
            optimiser.step()
    for matrix, own, other in zip(start, ours, theirs, strict=True):
        moved = (other - matrix).norm()
        assert (own - other).norm() < 0.02 * moved  # bfloat16 has 8 bits


def test_a_setting_of_another_kind_is_refused(train_head, typed, capsys):
    typed("mtp", "--vocabulary", "64")
    with pytest.raises(SystemExit):
        train_head.arguments()
    assert "--vocabulary has no effect with --kind mtp" in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind == "eagle3" else pytest.mark.soak)
        for kind in KINDS
    ],
)
def test_acceptance_rises_and_a_training_resumes(kind, train, tmp_path):
    steps = STEPS[kind]
    half = train(kind, steps, interrupted_at=steps // 2)
    assert (half["optimiser_steps"], half["complete"]) == (steps // 2, False)
    facts = train(kind, steps, "--resume")
    assert facts["held_out"][0] == half["held_out"][0]
    before, *_, after = [point["acceptance"]["stdlib"] for point in facts["held_out"]]
    assert after > before + 0.2
    assert facts["optimiser_steps"] == steps
    resumed = train(kind, steps + MORE, "--resume")
    assert resumed["optimiser_steps"] == steps + MORE
    assert resumed["held_out"][: len(facts["held_out"])] == facts["held_out"]
    config = read_config(tmp_path / "head")
    assert (config.intermediate_size, config.max_position_embeddings) == (64, 128)
