"""Acceptance curves: alpha by budget and context, from runs or from publications, never invented.

A curve belongs to one target, draft, quantization of the draft's weights, cache policy and settings
of the policy. Between measured points alpha is interpolated in log budget and log context, and made
monotone: it does not fall with the budget nor rise with the context; noise is pooled away. Beyond
the measured points there is no estimate.
"""

import csv
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import starmap
from math import log
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from magicdec.config.omega import alpha_from_acceptance_length
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.config.schema import Config
from magicdec.costmodel.round import Setup
from magicdec.costmodel.tables import PUBLISHED, read_table
from magicdec.costmodel.targets import model_label
from magicdec.errors import UserError

# The paper's, and those of our own studies: a file each. Only the latter have the columns
# quantization and settings.
PUBLISHED_ALPHAS = sorted(PUBLISHED.parent.glob("acceptance*.csv"))
AT = " at temperature "  # in the name of a text
# Contexts and budgets within this ratio count as equal: 32,768 is measured where 32,000 is.
SAME_SIZE_RATIO = 1.05


class Point(NamedTuple):
    """One known acceptance."""

    target: str
    draft: str  # self, or a model's name
    policy: str
    budget: int
    context_len: int
    task: str  # the text it was measured on, as `task_name` says, or a paper's data set
    alpha: float
    source: str
    measured: bool = False  # in a run of our own
    quantization: str = "none"  # of the draft's weights
    # Of the policy, as `CacheConfig.settings` has them; None: a publication's.
    settings: tuple[int, ...] | None = None
    weights: str | None = None  # the labels of the models; None: their names

    def answers(self, setup: Setup) -> bool:
        """Return whether the point was measured on this target, draft and policy, in this form."""
        wanted = (
            setup.target_name,
            setup.draft_label,
            setup.cache.policy,
            setup.draft.quantization,
        )
        is_same_draft = (self.target, self.draft, self.policy, self.quantization) == wanted
        return is_same_draft and self.settings in (None, setup.cache.settings)


_POINT = TypeAdapter(Point)


class AlphaEstimate(NamedTuple):
    """An alpha and its source: a measurement, a given value, or 1 where the draft sees what the
    target sees.
    """

    alpha: float
    source: str
    is_measured: bool = False


class Curves:
    """Known acceptances, and estimates between them.

    Those on the text in question come first, then runs of our own, then publications; of these,
    those sampled at the same temperature, then the text with most points.
    """

    def __init__(self, points: Iterable[Point], task: str | None = None):
        self._points, self._task = list(points), task

    def estimate(self, setup: Setup, generate_len: int = 0) -> AlphaEstimate | None:
        """Return alpha while `generate_len` tokens follow the context; None where no known point is
        near enough.
        """
        if _is_exact(setup, generate_len):
            return AlphaEstimate(1.0, "exact: the draft sees all that the target sees")
        for points in self._candidates(setup):
            by_budget: dict[int, list[Point]] = defaultdict(list)
            for point in points:
                by_budget[point.budget].append(point)
            ladder = []
            for budget, same in sorted(by_budget.items()):
                alpha = _interpolate(
                    [(p.context_len, p.alpha) for p in same], setup.context, rising=False
                )
                if alpha is not None:
                    ladder.append((budget, alpha))
            alpha = _interpolate(ladder, setup.cache.budget, rising=True)
            if alpha is not None:
                return AlphaEstimate(alpha, _describe(points, setup), is_measured=True)
        return None

    def answers(self, setup: Setup, generate_len: int = 0) -> tuple[int, ...]:
        """Return the budgets at which alpha is known where everything else is as the setup has it,
        ascending.
        """
        return tuple(
            b
            for b in self.budgets(setup)
            if self.estimate(setup.at(budget=b), generate_len) is not None
        )

    def budgets(self, setup: Setup) -> list[int]:
        """Return the budgets that some point of a setup's curve has, ascending."""
        return sorted({point.budget for points in self._candidates(setup) for point in points})

    def _candidates(self, setup: Setup) -> list[list[Point]]:
        """Return groups of points of one origin and task, the best first."""

        def merit(group: tuple[bool, str]) -> tuple[bool, bool, bool, int]:
            measured, task = group
            # Of ruler-qa, the paper has two.
            same = self._task is not None and f"{task}-".startswith(f"{self._task}-")
            as_random = task.partition(AT)[2] == (self._task or "").partition(AT)[2]
            return same, measured, as_random, len(groups[group])

        groups: dict[tuple[bool, str], list[Point]] = defaultdict(list)
        for point in self._points:
            if point.answers(setup):
                groups[point.measured, point.task].append(point)
        return [groups[key] for key in sorted(groups, key=merit, reverse=True)]


