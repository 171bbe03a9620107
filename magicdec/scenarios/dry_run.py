"""The line of a run in a dry run, which measures nothing."""

from magicdec.planning import duration, fits
from magicdec.planning.resolved import Plan
from magicdec.scenarios.resume import of_store
from magicdec.tracking import sweep
from magicdec.tracking.reader import attempts, iter_runs, read_result
from magicdec.tracking.sweep import Job
from magicdec.units import GIB, in_minutes


def show(plan: Plan, name: str, job: Job) -> None:
    """Print a line about a run: its id, its state in the store, its memory and time, and its
    overrides.
    """
    earlier = attempts(plan.config.runs_dir, name)
    stored = next(iter_runs(plan.config.runs_dir, [path.name for path in earlier[-1:]]), {})
    state = stored.get("kind") or stored.get("status") or "new"
    if is_done := of_store(plan.config, name).suffices:
        state = "done"
    elif state == "done":
        state = "predicted" if plan.config.scenario.reads_store else "other version"
    seconds = 0.0 if is_done else duration.seconds(plan, map(read_result, earlier))
    sweep.planned.append(seconds)
    typed = " ".join(text for text in job.overrides if not text.startswith("sweep."))
    memory = f"{fits.num_bytes(plan) / GIB:8.2f} GiB" if plan.config.engine.name == "native" else ""
    print(
        f"{name}  {state:13}  {memory:12}  {in_minutes(seconds):>7}  {typed}",
        flush=True,
    )
