"""What a run does: each scenario is a function from a plan to an outcome, and `run` gives every one the same frame."""

import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rich.console import Console

from magicdec.config import Config, to_dict, warnings
from magicdec.errors import UserError
from magicdec.scenarios.outcome import Outcome
from magicdec.scenarios.ranks import on_ranks

if TYPE_CHECKING:
    from magicdec.tracking.store import Run

log = logging.getLogger(__name__)

# How PyTorch, CUDA and its libraries say it; only some have an exception of their own.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


def run(config: Config, in_sweep: bool = False) -> None:
    """Check, plan, open the run's folder, do the work, store its results, and only then tell Weights & Biases.

    In a sweep, with `resume`, a run that this version has done already is not done again.
    """
    from magicdec.scenarios.foresee import doubts
    from magicdec.tracking import table, wandb
    from magicdec.tracking.reader import is_done
    from magicdec.tracking.store import Run, run_id

    prepare, _ = _scenario(config.scenario.name)
    wandb.check(to_dict(config)["wandb"])
    try:
        plan = prepare(config)
    except UserError as error:  # a failed run all the same: named by its configuration, there is nothing else yet
        settings = to_dict(config)
        Run.open(config.runs_dir, run_id(settings, {}, ""), settings).fail(str(error), "invalid")
        raise
    settings = to_dict(plan.config)
    console = Console(stderr=True)
    for warning in [*warnings(plan.config), *doubts(plan)]:
        console.print(f"[yellow]warning:[/] {warning}", highlight=False)
    name = run_id(settings, plan.fingerprints, plan.device_name)
    if in_sweep and config.resume and is_done(config.runs_dir, name):
        console.print(f"{name}: done already, skipped (resume=false measures it anew)", highlight=False)
        return
    this = Run.open(config.runs_dir, name, settings)
    with this.log_to_file():
        try:
            outcome = _outcome(plan, this)
            this.finish(outcome.metrics, outcome.generations, outcome.history)
        except BaseException as error:
            reason, kind = _reason(error, plan.config)
            this.fail(reason, kind)
            if kind == "out_of_memory":
                raise UserError(reason) from error
            raise
    told = wandb.log_run(this, settings, outcome)
    table.show(Console(file=sys.stdout), settings, outcome.metrics, this.folder, told, outcome.history, outcome.view)


def _outcome(plan: Any, run: "Run") -> Outcome:
    """Do the work, here or on as many ranks as share the model."""
    if plan.num_ranks == 1:
        return _work(0, plan)
    return on_ranks(plan.num_ranks, plan.device.type, _work, plan, run)


def _work(rank: int, plan: Any, run: "Run | None" = None) -> Outcome:
    """The scenario itself. Of several ranks, rank 0 alone shows what happens, and logs it into `run`."""
    from magicdec.tracking.progress import progress

    _, scenario = _scenario(plan.config.scenario.name)
    console = Console(stderr=True) if rank == 0 else Console(quiet=True, force_terminal=False)
    with run.log_to_file() if run and rank == 0 else nullcontext(), progress(console) as bars:
        return scenario(plan, bars)


def _scenario(name: str) -> tuple[Callable, Callable]:
    """What checks and plans, and the scenario itself: a module and a function of that name.

    Imported when it is chosen: predicting must not wait for PyTorch, and has a `prepare` of its own.
    """
    module = import_module(f"magicdec.scenarios.{name}")
    prepare = getattr(module, "prepare", None) or import_module("magicdec.build").plan
    return prepare, getattr(module, name)


def _reason(error: BaseException, config: Config) -> tuple[str, str]:
    """Why a run failed, in words and as a kind."""
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    if isinstance(error, UserError):
        return str(error), "invalid"
    if isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
        size = f"batch.size={config.batch.size} at batch.context_len={config.batch.context_len}"
        return f"{size}: out of memory ({text}); choose less of either, or of batch.prefill_chunk", "out_of_memory"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "interrupted"
    return text, "crashed"
