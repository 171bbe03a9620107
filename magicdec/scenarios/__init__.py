"""The frame of a run: resolve, name, ask the store, open, work, store, predict, tell the
trackers.
"""

import logging
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from rich.text import Text

from magicdec.config.checks import refuse_unread, warnings
from magicdec.config.load import to_dict
from magicdec.config.schema import Config
from magicdec.errors import UserError, in_one_line, to_stderr
from magicdec.measure.system import driver_version, sampled
from magicdec.measure.trust import BASELINE, noise, slowness
from magicdec.planning.shared import SHARED
from magicdec.scenarios.endings import reason_of, stoppable
from magicdec.scenarios.outcome import Outcome
from magicdec.scenarios.resume import Found, look_up
from magicdec.tracking import run_table, sweep
from magicdec.tracking.console import Console
from magicdec.tracking.lock import Busy, locked
from magicdec.tracking.progress import Follow, Progress, progress
from magicdec.tracking.reader import attempts, read_result
from magicdec.tracking.run_id import run_id
from magicdec.tracking.software import software
from magicdec.tracking.store import Run
from magicdec.tracking.sweep import Job
from magicdec.tracking.trackers import Live, chosen, is_logged, log_run
from magicdec.tracking.whole_files import explained
from magicdec.units import GIB

log = logging.getLogger(__name__)

if TYPE_CHECKING:  # it imports PyTorch, and a mistake must be reported before that
    from magicdec.planning.resolved import Plan


class Scenario(Protocol):
    """Module of this package that does one kind of run.

    It may have three more functions: `prepare(config)` resolves a configuration where that takes
    more than `resolve`, `so_far(plan, run)` returns what a run has measured that has failed, and
    `prediction_of(plan, results)` what is predicted for a run that has been measured.
    """

    def run(self, plan: "Plan", run: Run, progress: Progress) -> Outcome:
        """Do the work. What must outlive a failure is written into the run's folder."""


def run(config: Config, job: Job) -> dict[str, Any]:
    """Do a run, store its results, and only then predict it and log it to the trackers.

    In a sweep, with `resume`, skip a run that the same software has done, and measure only what it
    lacks. Return the contents of result.json, or nothing after a dry run. Raise UserError for
    mistakes; those found before the run's folder is opened leave no files.
    """
    scenario = _scenario(config)
    ineffective = _checked(config, job)
    plan = _fitting(prepare(config), config)
    settings = _settings(plan.config, job)
    name = run_id(settings, plan.fingerprints, plan.device_name)
    if config.sweep.dry_run:
        from magicdec.scenarios import dry_run  # a prediction needs no durations

        dry_run.show(plan, name, job)
        return {}
    _warn([*ineffective, *warnings(plan.config), *plan.warnings(), *_losses(plan)])
    with _alone(config.runs_dir, name, job):
        stored = look_up(config, name, job)
        _warn(_of_a_server(config, stored, job))
        if stored.suffices:
            return _skipped(config, stored, job)
        this = _opened(config.runs_dir, name, settings, job, stored)
        _record(config, this.id, job, stored.before)
        live = Live(this.folder, settings, this.result)
        with this.log_to_file(), _failures(scenario, plan, this, settings, live), stoppable():
            outcome = _measured(plan, this, job, live)
            this.finish(
                outcome.metrics,
                outcome.generations,
                outcome.history,
                outcome.samples,
                outcome.system,
            )
            this.annotate(_judged(scenario, plan, this, name))
        logged = log_run(this.folder, settings, this.result)
    console = Console(file=sys.stdout)
    run_table.show(
        console, settings, this.result, this.folder, logged, outcome.history, outcome.view
    )
    return this.result


def prepare(config: Config) -> "Plan":
    """Return the plan of a run, with every `auto` resolved. Raise UserError for mistakes that can
    be found before weights are loaded.
    """
    # Here, because it imports PyTorch.
    from magicdec.planning.resolve import resolve

    resolves = getattr(_scenario(config), "prepare", resolve)
    return cast("Plan", resolves(config))


def _fitting(plan: "Plan", config: Config) -> "Plan":
    """Return the plan with what the group `batch` leaves to the memory."""
    if "auto" not in (config.batch.size, config.batch.prefill_chunk) or config.engine.is_remote:
        return plan
    # Here, because numbers that are given need no look at the memory.
    from magicdec.planning import fits

    return fits.fitting(plan, config.batch)


