"""Acceptance curves: alpha by cache policy, budget and context, from runs or from publications, never invented.

Between measured points alpha is interpolated in log budget and log context, and made monotone: it does not fall with
the budget nor rise with the context, save for noise, which is pooled away. Beyond them there is no estimate.
"""

import csv
import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from magicdec.costmodel.policies import POLICIES
from magicdec.costmodel.speedup import alpha_from_acceptance_length
from magicdec.costmodel.tables import PUBLISHED, read_table

PUBLISHED_ALPHAS = PUBLISHED.parent / "acceptance.csv"
SAME = 1.05  # contexts and budgets within this ratio count as equal: 32,768 is measured where 32,000 is


class Point(NamedTuple):
    """One known acceptance."""

    target: str
    draft: str  # self, or a model's name
    policy: str
    budget: int
    context_len: int
    task: str  # the text it was measured on: data.task, data.name, or a paper's data set
    alpha: float
    source: str
    measured: bool = False  # in a run of our own


class Estimate(NamedTuple):
    """An alpha and where it comes from."""

    alpha: float
    source: str


class Curves:
    """Known acceptances, to be asked for others between them."""

    def __init__(self, points: Iterable[Point]):
        self._points = list(points)

    def __add__(self, other: "Curves") -> "Curves":
        return Curves(self._points + other._points)

    def estimate(
        self, target: str, draft: str, policy: str, budget: int, context_len: int, task: str | None = None
    ) -> Estimate | None:
        """Alpha for a configuration; None where no measured or published point is near enough to say.

        Runs of our own come before publications. `task` None takes the text with the most points.
        """
        if draft == "self" and _is_exact(policy, budget, context_len):
            return Estimate(1.0, "exact: the draft sees all that the target sees")
        for points in self._candidates(target, draft, policy, task):
            by_budget: dict[int, list[Point]] = defaultdict(list)
            for point in points:
                by_budget[point.budget].append(point)
            ladder = []
            for known, same in sorted(by_budget.items()):
                alpha = _interpolate([(p.context_len, p.alpha) for p in same], context_len, rising=False)
                if alpha is not None:
                    ladder.append((known, alpha))
            alpha = _interpolate(ladder, budget, rising=True)
            if alpha is not None:
                return Estimate(alpha, _describe(points))
        return None

    def budgets(self, target: str, draft: str, policy: str, task: str | None = None) -> list[int]:
        """The budgets that some point has, ascending."""
        return sorted({p.budget for points in self._candidates(target, draft, policy, task) for p in points})

    def _candidates(self, target: str, draft: str, policy: str, task: str | None) -> list[list[Point]]:
        """Groups of points of one origin and task, the best first."""
        groups: dict[tuple[bool, str], list[Point]] = defaultdict(list)
        for point in self._points:
            if (point.target, point.draft, point.policy) == (target, draft, policy) and task in (None, point.task):
                groups[point.measured, point.task].append(point)
        return [groups[key] for key in sorted(groups, key=lambda key: (key[0], len(groups[key])), reverse=True)]


def published() -> Curves:
    """The MagicDec paper's acceptances: those it states, and for the rest those that its tables' Omega imply."""
    return Curves(_published())


@cache
def _published() -> tuple[Point, ...]:
    with open(PUBLISHED_ALPHAS, newline="") as lines:
        stated = [
            Point(
                line["target"],
                line["draft"],
                line["policy"],
                int(line["budget"]),
                int(line["context_len"]),
                line["task"],
                float(line["alpha"]),
                line["source"],
            )
            for line in csv.DictReader(lines)
        ]
    known = {point[:6] for point in stated}
    implied = [
        Point(
            *configuration,
            alpha_from_acceptance_length(row.omega, row.gamma),
            f"MagicDec (arXiv 2408.11049), the Omega of table {row.table}",
        )
        for row in read_table()
        if row.omega is not None and row.kv_budget is not None
        for configuration in [(row.target, row.draft, row.policy, row.kv_budget, row.context_len, row.task)]
        if configuration not in known
    ]
    return (*stated, *implied)


