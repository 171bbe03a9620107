"""The frame of a run: prepare the scenario, open the run's folder, run the scenario, store its results, log them."""

import math
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from rich.text import Text

from magicdec.config.checks import refuse_unread, warnings
from magicdec.config.load import to_dict
from magicdec.config.schema import Compare, Config
from magicdec.errors import Stopped, UserError, in_one_line, is_out_of_memory, to_stderr
from magicdec.measure.system import sampled
from magicdec.planning.shared import SHARED
from magicdec.scenarios.outcome import Outcome
from magicdec.tracking import sweep, table
from magicdec.tracking.console import Console
from magicdec.tracking.identity import run_id
from magicdec.tracking.lock import Busy, locked
from magicdec.tracking.progress import Follow, Progress, nobody, progress
from magicdec.tracking.reader import BASELINE, attempts, find_done, iter_runs, noise, read_result, slowness
from magicdec.tracking.store import Run, explained, software
from magicdec.tracking.sweep import Job
from magicdec.tracking.trackers import Live, chosen, is_logged, log_run
from magicdec.units import GIB, in_minutes

if TYPE_CHECKING:  # it imports PyTorch, and a mistake must be reported before that
    from magicdec.planning.resolve import Plan


class Scenario(Protocol):
    """Module of this package that prepares and does one kind of run."""

    def prepare(self, config: Config) -> "Plan":
        """Resolve `auto` values. Raise UserError for mistakes that can be found before weights are loaded."""

    def run(self, plan: "Plan", progress: Progress) -> Outcome:
        """Do the work."""


def run(config: Config, job: Job) -> dict[str, Any]:
    """Prepare a run, do it, store its results, and only then log it to the trackers.

    In a sweep, with `resume`, skip a run that the same software has done. Return the contents of result.json, or
    nothing after a dry run. Raise UserError for mistakes; those found before the run's folder is opened leave no files.
    """
    trackers = list(chosen(to_dict(config)))
    is_alone = job.sweep_dir is None and not any(tracker.in_sweep() for tracker in trackers)
    ineffective = refuse_unread(config, job.overrides) if is_alone else []  # other runs of a grid may read them
    for tracker in trackers:
        tracker.check(to_dict(config))
    plan = _scenario(config).prepare(config)
    settings = _settings(plan.config, job)
    name = run_id(settings, plan.fingerprints, plan.device_name)
    if config.sweep.dry_run:
        _list(plan, name, job)
        return {}
    for warning in [*ineffective, *warnings(plan.config), *plan.warnings()]:
        Console(stderr=True).print(Text.assemble(("warning:", "yellow"), " ", warning))
    if job.sweep_dir is not None and job.number == 0 and plan.num_ranks > 1 and config.sweep.share != "none":
        ranks = f"hardware.tensor_parallel={plan.num_ranks}"
        to_stderr(f"{ranks}: jobs share nothing, because the ranks are processes of each job")
    with _alone(config.runs_dir, name, job):
        return _skipped(config, name, job) or _measure(plan, name, settings, job)


def _settings(config: Config, job: Job) -> dict[str, Any]:
    """Return the contents of config.yaml: the configuration and what trackers add to it."""
    group = None if job.sweep_dir is None else config.sweep.name or job.sweep_dir.name
    settings = to_dict(config)
    for tracker in chosen(settings):
        settings = tracker.settings(settings, group)
    return settings


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


def _record(config: Config, attempt_id: str, job: Job) -> None:
    """Write into the sweep's folder which attempt this job has made or found."""
    if job.sweep_dir is not None:
        with explained(config.runs_dir):
            sweep.record(job.sweep_dir, job.number, attempt_id, job.overrides)


def _found(config: Config, name: str) -> dict[str, Any]:
    """Return the stored result of this run by this software, or by any if `resume` says so; {} if there is none."""
    if not config.resume:
        return {}
    return find_done(config.runs_dir, name, {} if config.resume == "any_version" else software())


