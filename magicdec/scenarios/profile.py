"""Only the times: T_T, T_D and T_V(gamma) over a grid, over caches filled directly instead of
prefilled.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from pydantic import TypeAdapter

from magicdec.config.scenario_settings import Profile
from magicdec.data import PromptRequest, load_prompts
from magicdec.engine.native import NativeEngine, warm_up
from magicdec.measure import memory_use
from magicdec.measure.metrics import Metrics
from magicdec.measure.round_profile import profile_round
from magicdec.planning import build
from magicdec.planning.resolved import Plan
from magicdec.scenarios.diagnosed import (
    diagnosis_metrics,
    diagnosis_of,
    setup_of_profile,
    with_limits,
)
from magicdec.scenarios.outcome import Outcome
from magicdec.scenarios.unit_folder import UnitFolder
from magicdec.tracking.progress import Progress
from magicdec.tracking.store import Run
from magicdec.units import GIB

Line = dict[str, int | float | None]  # of the history


@dataclass(frozen=True)
class PointUnit:
    """The times of one point of the grid."""

    line: Line
    peak_gib: float  # of memory, up to the end of this point

    @property
    def point(self) -> tuple[Any, ...]:
        """Return the batch, the context and the gamma of the point."""
        return tuple(self.line[name] for name in ("batch_size", "context_len", "gamma"))


POINT_UNIT = TypeAdapter(PointUnit)


def run(plan: Plan, run: Run, progress: Progress) -> Outcome:
    """Time what the run lacks of scenario.batch_sizes x context_lens x gammas; a point is a line of
    the history.
    """
    scenario = plan.config.settings(Profile)
    units = UnitFolder(run, POINT_UNIT)
    peak = memory_use.Peak(plan.device)
    points = list(product(scenario.batch_sizes, scenario.context_lens, scenario.gammas))
    measured = {unit.point for unit in units.units}
    missing = [point for point in points if point not in measured]
    engine = build.engine(plan, progress)
    with progress.task("profiling", total=len(missing)) as task:
        for line in time_points(engine, missing, scenario.profile_repeats, plan.config.data.seed):
            units.add(PointUnit(line, peak.num_bytes / GIB), "point")
            run.write_lines("history", _history(units, points))
            task.advance(1)
    history: list[dict[str, Any]] = [*_history(units, points)]
    peak_gib = max(unit.peak_gib for unit in units.units)
    metrics: Metrics = {"device": plan.device_name, "memory/peak_gib": peak_gib}
    metrics["weights/bytes"] = plan.weight_bytes
    if plan.config.speculates and (setup := setup_of_profile(plan)):
        history = with_limits(history, setup, knows_draft=True)
        metrics |= diagnosis_metrics(diagnosis_of(history, setup, plan))
    return Outcome(metrics | plan.sources, history=history)


def _history(units: UnitFolder[PointUnit], points: Iterable[tuple[int, int, int]]) -> list[Line]:
    """Return the lines of the points that are measured, in the order of the grid."""
    lines = {unit.point: unit.line for unit in units.units}
    return [lines[point] for point in points if point in lines]


def time_points(
    engine: NativeEngine, points: Iterable[tuple[int, int, int]], repeats: int, seed: int = 0
) -> Iterator[Line]:
    """Yield the times of a round's steps at each point: batch, context and gamma."""
    for batch_size, context_len, gamma in points:
        request = PromptRequest(batch_size, context_len, engine.target.config.vocab_size, seed=seed)
        prompts = load_prompts("random", request)
        batch = replace(engine, draft=replace(engine.draft, gamma=gamma)).open(prompts.tokens)
        batch.simulate_prefill()
        warm_up(batch)
        times = profile_round(batch, repeats)
        batch.close()  # or the caches of two points would be held at once
        point: Line = {"batch_size": batch_size, "context_len": context_len, "gamma": gamma}
        yield point | {f"time/{name}": value for name, value in times.items()}
