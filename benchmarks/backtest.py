"""Compare the cost model with speedups that others have measured: docs/results/backtest.csv and
refutation.csv, by row.

    python benchmarks/backtest.py

Machines are predicted by their names, as `scenario=predict hardware=NAME` does, and nothing is
fitted to these rows. Writes the predictions and scores next to the rows, and renders their pages.
No GPU is needed, and none is used.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from statistics import fmean, median

import yaml
from page import RESULTS, ROOT
from render import Row, groups, read_csv, write, write_csv

from magicdec.architectures.head_config import HeadConfig
from magicdec.architectures.hugging_face import from_hugging_face
from magicdec.architectures.model_config import ModelConfig
from magicdec.config.choices import DraftConfig, ModelChoice
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.config.schema import CONF
from magicdec.costmodel.hardware import Hardware, configured
from magicdec.costmodel.round import Setup, round_times
from magicdec.costmodel.speedup import alpha_from_acceptance_length
from magicdec.costmodel.targets import architecture, option

ADDED = yaml.safe_load((ROOT / "benchmarks/backtest_models.yaml").read_text())
VOCABULARY = {"eagle": 1.0, "fr-spec": 0.25}  # a head's share of the target's
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
BATCHES = {"1": range(1, 2), "2 to 31": range(2, 32), "32 and more": range(32, 10**6)}
CONTEXTS = {
    "to 2,000": range(2_001),
    "to 16,000": range(2_001, 16_001),
    "beyond 16,000": range(16_001, 10**9),
}


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
    backtest_models.yaml.
    """
    figures = dict(ADDED["machines"].get(row["hardware"], {}))
    return configured(figures.pop("like", row["hardware"]), row["tensor_parallel"], **figures)


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
    head = HeadConfig.like(target)
    if kind in VOCABULARY:
        head = replace(head, draft_vocab_size=int(VOCABULARY[kind] * target.vocab_size))
    return DRAFTS["eagle3"].facts(model=ModelChoice(kind, architecture=head))


def predict(row: Row) -> Row:
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
        target, machine(row), row["batch"], context, draft_of(row, target), cache, row["model"]
    )
    setup = replace(setup, stored_weight_bytes=float(row["weight_bytes"]))
    times, gamma = round_times(setup, row["gamma"]), row["gamma"]
    length = row["acceptance_length"]
    needed = row["speedup"] / times.speedup(1.0)
    possible = 1 <= needed <= gamma + 1
    return {key: row[key] for key in (*SERIES, "batch", "acceptance_length")} | {
        "measured": row["speedup"],
        **(against(row["speedup"], times.speedup(length)) if length else {}),
        "round_steps": times.round_s / times.target.total,
        "needed_length": needed,
        "needed_alpha": alpha_from_acceptance_length(needed, gamma) if possible else None,
    }


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


def carried(rows: list[Row]) -> list[Row]:
    """Add predictions of larger batches from the acceptance that explains the smallest, where none
    is stated.
    """
    for _, series in groups(rows, *SERIES):
        first = min(series, key=lambda row: row["batch"])
        for row in series:
            if row is not first and row["acceptance_length"] is None and "needed_length" in row:
                predicted = first["needed_length"] / row["round_steps"]
                row |= against(row["measured"], predicted) | {"carried": True}
    return rows


def predictions(name: str) -> list[Row]:
    """Return the predictions of all rows of a CSV file in docs/results, in its order."""
    return carried([predict(row) for row in read_csv(RESULTS / f"{name}.csv")])


def scores(rows: list[Row]) -> list[Row]:
    """Return the score of the predicted rows: of all, by batch, by context, by draft and by
    source.
    """
    strata: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        kinds = {
            "all": "all",
            "batch": band(row["batch"], BATCHES),
            "context": band(row["context"], CONTEXTS),
            "draft": row["draft"],
            "source": row["publisher"],
        }
        for stratum in kinds.items():
            strata.setdefault(stratum, []).append(row)
    order = {name: place for place, name in enumerate((*BATCHES, *CONTEXTS))}
    ordered = sorted(strata, key=lambda stratum: (stratum[0], order.get(stratum[1], 0)))
    return [{"by": by, "stratum": name} | score(strata[by, name]) for by, name in ordered]


def band(value: int, bands: Mapping[str, range]) -> str:
    """Return the name of the band that holds a value."""
    return next(name for name, values in bands.items() if value in values)


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


def main() -> None:
    """Predict all rows and render their pages."""
    write_csv(RESULTS / "backtest-predictions.csv", predictions("backtest"))
    refuting = predictions("refutation")
    write_csv(RESULTS / "refutation-predictions.csv", refuting)
    write_csv(
        RESULTS / "refutation-scores.csv", scores([row for row in refuting if row.get("predicted")])
    )
    for page in ("backtest", "refutation"):
        write(page)


if __name__ == "__main__":
    main()