def _lacks_repeats(config: Config, found: Mapping[str, Any]) -> bool:
    """Return whether a result has fewer repeats than asked for: runs that take turns were interrupted."""
    wanted = getattr(config.scenario, "repeats", 0)
    return isinstance(wanted, int) and found.get("repeats", wanted) < wanted


def _is_settled(config: Config, found: Mapping[str, Any]) -> bool:
    """Return whether a sweep skips a run with this result: with resume=noisy, one that was not disturbed or whose
    speedup is known as precisely as asked for.
    """
    if _lacks_repeats(config, found):
        return False
    if config.resume != "noisy" or not found:
        return bool(found)
    reached, scenario = found.get("speedup_precision"), config.scenario
    if isinstance(scenario, Compare) and reached is not None and reached <= scenario.precision:
        return True
    return not found.get("noisy") and getattr(scenario, "repeats", 1) != "auto"


def _skipped(config: Config, name: str, job: Job) -> dict[str, Any]:
    """Return the stored result of a run that is skipped, and say so; {} for a run that must be done."""
    if job.sweep_dir is None or not _is_settled(config, found := _found(config, name)):
        return {}
    if job.turn > 1:
        return found
    others = " and ".join(key for key, value in software().items() if found.get(key) != value)
    why = f"done already{others and f' with other {others}'}, skipped (resume=false measures it again)"
    Console(stderr=True).print(Text(f"{found['id']}: {why}"))
    _record(config, found["id"], job)
    return found


def _measure(plan: "Plan", name: str, settings: dict[str, Any], job: Job) -> dict[str, Any]:
    """Do the run, store and show its results; return the contents of result.json."""
    before = _before(plan.config, name, job)
    if before is not None or job.turn:
        plan = replace(plan, earlier=before, turn=job.turn > 0)
    SHARED.begin(plan.config.sweep.share if job.sweep_dir else "none")
    this = Run.open(plan.config.runs_dir, name, settings, job.overrides)
    live = Live(this.folder, settings, this.result)
    is_part = 0 < job.turn < getattr(plan.config.scenario, "repeats", 0)  # the last turn's attempt has all repeats
    try:
        _record(plan.config, this.id, job)
        with this.log_to_file(), _stoppable():
            with sampled() as rows:
                outcome = _outcome(plan, this, nobody if is_part else live)
            outcome.system = rows
            earlier = [read_result(path) for path in attempts(this.runs_dir, name) if path != this.folder]
            outcome.metrics |= slowness(outcome.metrics, earlier)
            if BASELINE in outcome.metrics:
                outcome.metrics["noisy"] = bool(noise(outcome.metrics))
            this.finish(outcome.metrics, outcome.generations, outcome.history, outcome.samples, outcome.system)
            if before is not None and job.turn and this.result.get("repeats", 0) > 1:
                shutil.rmtree(before, ignore_errors=True)  # its repeats are in this attempt
    except BaseException as error:
        SHARED.clear()
        reason, kind = _reason(error, plan.config)
        kept: Outcome = vars(error).get("outcome") or Outcome({})  # see outcome.keeping
        this.fail(reason, kind, kept.history, kept.metrics, kept.generations)
        if is_logged(this.result) or live.is_shown:
            for warning in filter(None, (one.warning for one in log_run(this.folder, settings, this.result))):
                to_stderr(warning)
        if kind == "out_of_memory":
            raise UserError(reason) from error
        raise
    if job.turn and _lacks_repeats(plan.config, this.result):
        return this.result
    logged = log_run(this.folder, settings, this.result)
    table.show(Console(file=sys.stdout), settings, outcome.metrics, this.folder, logged, outcome.history, outcome.view)
    return this.result


