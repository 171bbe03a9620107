"""Training a head: the acceptance on held-out text rises, and an interrupted training resumes where
it was.
"""

import importlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from magicdec.architectures.head_config import head_from

TARGET = Path("magicdec/models/tiny/target")
STEPS, MORE = 30, 5  # of one second each


@pytest.fixture
def train(monkeypatch, tmp_path):
    """Train for some steps on a text that repeats itself; return the facts that are written next to
    the head.
    """
    monkeypatch.syspath_prepend("tools")
    module = importlib.import_module("train_head")
    ids = np.tile(np.random.default_rng(0).integers(3, 1000, 48), 100)
    corpus = module.Corpus(None, {"stdlib": ids}, {"stdlib": ids[:1000]}, {})
    monkeypatch.setattr(module.Corpus, "load", lambda *_: corpus)
    windows = module.training_window
    size = [
        "--context",
        "256",
        "--piece",
        "128",
        "--vocabulary",
        "64",
        "--mlp",
        "64",
        "--lr-share",
        "0.3",
    ]

    def run(steps: int, *more: str, interrupted_at: int | None = None) -> dict:
        def window(corpus, number, context):
            if number == interrupted_at:
                raise KeyboardInterrupt
            return windows(corpus, number, context)

        monkeypatch.setattr(module, "training_window", window)
        clock = itertools.count()
        monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
        folders = [
            "--target",
            str(TARGET),
            "--out",
            str(tmp_path / "head"),
            "--work",
            str(tmp_path / "work"),
        ]
        monkeypatch.setattr(
            "sys.argv", ["train_head.py", *folders, *size, "--minutes", str(steps / 60), *more]
        )
        module.main()
        return json.loads((tmp_path / "head" / "training.json").read_text())

    return run


@pytest.mark.slow
def test_acceptance_rises_and_a_training_resumes(train, tmp_path):
    half = train(STEPS, interrupted_at=STEPS // 2)
    assert (half["optimiser_steps"], half["complete"]) == (STEPS // 2, False)
    facts = train(STEPS, "--resume")
    assert facts["held_out"][0] == half["held_out"][0]
    before, *_, after = [point["acceptance"]["stdlib"] for point in facts["held_out"]]
    assert after > before + 0.2
    assert facts["optimiser_steps"] == STEPS
    resumed = train(STEPS + MORE, "--resume")
    assert resumed["optimiser_steps"] == STEPS + MORE
    assert resumed["held_out"][: len(facts["held_out"])] == facts["held_out"]
    config = head_from(json.loads((tmp_path / "head" / "config.json").read_text()), None)
    assert (config.draft_vocab_size, config.intermediate_size) == (64, 64)