def _checked(config: Config, job: Job) -> list[str]:
    """Raise UserError if a tracker cannot be used. Return a line for each override that has no
    effect.
    """
    trackers = list(chosen(to_dict(config)))
    is_alone = job.sweep_dir is None and not any(tracker.in_sweep() for tracker in trackers)
    # Other runs of a grid may read them.
    ineffective = refuse_unread(config, job.overrides) if is_alone else []
    for tracker in trackers:
        tracker.check(to_dict(config))
    return ineffective


def _settings(config: Config, job: Job) -> dict[str, Any]:
    """Return the contents of config.yaml: the configuration and what trackers add to it."""
    group = None if job.sweep_dir is None else config.sweep.name or job.sweep_dir.name
    settings = to_dict(config)
    for tracker in chosen(settings):
        settings = tracker.settings(settings, group)
    return settings


def _losses(plan: "Plan") -> list[str]:
    """Return a warning about a run that is predicted not to pay."""
    # CPUs have no datasheet, and peers no predictions.
    if not plan.config.compares_natively or plan.device.type == "cpu":
        return []
    # Here, because most runs need no cost model before they have ended.
    from magicdec.planning import acceptances

    line = acceptances.warning(plan)
    return [line] if line else []


def _warn(lines: list[str]) -> None:
    for line in lines:
        Console(stderr=True).print(Text.assemble(("warning:", "yellow"), " ", line))


@contextmanager
def _alone(runs_dir: str, name: str, job: Job) -> Iterator[None]:
    """Hold the run's lock. If another process has it, wait if the job waits, or raise Busy."""
    folder = Path(runs_dir, name)
    with ExitStack() as held:
        with explained(runs_dir):
            try:
                held.enter_context(locked(folder))
            except Busy as busy:
                if not job.waits:
                    raise
                Console(stderr=True).print(Text(str(busy)))
                held.enter_context(locked(folder, patience_s=math.inf))
        yield


def _skipped(config: Config, stored: Found, job: Job) -> dict[str, Any]:
    """Say that a run is skipped, once in a sweep; return its stored result."""
    result = dict(stored.result)
    if not _is_recorded(job, result["id"]):
        others = " and ".join(key for key, value in software().items() if result.get(key) != value)
        why = (
            f"done already{others and f' with other {others}'}, skipped (resume=false measures it"
            " again)"
        )
        Console(stderr=True).print(Text(f"{result['id']}: {why}"))
    _record(config, result["id"], job, stored.before)
    return result


def _of_a_server(config: Config, stored: Found, job: Job) -> list[str]:
    """Return a warning that a server at the same address may have changed since it was measured."""
    if (
        not config.engine.is_remote
        or stored.folder is None
        or _is_recorded(job, stored.folder.name)
    ):
        return []
    return [
        f"{stored.folder.name} was measured before, and nothing tells whether the server is still"
        " the same; resume=false measures all of it again"
    ]


def _opened(runs_dir: str, name: str, settings: dict[str, Any], job: Job, stored: Found) -> Run:
    """Open the folder that the store has for this run, or a new one."""
    if stored.folder is not None:
        return Run.reopen(stored.folder, settings, job.overrides, stored.before)
    return Run.open(runs_dir, name, settings, job.overrides)


def _is_recorded(job: Job, attempt_id: str) -> bool:
    """Return whether the sweep's folder says that this job has made or found an attempt."""
    return job.sweep_dir is not None and sweep.attempt_of(job.sweep_dir, job.number) == attempt_id


def _record(config: Config, attempt_id: str, job: Job, before: int) -> None:
    """Write into the sweep's folder which attempt this job has made or found."""
    if job.sweep_dir is not None and not _is_recorded(job, attempt_id):
        with explained(config.runs_dir):
            sweep.record(job.sweep_dir, job.number, attempt_id, job.overrides, before)


