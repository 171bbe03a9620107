"""Compare the cost model with speedups that others have measured: docs/results/backtest.csv,
refutation.csv and backtest-blocks.csv, by row.

    python benchmarks/backtest.py

Machines are predicted by their names, as `scenario=predict hardware=NAME` does, and nothing is
fitted to these rows. Writes the predictions and scores next to the rows, and renders their pages.
No GPU is needed, and none is used.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import groupby
from math import log, log1p
from operator import itemgetter
from statistics import fmean, median
from typing import Any

import yaml
from costmodel import fitted_rows
from costmodel_scores import compare
from page import RESULTS, ROOT
from render import Row, read_csv, write, write_csv
from skill import errors_of, family, is_held_back, judged_confidence, skill, strata

from magicdec.architectures.block_config import BlockConfig
from magicdec.architectures.head_config import HeadConfig
from magicdec.architectures.hugging_face import from_hugging_face
from magicdec.architectures.model_config import ModelConfig
from magicdec.config.choices import DraftConfig, ModelChoice
from magicdec.config.folders import CONF
from magicdec.config.omega import alpha_from_acceptance_length
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.costmodel.comparison import PERFECT
from magicdec.costmodel.confidence import TABLE, Case, Error
from magicdec.costmodel.hardware import Hardware, configured
from magicdec.costmodel.round import Setup, round_times
from magicdec.costmodel.stacks import STACKS
from magicdec.costmodel.tables import read_table
from magicdec.costmodel.targets import architecture, option

ADDED = yaml.safe_load((ROOT / "benchmarks/backtest_models.yaml").read_text())
FILES = ("backtest", "refutation")
BLOCKS_FILE = "backtest-blocks"  # a page's section of its own: no row of it judges the model
ASYNCHRONOUS = "2026-01"  # vLLM's default from then on
HALF = 0.5  # of a lookup's proposals are accepted, where a source does not say
VOCABULARY = {"eagle": 1.0, "fr-spec": 0.25}  # a head's share of the target's
# Drafts that fill a block in one pass; others than DFlash correct it afterwards, which has no costs
# here.
BLOCKS = ("dflash", "dflash2", "domino", "dspark", "lilicorr")
# Rows that share these differ in their batch alone.
SERIES = (
    "publisher",
    "model",
    "hardware",
    "tensor_parallel",
    "draft",
    "draft_model",
    "task",
    "context",
    "gamma",
)
FIXED_POINT_STEPS = 20


@cache
def model_named(name: str) -> ModelConfig:
    """Return the architecture of an option of the group target, or of backtest_models.yaml."""
    if option(name):
        return architecture(name)
    changes = dict(ADDED["models"][name])
    like = (CONF / "target" / f"{changes.pop('like')}.json").read_text()
    return from_hugging_face(json.loads(like) | changes)


def machine(row: Row) -> Hardware:
    """Return the row's machine: a device that the cost model knows, or one of
    backtest_models.yaml, with the row's engine as far as the cost model knows it.
    """
    figures = dict(ADDED["machines"].get(row["hardware"], {}))
    vector_flops = 1e12 * figures.pop("vector_tflops", 0.0)
    name = figures.pop("like", row["hardware"])
    found = configured(name, row["tensor_parallel"], **figures, stack=stack_of(row))
    return replace(found, device=replace(found.device, vector_flops=vector_flops))


def stack_of(row: Row) -> str | None:
    """Return the row's engine as the cost model calls it; None where it does not know it."""
    engine = row["engine"].partition(" ")[0]
    if engine == "vllm" and str(row.get("date") or "") < ASYNCHRONOUS:
        return "vllm-2025"
    return engine if engine in STACKS else None


def match_share(row: Row, length: float) -> float:
    """Return the share of a lookup's rounds with a match: what the source says, or as if half of
    the proposals were accepted.
    """
    stated = row.get("match_share")
    return min(1.0, (length - 1) / row["gamma"] / HALF) if stated is None else stated


