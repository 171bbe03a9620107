"""The default launcher of sweeps: each job is a process, so that neither memory, caches nor crashes leak.

A job that dies, even by a signal, is one failed run, and the sweep goes on. As many jobs run at once as there are
visible GPUs, and each takes its own; without a GPU they run one after another. A job whose run is being done by another
sweep goes to the end of the queue.

Importing PyTorch and other libraries takes longer than a small job. On Linux a server process imports them once, and
jobs are forked from it before it has used a GPU or a thread; on other systems each job imports its own. A server that
dies is replaced. Its running job goes on, and the result is read from the store.
"""

import math
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from magicdec.errors import JobFailed, to_stderr
from magicdec.tracking.gpus import visible_gpus
from magicdec.tracking.reader import read_result
from magicdec.tracking.store import Run
from magicdec.tracking.sweep import BUSY, INTERRUPTED, JOB, SWEEP_DIR, attempt_of, jobs, stop

START = "forkserver" if sys.platform == "linux" else "spawn"
POLL_S, RETRY_S, GRACE_S = 0.05, 2.0, 10.0
REAP_S = 0.5  # after its pipes have closed, a process that was killed still exists for a moment
LOST = 255  # what multiprocessing takes for the exit code of a job whose fork server has died
# Overrides of Hydra's that concern the sweep as a whole, not its jobs.
OF_THE_SWEEP = ("hydra.mode=", "hydra/launcher", "hydra.launcher", "hydra/sweeper", "hydra.sweeper", "hydra.sweep.")


@dataclass
class ProcessLauncherConf:
    """hydra/launcher=process. `jobs` at once: null is as many as there are GPUs, or one without a GPU."""

    _target_: str = "hydra_plugins.process_launcher.ProcessLauncher"
    jobs: int | None = None


ConfigStore.instance().store(group="hydra/launcher", name="process", node=ProcessLauncherConf)


@dataclass
class SweepJob:
    """A job of the sweep, until its process has ended."""

    number: int
    overrides: list[str]
    not_before: float = -math.inf

    def __str__(self) -> str:
        return f"job {self.number} ({' '.join(self.overrides)})"


class JobResult(JobReturn):
    """A job's result. The failure of one has been printed: Hydra's class would print one more line about it."""

    @property
    def return_value(self) -> Any:
        """Return the sweep's objective. Raise JobFailed for a job that has failed."""
        if self.status == JobStatus.FAILED:
            raise self._return_value
        return self._return_value


class Orphan:
    """A job's process whose fork server has died: it goes on, but nobody can read its exit code."""

    def __init__(self, pid: int):
        """Raise ProcessLookupError if the process has ended too."""
        self.pid, self.sentinel = pid, os.pidfd_open(pid)

    @property
    def exitcode(self) -> int | None:
        """LOST once the process has ended."""
        return LOST if wait([self.sentinel], timeout=0) else None

    def join(self, timeout: float) -> None:
        """Wait for the process to end."""
        wait([self.sentinel], timeout)

    def kill(self) -> None:
        """End the process."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class ProcessLauncher(Launcher):
    """Start processes, wait for them, and report how they have ended."""

    def __init__(self, jobs: int | None = None):
        self.limit = jobs or len(visible_gpus()) or 1

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take the sweep's configuration; jobs compose their own."""
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all jobs. Return their results in order, without jobs that sweep.fail_fast has kept from starting."""
        from magicdec.scenarios import imports  # here, because Hydra imports this module for every command

        waiting = deque(SweepJob(initial_job_idx + i, list(overrides)) for i, overrides in enumerate(job_overrides))
        running: dict[BaseProcess | Orphan, SweepJob] = {}
        results: dict[int, JobReturn] = {}
        if START == "forkserver":  # what the first job needs; a job of another kind imports the rest itself
            multiprocessing.set_forkserver_preload(["magicdec.cli", *imports(self.config.scenario.name, self.config)])
        try:
            while waiting or running:
                self._start_next(waiting, running)
                wait([process.sentinel for process in running], POLL_S)
                for process in [process for process in running if process.exitcode is not None]:
                    job, code = running.pop(process), process.exitcode
                    if code == LOST:
                        if orphan := _orphan(process, job):
                            running[orphan] = job
                            continue
                        code = lost_code(job, process.pid, self.config)
                    if code == BUSY:
                        job.not_before = time.monotonic() + RETRY_S
                        waiting.append(job)
                        continue
                    results[job.number] = self._result(job, code, process.pid)
                    if code and self.config.sweep.fail_fast and waiting:
                        to_stderr(f"sweep.fail_fast: {len(waiting)} jobs are not started")
                        waiting.clear()
        finally:
            _stop(running)
        return [results[number] for number in sorted(results)]

    def _start_next(self, waiting: deque[SweepJob], running: dict[BaseProcess | Orphan, SweepJob]) -> None:
        """Start the first job that is due, if there is room for it."""
        job = next((job for job in waiting if job.not_before <= time.monotonic()), None)
        if job is not None and len(running) < self.limit:
            waiting.remove(job)
            running[self._process(job)] = job

    def _process(self, job: SweepJob) -> BaseProcess:
        env = {JOB: str(job.number), SWEEP_DIR: str(self.config.hydra.sweep.dir)}
        if self.limit > 1:
            env["TERM"] = "dumb"  # the progress bars of several would overwrite each other
        work = (command(job, self.config.hydra), env)
        for start in (START, START):
            with suppress(EOFError, ConnectionError):
                return _started(start, work)
            to_stderr("warning: the fork server died while it imported; started again")
            time.sleep(REAP_S)
        return _started("spawn", work)

    def _result(self, job: SweepJob, code: int, pid: int) -> JobReturn:
        """Return what Hydra asks of a job that has ended with this exit code; report one that was killed."""
        sweep_dir = Path(self.config.hydra.sweep.dir)
        attempt_id = attempt_of(sweep_dir, job.number)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if code < 0:
            _bury(job, attempt_id, pid, f"killed by {signal.Signals(-code).name}", self.config)
            if self.config.sweep.fail_fast:
                stop(sweep_dir, code=1)
        if code:
            failure = JobFailed(max(code, 1))
            return JobResult(overrides=job.overrides, status=JobStatus.FAILED, _return_value=failure)
        stored = read_result(Path(self.config.runs_dir, attempt_id)) if attempt_id else {}
        objective = stored.get(self.config.sweep.objective)
        return JobResult(overrides=job.overrides, status=JobStatus.COMPLETED, _return_value=objective)


def command(job: SweepJob, hydra: DictConfig) -> list[str]:
    """Return the command of the sweep with one job's overrides in place of the grid."""
    own = [text for text in hydra.overrides.hydra if not text.startswith(OF_THE_SWEEP)]
    paths = {"main": "--config-path", "command-line": "--config-dir"}
    places = [(paths[s.provider], s.path) for s in hydra.runtime.config_sources if s.provider in paths]
    flags = [f"--config-name={hydra.job.config_name}", *(f"{flag}={path}" for flag, path in places)]
    return [sys.argv[0], *flags, *job.overrides, *own]


