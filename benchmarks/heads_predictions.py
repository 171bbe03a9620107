"""Predict what trained heads give over full and streaming caches: docs/predictions/heads.md.

    python benchmarks/heads_predictions.py

Acceptance is published and named with its source; times are predicted. P-EAGLE does not run in this
project: its passes are composed from the cost model's. Where no acceptance was found, the rows have
the length that a round needs to break even. Nothing is measured here.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import render
from page import RESULTS, ROOT
from render import read_csv, write_csv

from magicdec.architectures.block_config import BlockConfig
from magicdec.architectures.head_config import HeadConfig
from magicdec.architectures.model_config import ModelConfig
from magicdec.architectures.mtp_config import MtpConfig
from magicdec.config.choices import ModelChoice
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.costmodel.acceptance import Curves, published_points
from magicdec.costmodel.hardware import hardware_named
from magicdec.costmodel.memory_estimate import memory
from magicdec.costmodel.prediction import predict
from magicdec.costmodel.roofline import Pass, step_time
from magicdec.costmodel.round import RoundTimes, Setup, round_times
from magicdec.costmodel.targets import architecture

FOLDER = ROOT / "docs/predictions"
TARGET = architecture("llama-3.1-8b")
MACHINES = ("H100", "8xH100")
BATCHES, CONTEXTS = (1, 4, 16, 64), (1000, 4000, 16000, 32000, 100000)
BUDGET, GENERATED = 512, 256
CACHES = ("full", "streaming")
GAMMAS = range(1, 9)  # of self-speculation
Row = dict[str, Any]


class Head(NamedTuple):
    """A head that this project does not run: its layers, the tokens of its one pass, what it reads
    of the target.
    """

    layers: int
    gamma: int
    taps: int
    own_vocabulary: bool  # proposes from a part of the target's


P_EAGLE = Head(4, 7, 3, True)
# The drafts of blocks and modules that run here, with the tokens that they propose.
PASSES = {
    "DFlash": ("dflash", replace(BlockConfig.like(TARGET), block_size=10), 9),
    "MTP": ("mtp", MtpConfig.like(TARGET), 1),
}


def published_lengths() -> dict[int, float]:
    """Return the published acceptance lengths of the EAGLE-3 head of Llama-3.1-8B by gamma, on
    MT-Bench.
    """
    rows = read_csv(RESULTS / "backtest.csv")
    wanted = ("vLLM, EAGLE benchmarks", "2025-07-10", "llama-3.1-8b", "eagle3")
    keys = ("publisher", "date", "model", "draft")
    return {
        row["gamma"]: row["acceptance_length"]
        for row in rows
        if tuple(row[key] for key in keys) == wanted
    }


def with_draft(setup: Setup, policy: str, kind: str, model: ModelConfig) -> Setup:
    """Return the setup with a draft over the target's hidden states, and a cache of its entries."""
    draft = DRAFTS[kind].facts(model=ModelChoice(kind, architecture=model))
    return setup.at(draft=draft, cache=POLICIES[policy].facts(budget=BUDGET))


def parallel_times(setup: Setup, head: Head, policy: str) -> tuple[Setup, RoundTimes]:
    """Return the setup and the times of a round whose head proposes all its tokens in one pass."""
    config = replace(HeadConfig.like(TARGET), num_layers=head.layers, taps=tuple(range(head.taps)))
    if not head.own_vocabulary:
        config = replace(config, draft_vocab_size=TARGET.vocab_size)
    at = with_draft(setup, policy, "eagle3", config)
    times = round_times(at, head.gamma)
    rows = Pass(config, at.batch, head.gamma, at.tokens_read, at.ranks)
    return at, times._replace(draft=step_time(rows, at.hardware).scaled(1 / head.gamma))


def heads(setup: Setup, lengths: dict[int, float]) -> Iterator[Row]:
    """Yield the EAGLE-3 head over both caches, at the best gamma whose acceptance is published.

    `keep` is the share of its acceptance length that a sparse cache must keep to be as fast as the
    full one.
    """
    full = 0.0
    for policy in CACHES:
        at = with_draft(setup, policy, "eagle3", HeadConfig.like(TARGET))
        by_gamma = {gamma: round_times(at, gamma) for gamma in lengths}
        gamma = max(by_gamma, key=lambda gamma: by_gamma[gamma].speedup(lengths[gamma]))
        row = row_of("EAGLE-3", at, by_gamma[gamma], lengths[gamma])
        full = full or row["speedup"]
        yield row | {"keep": full / row["speedup"]}


def self_speculation(setup: Setup) -> Row:
    """Return self-speculation at the published acceptance of its context, or what it needs where
    none is.
    """
    best = predict(setup, GAMMAS, curves=Curves(published_points(), "pg19"))
    times = best.best.times
    length = None if best.best.speedup is None else best.best.speedup / times.speedup(1.0)
    return row_of("self", setup, times, length)


def row_of(draft: str, setup: Setup, times: RoundTimes, length: float | None) -> Row:
    """Return a row: the length of a round that breaks even, and the speedup where a length is
    known.
    """
    needed = times.round_s / times.target.total
    row = {
        "device": setup.hardware.name,
        "batch": setup.batch,
        "context": setup.context,
        "draft": draft,
    }
    row |= {"cache": setup.cache.policy, "gamma": times.gamma, "needed_length": needed}
    fits = memory(setup, times.gamma, GENERATED).total <= setup.hardware.device.memory
    return row | {"acceptance_length": length, "speedup": length and length / needed, "fits": fits}


def predictions() -> list[Row]:
    """Return the rows of all machines, batches and contexts at which every draft fits into
    memory.
    """
    lengths, rows = published_lengths(), []
    mtp = min(
        row["acceptance_length"]
        for row in read_csv(FOLDER / "heads-published.csv")
        if row["draft"] == "MTP"
    )
    for machine, batch, context in product(MACHINES, BATCHES, CONTEXTS):
        setup = Setup(TARGET, hardware_named(machine), batch, context, target_name="llama-3.1-8b")
        found = [*heads(setup, lengths), self_speculation(setup)]
        for policy in CACHES:
            found.append(row_of("P-EAGLE", *parallel_times(setup, P_EAGLE, policy), None))
            for name, (kind, model, gamma) in PASSES.items():
                at = with_draft(setup, policy, kind, model)
                length = mtp if name == "MTP" else None
                found.append(row_of(name, at, round_times(at, gamma), length))
        fits = [row.pop("fits") for row in found]
        rows += found if all(fits) else []
    return rows


def main() -> None:
    """Predict, and write the CSV file and the page."""
    write_csv(FOLDER / "heads.csv", predictions())
    render.write("predictions/heads")


if __name__ == "__main__":
    main()