def _before(config: Config, name: str, job: Job) -> Path | None:
    """Return the attempt whose repeats this one counts too: of the turn before, or one that is to be improved on."""
    found = _found(config, name)
    attempt_id = found.get("id") if config.resume == "noisy" or _lacks_repeats(config, found) else None
    if job.turn > 1 and job.sweep_dir is not None:
        attempt_id = sweep.attempt_of(job.sweep_dir, job.number)
    return Path(config.runs_dir, attempt_id) if attempt_id else None


def _list(plan: "Plan", name: str, job: Job) -> None:
    """Print a line about a run: its id, its state in the store, its memory and time, and its overrides."""
    from magicdec.planning import build, duration  # here, because a prediction does not need them

    earlier = attempts(plan.config.runs_dir, name)
    stored = next(iter_runs(plan.config.runs_dir, [path.name for path in earlier[-1:]]), {})
    state = stored.get("kind") or stored.get("status") or "new"
    if is_done := _is_settled(plan.config, _found(plan.config, name)):
        state = "done"
    elif state == "done":
        state = "other version"
    seconds = 0.0 if is_done else duration.seconds(plan, map(read_result, earlier))
    sweep.planned.append(seconds)
    typed = " ".join(text for text in job.overrides if not text.startswith("sweep."))
    print(f"{name}  {state:13}  {build.num_bytes(plan) / GIB:8.2f} GiB  {in_minutes(seconds):>7}  {typed}", flush=True)


@contextmanager
def _stoppable() -> Iterator[None]:
    """Raise Stopped within at SIGTERM, which would end the process at once."""
    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield
        return

    def stop(*_: Any) -> None:
        raise Stopped("stopped by SIGTERM")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _outcome(plan: "Plan", run: Run, follow: Follow) -> Outcome:
    """Do the work, here or on the ranks that share the model. Ranks report nothing before the end."""
    if plan.num_ranks == 1:
        return _work(0, plan, follow=follow)
    from magicdec.scenarios.ranks import on_ranks  # most runs have one

    return on_ranks(plan.num_ranks, plan.config.hardware.device, _work, plan, run)


def _work(rank: int, plan: "Plan", run: Run | None = None, follow: Follow = nobody) -> Outcome:
    """Run the scenario on one rank. Only rank 0 shows its progress, and logs into `run`."""
    console = Console(stderr=True) if rank == 0 else Console(quiet=True, force_terminal=False)
    with run.log_to_file() if run and rank == 0 else nullcontext(), progress(console, follow) as bars:
        return _scenario(plan.config).run(plan, bars)


def imports(name: str, config: Mapping[str, Any] | None = None) -> list[str]:
    """Return the modules that a run of this scenario imports, for a process that imports them once for many runs.

    `config` names the trackers.
    """
    modules = [f"magicdec.scenarios.{name}", "magicdec.planning.resolve"]
    modules += [module for tracker in chosen(config or {}) for module in tracker.IMPORTS]
    if name not in ("predict", "plan"):
        modules += ["magicdec.engine.native", "torch._dynamo", "transformers.models.auto.tokenization_auto"]
        modules += ["transformers.models.llama.configuration_llama"]  # it loads what all families need
    return modules


def _scenario(config: Config) -> Scenario:
    """Import the scenario that was chosen, and no other."""
    name: str = config.scenario.name
    if config.engine.name != "native":
        name = "endpoint" if name == "serve" else "peer"
    return cast(Scenario, import_module(f"magicdec.scenarios.{name}"))


def _reason(error: BaseException, config: Config) -> tuple[str, str]:
    """Return why a run failed, in words and as a kind (Run.fail)."""
    if isinstance(error, UserError):
        return str(error), error.kind
    if is_out_of_memory(error):
        size = f"batch.size={config.batch.size} at batch.context_len={config.batch.context_len}"
        reason = f"{size}: out of memory ({in_one_line(error)})"
        return f"{reason}; choose less of either, or of batch.prefill_chunk", "out_of_memory"
    if isinstance(error, Stopped):
        return str(error), "stopped"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "interrupted"
    return in_one_line(error), "crashed"