def lost_code(job: SweepJob, pid: int, config: DictConfig) -> int:
    """Return the exit code of a job that has ended without its fork server, judged by the files that it has left."""
    sweep_dir = Path(config.hydra.sweep.dir)
    if not any(line.get("job") == job.number for line in jobs(sweep_dir)):
        return BUSY  # it has begun nothing, or waits for another process: start it once more
    attempt_id = attempt_of(sweep_dir, job.number)
    status = read_result(Path(config.runs_dir, attempt_id)).get("status") if attempt_id else "failed"
    if status == "running":
        _bury(job, attempt_id, pid, "ended without an exit code, as its fork server did", config)
    return 0 if status == "done" else 1


def _bury(job: SweepJob, attempt_id: str | None, pid: int, reason: str, config: DictConfig) -> None:
    to_stderr(f"error: {job}: {reason}")
    if attempt_id is not None:
        Run.bury(config.runs_dir, attempt_id, pid, reason)


def _orphan(process: BaseProcess | Orphan, job: SweepJob) -> Orphan | None:
    """Return a job's process that goes on without its fork server, and say so; None if both have ended."""
    if isinstance(process, Orphan):
        return None
    with suppress(ProcessLookupError):
        orphan = Orphan(process.pid)
        if orphan.exitcode is None:
            to_stderr(f"warning: the fork server died; {job} goes on without it")
            return orphan
    return None


def _started(start: str, work: tuple[list[str], Mapping[str, str]]) -> BaseProcess:
    """Return a new process. Raise EOFError or ConnectionError if the fork server dies meanwhile.

    A new server inherits that Ctrl-C is ignored: only this process handles it.
    """
    process = multiprocessing.get_context(start).Process(target=_run, args=work)
    if start == "forkserver":
        from multiprocessing import forkserver  # here, because other systems may lack it

        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            forkserver.ensure_running()
        finally:
            signal.signal(signal.SIGINT, handler)
    process.start()
    return process


def _run(argv: list[str], env: Mapping[str, str]) -> None:
    """Run a job: the command line in this process."""
    from magicdec.cli import main
    from magicdec.scenarios.ranks import follow_parent

    follow_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the server ignores
    os.environ.update(env)
    sys.argv[:] = argv
    sys.exit(main())


def _stop(running: dict[BaseProcess | Orphan, SweepJob]) -> None:
    """Interrupt the jobs that are left, which then mark their runs as interrupted; kill those that do not end."""
    for process in running:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)
    for process in running:
        process.join(GRACE_S)
        process.kill()
