"""The results of benchmarks/acceptance_study.py: acceptances with intervals, and what the package ships of them."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from acceptance_study import TARGET, Cell

from magicdec.config.load import compose
from magicdec.costmodel.acceptance import task_name
from magicdec.costmodel.speedup import alpha_from_acceptance_length
from magicdec.costmodel.tables import PUBLISHED

SHIPPED = PUBLISHED.parent / f"acceptance_{TARGET}.csv"
SOURCE = "magicdec's study of SmolLM2-135M-Instruct after 4-bit quantization (docs/results/smollm2.md)"
POLICIES = ("topk", "verify_guided", "quest", "snapkv", "pyramidkv", "streaming", "window")
RESAMPLES, LEVEL = 2000, 95
FEWEST = 1000  # proposals: cells of fewer are marked
DATA = {"books": ("text", None), "code": ("stdlib", None)}
CENTRE = Cell()


class Found(NamedTuple):
    """One cell, over all batches of documents that were measured."""

    cell: Cell
    documents: int
    proposals: int
    rate: float
    alpha: float
    low: float
    high: float
    repeated: float
    different: int
    excused: int
    accuracy: float | None
    accuracy_autoregressive: float | None

    def __str__(self) -> str:
        mark = "" if self.proposals >= FEWEST else " †"
        return f"{self.alpha:.2f} ({self.low:.2f}-{self.high:.2f}){mark}"


def pooled(lines: dict[Cell, dict[str, Any]]) -> dict[Cell, Found]:
    """Return what is known of each cell, batches of documents together."""
    batches: dict[Cell, list[dict[str, Any]]] = {}
    for cell, line in lines.items():
        batches.setdefault(replace(cell, batch=0), []).append(line)
    return {cell: found(cell, group) for cell, group in batches.items()}


def found(cell: Cell, lines: Sequence[dict[str, Any]]) -> Found:
    """Return the acceptance of one cell, with an interval by resampling its documents."""
    rounds_DA = np.array([counts for line in lines for counts in line["rounds"]])
    rounds_D, accepted_D = rounds_DA.sum(1), rounds_DA @ np.arange(cell.gamma + 1)
    drawn = np.random.default_rng(0).integers(len(rounds_D), size=(RESAMPLES, len(rounds_D)))
    lengths = 1 + accepted_D[drawn].sum(1) / rounds_D[drawn].sum(1)
    ends = np.percentile(lengths, [50 - LEVEL / 2, 50 + LEVEL / 2])
    length = 1 + accepted_D.sum() / rounds_D.sum()
    alpha, low, high = (alpha_from_acceptance_length(float(one), cell.gamma) for one in (length, *ends))
    proposals = int(cell.gamma * rounds_D.sum())

    def mean(name: str) -> float | None:
        return None if lines[0][name] is None else fmean(line[name] for line in lines)

    return Found(
        cell,
        len(rounds_D),
        proposals,
        float(accepted_D.sum() / proposals),
        alpha,
        low,
        high,
        fmean(line["repeated"] for line in lines),
        sum(line.get("different_rows", 0) for line in lines),
        sum(line.get("excused_rows", 0) for line in lines),
        mean("accuracy"),
        mean("accuracy_autoregressive"),
    )


def ship(cells: Iterable[Found], path: Path) -> None:
    """Write the acceptances at the centre's gamma as the package ships them, named as a run's are."""
    rows = []
    for one in cells:
        cell = one.cell
        if cell.gamma != CENTRE.gamma or cell.text == "long":
            continue
        config = compose([f"target={TARGET}", *cell.overrides])
        data, task = DATA.get(cell.text, ("ruler", cell.text))
        rows.append(
            {
                "target": TARGET,
                "draft": config.draft.described(config.draft.label, asdict(config.draft)),
                "policy": config.cache.policy,
                "budget": config.cache.budget,
                "context_len": cell.context,
                "task": task_name(data, task, cell.temperature),
                "alpha": f"{one.alpha:.3f}",
                "source": SOURCE,
                "quantization": cell.quantization,
                "settings": " ".join(map(str, config.cache.settings)),
            }
        )
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def by_policy(one: Found) -> tuple[int, int]:
    """Return the place of a cell in tables: policies from the best informed one on, then budgets."""
    return [*POLICIES, one.cell.policy].index(one.cell.policy), one.cell.budget


class Results:
    """All that is known, and its slices."""

    def __init__(self, lines: dict[Cell, dict[str, Any]]):
        self.lines, self.cells = lines, pooled(lines)

    def slice(self, *free: str, **fixed: Any) -> list[Found]:
        """Return the cells that differ from the centre with other `fixed` values in nothing but the `free` fields."""
        expected = replace(CENTRE, **fixed)
        chosen = [
            one
            for cell, one in self.cells.items()
            if replace(cell, **{name: getattr(expected, name) for name in free}) == expected
        ]
        return sorted(chosen, key=by_policy)

    @property
    def lossless(self) -> str:
        """Return a sentence about greedy rows that differ from the autoregressive ones."""
        greedy = [one for one in self.cells.values() if one.cell.temperature == 0]
        rows = sum(one.documents for one in greedy)
        different, excused = (sum(getattr(one, name) for one in greedy) for name in ("different", "excused"))
        text = f"Of {rows:,} greedy rows, {rows - different:,} are token for token what the target writes alone"
        return f"{text}." if not different else f"{text}; {excused} of the other {different} differ by near-ties."