@cache
def published_points() -> tuple[Point, ...]:
    """Return the published acceptances: those stated and, for the rest, those that the paper's
    Omega implies.
    """
    stated = [
        _stated(line)
        for path in PUBLISHED_ALPHAS
        for line in csv.DictReader(path.read_text().splitlines())
    ]
    configurations = {point[:6] for point in stated}
    implied = [
        Point(
            *configuration,
            alpha_from_acceptance_length(row.omega, row.gamma),
            f"MagicDec (arXiv 2408.11049), the Omega of table {row.table}",
        )
        for row in read_table()
        if row.omega is not None and row.kv_budget is not None
        for configuration in [
            (row.target, row.draft, row.policy, row.kv_budget, row.context_len, row.task)
        ]
        if configuration not in configurations
    ]
    return (*stated, *implied)


def _stated(line: Mapping[str, str]) -> Point:
    """Return the point of a line of PUBLISHED_ALPHAS."""
    settings = {"settings": line["settings"].split()} if "settings" in line else {}
    return _POINT.validate_python({**line, **settings})


def measured(runs: Iterable[Mapping[str, Any]]) -> list[Point]:
    """Return the acceptances of all finished runs (tracking/reader.py) that measured one; synthetic
    ones did not.
    """
    points = []
    for run in runs:
        # A run of another version, or a foreign file, may lack any key.
        with suppress(UserError, OSError, ValueError, KeyError, TypeError, AttributeError):
            if (
                run["status"] == "done"
                and run.get("acceptance/source") == "measured"
                and run.get("alpha") is not None
            ):
                points.append(_point(run))
    return points


def _point(run: Mapping[str, Any]) -> Point:
    config = run["config"]
    draft = config["draft"]
    data = config["data"]
    cache = config["cache"]
    facts = DRAFTS[draft["name"]].facts
    cache = cache if facts.is_model else vars(POLICIES["full"].facts())  # as a Setup has it
    models = [config["target"]] + ([draft["model"]] if facts.needs_model else [])
    return Point(
        target=config["target"]["name"],
        draft=facts.described(facts.label, draft),
        policy=cache["policy"],
        budget=int(cache["budget"]),
        # Of its own prompts.
        context_len=round(run.get("data/context_len_mean") or config["batch"]["context_len"]),
        task=task_name(
            data["name"], data.get("task"), config.get("sampling", {}).get("temperature", 0.0)
        ),
        alpha=float(run["alpha"]),
        source=f"run {Path(run['folder']).name}",
        measured=True,
        quantization=draft.get("quantization", "none"),
        settings=tuple(cache[key] for key in POLICIES[cache["policy"]].facts.own_keys()),
        weights=_labels((model["name"], model.get("path")) for model in models),
    )


def task_name(data: str, task: str | None, temperature: float) -> str:
    """Return the name of a text as in published tables; sampling changes acceptance, so it is part
    of the name.
    """
    text = f"{data}-{task}" if task else data
    return f"{text}{AT}{temperature:g}" if temperature else text


def task_of(config: Config) -> str:
    """Return the name of the text that the models continue."""
    return task_name(config.data.name, config.data.task, config.sampling.temperature)


def is_same(a: int, b: int) -> bool:
    """Return whether two contexts or budgets count as equal."""
    return max(a, b) <= SAME_SIZE_RATIO * min(a, b)


def _is_exact(setup: Setup, generate_len: int) -> bool:
    """Return whether the target drafts for itself, unquantized, over all that it attends to in
    verification.
    """
    draft, cache = setup.draft, setup.cache
    if not draft.is_target or draft.quantization != "none" or cache.quantized:
        return False
    return cache.reads_everything or cache.budget >= setup.context + generate_len


def _describe(points: Sequence[Point], setup: Setup) -> str:
    """Return the sources of an acceptance, and what it assumes where it was measured on other
    weights.
    """
    sources = sorted({point.source for point in points})
    more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    asked = _labels(setup.models)
    named = " with ".join(name for name, _ in setup.models)
    models = sorted({point.weights or named for point in points})
    assumed = "" if models == [asked] else f", assuming that {asked} accepts as {models[0]} does"
    return f"{sources[0]}{more}, on {points[0].task}{assumed}"


def _labels(models: Iterable[tuple[str, str | None]]) -> str:
    return " with ".join(starmap(model_label, models))


def _interpolate(points: Sequence[tuple[int, float]], at: int, rising: bool) -> float | None:
    """Return a monotone curve through (size, alpha), at a size; None beyond its ends."""
    if not points:
        return None
    sizes, values = _monotone(points, rising)
    index = bisect_left(sizes, at)
    for near in (index, index - 1):
        if 0 <= near < len(sizes) and is_same(sizes[near], at):
            return values[near]
    if index in (0, len(sizes)):
        return None
    low, high = sizes[index - 1 : index + 1]
    start, end = values[index - 1 : index + 1]
    return start + log(at / low) / log(high / low) * (end - start)


def _monotone(points: Sequence[tuple[int, float]], rising: bool) -> tuple[list[int], list[float]]:
    """Return the nearest monotone sequence, by pooling adjacent violators; points of equal size are
    averaged first.
    """
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