def draft_of(row: Row, target: ModelConfig) -> DraftConfig:
    """Return the row's draft."""
    kind, name = row["draft"], row["draft_model"]
    if kind == "model":
        return DRAFTS[kind].facts(model=ModelChoice(name, architecture=model_named(name)))
    if kind == "layer_skip":
        return DRAFTS[kind].facts(num_layers=int(name))
    if kind == "ngram":
        return DRAFTS[kind].facts()
    if kind == "self":
        return DRAFTS[kind].facts(quantization=name or "none")
    if kind in BLOCKS:
        block = BlockConfig.like(target)
        return DRAFTS["dflash"].facts(model=ModelChoice(kind, architecture=block))
    head = HeadConfig.like(target)
    if kind in VOCABULARY:
        head = replace(head, draft_vocab_size=int(VOCABULARY[kind] * target.vocab_size))
    return DRAFTS["eagle3"].facts(model=ModelChoice(kind, architecture=head))


def bare(row: Row) -> Hardware:
    """Return the row's machine by its datasheet alone: no overheads, no engine."""
    found = machine(row | {"engine": ""})
    return replace(found, efficiency=PERFECT)


def predict(row: Row, on: Callable[[Row], Hardware] = machine) -> Row:
    """Return a row with its prediction, and with the acceptance length from which the measured
    speedup would follow.

    A row that says why it is not predicted has neither.
    """
    if row.get("unpredicted"):
        facts = (*SERIES, "batch", "acceptance_length", "unpredicted")
        return {key: row[key] for key in facts} | {"measured": row["speedup"]}
    target = model_named(row["model"])
    context = row["context"] + row["generate"] // 2  # on average
    cache = POLICIES[row.get("cache") or "full"].facts(budget=row.get("budget") or context)
    setup = Setup(
        target, on(row), row["batch"], context, draft_of(row, target), cache, row["model"]
    )
    setup = replace(setup, stored_weight_bytes=float(row["weight_bytes"]))
    gamma, length = row["gamma"], row["acceptance_length"]
    times = round_times(matching(setup, row, length), gamma)
    needed = needed_length(setup, row)
    possible = 1 <= needed <= gamma + 1
    return {key: row[key] for key in (*SERIES, "batch", "acceptance_length")} | {
        "measured": row["speedup"],
        **(against(row["speedup"], times.speedup(length)) if length else {}),
        "round_steps": times.round_s / times.target.total,
        "needed_length": needed,
        "needed_alpha": alpha_from_acceptance_length(needed, gamma) if possible else None,
    }


def matching(setup: Setup, row: Row, length: float | None) -> Setup:
    """Return the setup of a row whose rounds yield `length` tokens; None: as if all had a match."""
    is_known = length is not None and not setup.draft.is_model
    return replace(setup, match_share=match_share(row, length)) if is_known else setup


def needed_length(setup: Setup, row: Row) -> float:
    """Return the acceptance length from which the measured speedup follows.

    A lookup's rounds take longer, the more of them have a match.
    """
    length = 1.0
    for _ in range(1 if setup.draft.is_model else FIXED_POINT_STEPS):
        times = round_times(matching(setup, row, length), row["gamma"])
        length = row["speedup"] / times.speedup(1.0)
    return length


def against(measured: float, predicted: float) -> Row:
    """Return a prediction, its relative error, and whether it says correctly that speculation pays
    or does not.
    """
    right = (predicted > 1) == (measured > 1)
    return {
        "predicted": predicted,
        "error": predicted / measured - 1,
        "right": right,
        "carried": False,
    }


def carried(
    rows: list[Row], found: list[Row], on: Callable[[Row], Hardware] = machine
) -> list[Row]:
    """Add predictions of larger batches from the acceptance that explains the smallest, where none
    is stated. `found` are the predictions of the rows.
    """
    pairs = zip(rows, found, strict=True)
    for _, members in groupby(pairs, key=lambda pair: facts_of(pair[0])):
        series = list(members)
        first = min((one for _, one in series), key=lambda one: one["batch"])
        for row, one in series:
            if one is first or row["acceptance_length"] is not None or "needed_length" not in one:
                continue
            again = predict(row | {"acceptance_length": first["needed_length"]}, on)
            one |= again | {"acceptance_length": None, "carried": True}
    return found


def facts_of(row: Row) -> tuple[Any, ...]:
    """Return what rows share that differ in their batch alone."""
    return tuple(row[name] for name in SERIES)