def measured(runs_dir: Path | str) -> Curves:
    """The acceptances of all finished runs in a run store that measured one (synthetic ones did not)."""
    points = []
    for path in sorted(Path(runs_dir).glob("*/result.json")):
        try:
            result = json.loads(path.read_text())
            config = yaml.safe_load((path.parent / "config.yaml").read_text())
            point = _point(config, result, path.parent.name)
        except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
            continue  # another program's folder, or a run that is being written
        if point is not None:
            points.append(point)
    return Curves(points)


def _point(config: dict[str, Any], result: dict[str, Any], run: str) -> Point | None:
    if result.get("status") != "done" or result.get("acceptance/source") != "measured" or result.get("alpha") is None:
        return None
    draft = config["draft"]
    if draft.get("quantization", "none") != "none":  # accepted less often than the draft that predictions are about
        return None
    return Point(
        target=config["target"]["name"],
        draft=draft_name(draft["name"], (draft.get("model") or {}).get("name"), draft.get("num_layers")),
        policy=config["cache"]["policy"],
        budget=int(config["cache"]["budget"]),
        context_len=int(config["batch"]["context_len"]),
        task=config["data"].get("task") or config["data"]["name"],
        alpha=float(result["alpha"]),
        source=f"run {run}",
        measured=True,
    )


def draft_name(kind: str, model: str | None, num_layers: int | None) -> str:
    """What acceptance is known under: an independent draft's own name, or the kind, with the layers that it keeps."""
    if kind == "model" and model is not None:
        return model
    return f"layer_skip-{num_layers}" if kind == "layer_skip" else kind


def is_same(a: int, b: int) -> bool:
    """Whether two contexts or budgets count as equal."""
    return max(a, b) <= SAME * min(a, b)


def _is_exact(policy: str, budget: int, context_len: int) -> bool:
    """Whether a self-draft's view holds everything, unquantized."""
    cost = POLICIES.get(policy)
    return cost is not None and not cost.quantized and (cost.reads_everything or budget >= context_len)


def _describe(points: Sequence[Point]) -> str:
    sources = sorted({point.source for point in points})
    more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    return f"{sources[0]}{more}, on {points[0].task}"


def _interpolate(points: Sequence[tuple[int, float]], at: int, rising: bool) -> float | None:
    """A monotone curve through (size, alpha), at a size; None beyond its ends."""
    if not points:
        return None
    sizes, values = _monotone(points, rising)
    index = bisect_left(sizes, at)
    for near in (index, index - 1):
        if 0 <= near < len(sizes) and is_same(sizes[near], at):
            return values[near]
    if index in (0, len(sizes)):
        return None
    share = log(at / sizes[index - 1]) / log(sizes[index] / sizes[index - 1])
    return values[index - 1] + share * (values[index] - values[index - 1])


def _monotone(points: Sequence[tuple[int, float]], rising: bool) -> tuple[list[int], list[float]]:
    """The nearest monotone sequence, by pooling adjacent violators; points of equal size are averaged first."""
    grouped: dict[int, list[float]] = defaultdict(list)
    for size, value in points:
        grouped[size].append(value)
    sizes = sorted(grouped)
    wrong: Callable[[float, float], bool] = (lambda a, b: a > b) if rising else (lambda a, b: a < b)
    blocks: list[tuple[float, int, int]] = []  # mean, weight, how many sizes it spans
    for size in sizes:
        values = grouped[size]
        block = (sum(values) / len(values), len(values), 1)
        while blocks and wrong(blocks[-1][0], block[0]):
            mean, weight, span = blocks.pop()
            total = weight + block[1]
            block = ((mean * weight + block[0] * block[1]) / total, total, span + block[2])
        blocks.append(block)
    return sizes, [mean for mean, _, span in blocks for _ in range(span)]
