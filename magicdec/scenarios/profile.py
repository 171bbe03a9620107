"""Only the times: T_T, T_D and T_V(gamma) over a grid, over caches filled directly instead of
prefilled.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

from magicdec.config.schema import Profile
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
from magicdec.tracking.progress import Progress
from magicdec.tracking.store import Run
from magicdec.units import GIB


def run(plan: Plan, run: Run, progress: Progress) -> Outcome:
    """Time every point of scenario.batch_sizes x context_lens x gammas; a point is a line of the
    history.
    """
    scenario = plan.config.settings(Profile)
    peak = memory_use.Peak(plan.device)
    engine = build.engine(plan, progress)
    points = list(product(scenario.batch_sizes, scenario.context_lens, scenario.gammas))
    history: list[dict] = []
    with progress.task("profiling", total=len(points)) as task:
        for point in time_points(engine, points, scenario.profile_repeats, plan.config.data.seed):
            history.append(point)
            run.write_lines("history", history)
            task.advance(1)
    metrics: Metrics = {"device": plan.device_name, "memory/peak_gib": peak.num_bytes / GIB}
    if plan.config.speculates and (setup := setup_of_profile(plan)):
        history = with_limits(history, setup, knows_draft=True)
        metrics |= diagnosis_metrics(diagnosis_of(history, setup, plan))
    return Outcome(metrics | plan.sources, history=history)


def time_points(
    engine: NativeEngine, points: Iterable[tuple[int, int, int]], repeats: int, seed: int = 0
) -> Iterator[dict[str, float]]:
    """Yield the times of a round's steps at each point: batch, context and gamma."""
    for batch_size, context_len, gamma in points:
        request = PromptRequest(batch_size, context_len, engine.target.config.vocab_size, seed=seed)
        prompts = load_prompts("random", request)
        batch = replace(engine, draft=replace(engine.draft, gamma=gamma)).open(prompts.tokens)
        batch.simulate_prefill()
        warm_up(batch)
        times = profile_round(batch, repeats)
        batch.close()  # or the caches of two points would be held at once
        point = {"batch_size": batch_size, "context_len": context_len, "gamma": gamma}
        yield point | {f"time/{name}": value for name, value in times.items()}