def _measured(plan: "Plan", this: Run, job: Job, live: Live) -> Outcome:
    """Do the work, here or on the ranks that share the model. Ranks report nothing before the
    end.
    """
    SHARED.begin(plan.config.sweep.share if job.sweep_dir else "none")
    with sampled() as rows:
        if plan.num_ranks == 1:
            outcome = _work(0, plan, this, live)
        else:
            from magicdec.scenarios.ranks import on_ranks  # most runs have one

            outcome = on_ranks(plan.num_ranks, plan.config.hardware.device, _work, plan, this)
    outcome.system = rows
    return outcome


def _work(rank: int, plan: "Plan", this: Run, follow: Follow | None = None) -> Outcome:
    """Run the scenario on one rank. Only rank 0 shows its progress; in a process of its own it has
    a log, too.
    """
    console = Console(stderr=True) if rank == 0 else Console(quiet=True, force_terminal=False)
    logged = this.log_to_file() if plan.num_ranks > 1 and rank == 0 else nullcontext()
    with logged, progress(console, follow) as bars:
        estimated = checked_memory(plan)
        outcome = _scenario(plan.config).run(plan, this if rank == 0 else this.read_only(), bars)
        outcome.metrics |= estimated
        return outcome


def checked_memory(plan: "Plan") -> dict[str, float]:
    """Raise UserError if our engine would need more memory than there is. Return the estimate,
    where one is made.
    """
    if plan.predicts or plan.config.engine.name != "native":
        return {}
    from magicdec.planning import fits  # here, because a prediction does not need it

    estimate = fits.check(plan, *plan.config.scenario.largest(plan.config.batch))
    return {} if estimate is None else {"memory/estimated_gib": estimate.total / GIB}


def _judged(scenario: Scenario, plan: "Plan", this: Run, name: str) -> dict[str, Any]:
    """Return what is said of a run's measurements: predictions, and whether they are disturbed."""
    predict = getattr(scenario, "prediction_of", None)
    said: dict[str, Any] = predict(plan, this.result) if predict else {}
    earlier = [read_result(path) for path in attempts(this.runs_dir, name) if path != this.folder]
    said |= slowness(this.result | said, earlier)
    if BASELINE in this.result:
        said["noisy"] = bool(noise(this.result | said))
    return said


@contextmanager
def _failures(
    scenario: Scenario, plan: "Plan", this: Run, settings: dict[str, Any], live: Live
) -> Iterator[None]:
    """Mark a run that fails within as failed, with what it has measured so far, and log it."""
    was_done = this.result["status"] == "done"  # in an earlier session, which has logged it
    try:
        yield
    except BaseException as error:
        SHARED.clear()
        reason, kind = reason_of(error, plan.config)
        kept = _so_far(scenario, plan, this)
        this.fail(reason, kind, kept.history, kept.metrics, kept.generations)
        if live.is_shown or (is_logged(this.result) and not was_done):
            for warning in filter(
                None, (logged.warning for logged in log_run(this.folder, settings, this.result))
            ):
                to_stderr(warning)
        if kind == "out_of_memory":
            raise UserError(reason) from error
        raise


def _so_far(scenario: Scenario, plan: "Plan", this: Run) -> Outcome:
    """Return what a run that has failed has measured."""
    so_far = getattr(scenario, "so_far", None)
    try:
        return so_far(plan, this) if so_far else Outcome({})
    except Exception as error:  # the user is about to see another one
        log.warning("what was measured is not summed up: %s", in_one_line(error))
        return Outcome({})


def imports(name: str, config: Mapping[str, Any] | None = None) -> list[str]:
    """Return the modules that a run of this scenario imports, for a process that imports them once
    for many runs.

    `config` names the trackers.
    """
    modules = [f"magicdec.scenarios.{name}", "magicdec.planning.resolve"]
    modules += [module for tracker in chosen(config or {}) for module in tracker.IMPORTS]
    if name not in ("predict", "plan"):
        modules += ["magicdec.engine.native", "transformers.models.auto.tokenization_auto"]
        if driver_version():  # layers are compiled on GPUs, which may not be asked before a fork
            modules.append("torch._dynamo")
    return modules


def _scenario(config: Config) -> Scenario:
    """Import the scenario that was chosen, and no other."""
    name: str = config.scenario.name
    if config.engine.name != "native":
        name = {"serve": "serve_endpoint", "profile": "outside"}.get(name, "peer")
    return cast(Scenario, import_module(f"magicdec.scenarios.{name}"))
