"""What a run does: each scenario is a function from a plan to an outcome, and `run` gives every one the same frame."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from magicdec.config import Config, to_dict, warnings
from magicdec.errors import UserError

log = logging.getLogger(__name__)

SCENARIOS = {"compare": "compare", "profile": "profile"}  # name -> module and function of that name
POLL_S = 1.0  # between looks at a run that another process is running


@dataclass(frozen=True)
class Job:
    """What was typed to get a run, and the sweep that it is a job of."""

    overrides: tuple[str, ...] = ()
    sweep_dir: Path | None = None  # None: a single run
    number: int = 0
    waits: bool = True  # for a run that another process is running; otherwise that is raised as Busy


def run(config: Config, job: Job) -> None:
    """Check, plan, open the run's folder, do the work, store its results, and only then tell Weights & Biases.

    In a sweep, with `resume`, a run that this version has done already is not done again.
    """
    from magicdec import build
    from magicdec.tracking import sweep, wandb
    from magicdec.tracking.store import explained, run_id

    wandb.check(to_dict(config)["wandb"])
    plan = build.plan(config)
    console = Console(stderr=True)
    settings = to_dict(plan.config)
    name = run_id(settings, plan.fingerprints, plan.device_name)
    if config.sweep.dry_run:
        _list(plan, name, job)
        return
    for warning in warnings(plan.config):
        console.print(f"[yellow]warning:[/] {warning}", highlight=False)
    if job.sweep_dir is not None:
        settings["wandb"]["group"] = settings["wandb"]["group"] or job.sweep_dir.name
        with explained(config.runs_dir):
            sweep.record(job.sweep_dir, job.number, name, job.overrides)
    if _is_settled(config, name, job):  # without the lock, so that a store one cannot write to can be looked at
        return
    with _alone(Path(config.runs_dir, name), job, console):
        if not _is_settled(config, name, job):
            _measure(plan, name, settings, job)


def _is_settled(config: Config, name: str, job: Job) -> bool:
    """Whether there is nothing to do for this job, which is then said."""
    from magicdec.tracking.reader import is_done

    if job.sweep_dir is None or not config.resume:
        return False
    if done := is_done(config.runs_dir, name, any_version=config.resume == "any_version"):
        Console(stderr=True).print(f"{name}: done already, skipped (resume=false measures it anew)", highlight=False)
    return done


@contextmanager
def _alone(folder: Path, job: Job, console: Console) -> Iterator[None]:
    """Hold the run's lock; in a sweep, where another process does, wait for it."""
    from magicdec.tracking.lock import Busy, is_locked, locked
    from magicdec.tracking.store import explained

    with ExitStack() as held:
        while True:
            try:
                with explained(folder.parent):
                    held.enter_context(locked(folder))
                break
            except Busy as busy:
                if job.sweep_dir is None or not job.waits:
                    raise
                console.print(str(busy), highlight=False)
                while is_locked(folder):
                    time.sleep(POLL_S)
        yield


def _measure(plan: Any, name: str, settings: dict[str, Any], job: Job) -> None:
    """The run itself."""
    from magicdec.tracking import table, wandb
    from magicdec.tracking.progress import progress
    from magicdec.tracking.store import Run

    scenario = _scenario(plan.config.scenario.name)
    this = Run.open(plan.config.runs_dir, name, settings, job.overrides)
    with this.log_to_file():
        try:
            with progress() as bars:
                outcome = scenario(plan, bars)
            this.finish(outcome.metrics, outcome.generations, outcome.history)
        except BaseException as error:
            this.fail(*_reason(error))
            raise
    told = wandb.log_run(this, settings, outcome)
    table.show(Console(file=sys.stdout), settings, outcome.metrics, this.folder, told, outcome.history)


def _list(plan: Any, name: str, job: Job) -> None:
    """A line on a run that would be done: its id, how it stands, the memory it will take, what was typed."""
    from magicdec import build
    from magicdec.tracking.reader import load_run

    config = plan.config
    profiles = config.scenario.name == "profile"
    rows = max(config.scenario.batch_sizes) if profiles else int(config.batch.size)
    context_len = max(config.scenario.context_lens) if profiles else config.batch.context_len
    gib = build.estimate(plan, context_len).total(rows) / 2**30
    stored = load_run(Path(config.runs_dir, name))
    state = stored.get("kind") or stored.get("status") or "new"
    typed = " ".join(text for text in job.overrides if not text.startswith("sweep."))
    print(f"{name}  {state:11}  {gib:8.2f} GiB  {typed}", flush=True)


def _scenario(name: str) -> Callable:
    """Import a scenario when it is chosen: predicting must not wait for PyTorch."""
    return getattr(import_module(f"magicdec.scenarios.{SCENARIOS[name]}"), name)


def _reason(error: BaseException) -> tuple[str, str]:
    """Why a run failed, in words and as a kind."""
    import torch

    text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    if isinstance(error, UserError):
        return str(error), "invalid"
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return text, "out_of_memory"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "interrupted"
    return text, "crashed"