def predictions(name: str, on: Callable[[Row], Hardware] = machine) -> list[Row]:
    """Return the predictions of all rows of a CSV file in docs/results, in its order."""
    rows = read_csv(RESULTS / f"{name}.csv")
    return carried(rows, [predict(row, on) for row in rows], on)


def scores(rows: list[Row]) -> list[Row]:
    """Return the score of the predicted rows: of all, by batch, by context, by draft and by
    source.
    """
    kinds = strata(rows, draft=itemgetter("draft"), source=itemgetter("publisher"))
    return [{"by": by, "stratum": name} | score(alike) for (by, name), alike in kinds.items()]


def score(rows: list[Row]) -> Row:
    """Return how well rows are predicted, next to the best constant: always a gain, or always
    none.
    """
    gains = [row["right"] for row in rows if row["measured"] > 1]
    losses = [row["right"] for row in rows if row["measured"] <= 1]
    errors = [row["error"] for row in rows]
    return {
        "rows": len(rows),
        "gains": len(gains),
        "gains_found": sum(gains),
        "losses": len(losses),
        "losses_found": sum(losses),
        "right": sum(gains) + sum(losses),
        "constant": max(len(gains), len(losses)),
        "balanced": (fmean(gains) + fmean(losses)) / 2 if gains and losses else None,
        "error": median(map(abs, errors)),
        "signed": median(errors),
    }


def judging_rows() -> Iterator[Row]:
    """Yield the predicted rows of sources that were held back, with the predictions of the model
    before it was changed, and of the bare roofline.
    """
    before = iter(read_csv(RESULTS / "skill-before.csv"))
    for name in FILES:
        rows = read_csv(RESULTS / f"{name}.csv")
        found = read_csv(RESULTS / f"{name}-predictions.csv")
        simple = predictions(name, bare)
        for row, ours, theirs in zip(rows, found, simple, strict=True):
            first = next(before)
            assert (first["publisher"], first["measured"]) == (row["publisher"], row["speedup"])
            if ours["predicted"] and is_held_back(row["publisher"]):
                known = {"before": first["predicted"], "roofline": theirs["predicted"]}
                yield ours | known | {"source": row["source"]}


def shipped_errors(judging: list[Row]) -> Iterator[Row]:
    """Yield the errors that predictions take their confidence from: of the rows that judge, of the
    MagicDec paper's rows to which nothing was fitted, and of rounds on an H200 that were predicted
    before.
    """
    rows = [row for row in read_table() if row not in fitted_rows()]
    paper = [
        Error(
            Case(True, one.row.draft if one.row.draft == "self" else "model", one.row.batch_size),
            "MagicDec paper",
            -log1p(one.error),
        )
        for one in (compare(row, architecture) for row in rows)
    ]
    ours = [
        Error(
            Case(True, "self", row["batch"]), "H200", log(row["speedup"] / row["predicted_speedup"])
        )
        for row in read_csv(RESULTS / "gpu-rounds.csv")
    ]
    for error in (*errors_of(judging), *paper, *ours):
        case = error.case
        facts = {"calibrated": case.is_calibrated, "draft": case.draft, "batch": case.batch}
        yield facts | {"source": error.source, "log_ratio": error.log_ratio}


def main() -> None:
    """Predict all rows and render their pages."""
    for name in (*FILES, BLOCKS_FILE):
        write_csv(RESULTS / f"{name}-predictions.csv", predictions(name))
    refuting = read_csv(RESULTS / "refutation-predictions.csv")
    write_csv(
        RESULTS / "refutation-scores.csv", scores([row for row in refuting if row["predicted"]])
    )
    judging = list(judging_rows())
    by_stratum = strata(judging, draft=family)
    write_csv(
        RESULTS / "skill.csv",
        [{"by": by, "stratum": name} | skill(rows) for (by, name), rows in by_stratum.items()],
    )
    write_csv(RESULTS / "skill-confidence.csv", [judged_confidence(judging)])
    write_csv(TABLE, list(shipped_errors(judging)))
    for page in FILES:
        write(page)


if __name__ == "__main__":
    main()
