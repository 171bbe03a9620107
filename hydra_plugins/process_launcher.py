"""Hydra's launcher for sweeps: every job in its own process, so that neither memory, caches nor crashes leak.

A job that dies, even by a signal, is one failed run, and the sweep goes on. There are as many at once as visible GPUs,
each of which takes its own, or one after another where there are none. What another sweep is running is left to the end
of the queue.

Importing PyTorch and its company takes longer than a small job does. On Linux a server process imports them once, and
every job is forked from it, before anything has touched a GPU or started a thread; elsewhere each job imports its own.
A server that dies is replaced, and its running job goes on: what became of it is then read from the store.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import runpy
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

from hydra_plugins.basic_launcher import Composer, list_jobs
from magicdec.errors import JobFailed, to_stderr
from magicdec.scenarios import imports
from magicdec.scenarios.ranks import follow_parent
from magicdec.tracking.gpus import visible_gpus
from magicdec.tracking.reader import read_result
from magicdec.tracking.store import Run
from magicdec.tracking.sweep import BUSY, INTERRUPTED, JOB, SWEEP_DIR, attempt_of, jobs, stop

START = "forkserver" if sys.platform == "linux" else "spawn"
POLL_S, RETRY_S, GRACE_S = 0.05, 2.0, 10.0
REAP_S = 0.5  # after its pipes have closed, a process that was killed still exists for a moment
LOST = 255  # what multiprocessing takes for the exit code of a job whose fork server has died
# What Hydra was told about the sweep as a whole.
OF_THE_SWEEP = ("hydra.mode=", "hydra/launcher", "hydra.launcher", "hydra/sweeper", "hydra.sweeper", "hydra.sweep.")


@dataclass
class ProcessLauncherConf:
    """hydra/launcher=process. `jobs` at once: null is as many as there are GPUs, and one where there is none."""

    _target_: str = "hydra_plugins.process_launcher.ProcessLauncher"
    jobs: int | None = None


ConfigStore.instance().store(group="hydra/launcher", name="process", node=ProcessLauncherConf)


@dataclass
class SweepJob:
    """A job of the sweep, until its process has ended."""

    number: int
    overrides: list[str]
    not_before: float = 0.0

    def __str__(self) -> str:
        return f"job {self.number} ({' '.join(self.overrides)})"


class Orphan:
    """A job's process whose fork server has died: it goes on, but nobody will know its exit code."""

    def __init__(self, pid: int):
        """Raise ProcessLookupError where the process has ended, too."""
        self.pid, self.sentinel = pid, os.pidfd_open(pid)

    @property
    def exitcode(self) -> int | None:
        """None while it is running."""
        return LOST if wait([self.sentinel], timeout=0) else None

    def join(self, timeout: float) -> None:
        """Wait for its end."""
        wait([self.sentinel], timeout)

    def kill(self) -> None:
        """End it."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class ProcessLauncher(Launcher):
    """Start processes, watch them, and report what became of them."""

    def __init__(self, jobs: int | None = None):
        self.limit = jobs or len(visible_gpus()) or 1

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Hydra's way to hand over what a launcher needs."""
        hydra_context.config_loader = Composer(hydra_context.config_loader)  # type: ignore[assignment]
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all jobs; their results in their order, without those that sweep.fail_fast has kept from starting."""
        if self.config.sweep.dry_run:
            return list_jobs(self.context, self.task, self.config, job_overrides, initial_job_idx)
        waiting = deque(SweepJob(initial_job_idx + i, list(overrides)) for i, overrides in enumerate(job_overrides))
        running: dict[BaseProcess | Orphan, SweepJob] = {}
        results: dict[int, JobReturn] = {}
        if START == "forkserver":  # for the first job: others import what they lack
            multiprocessing.set_forkserver_preload(["launch", *imports(self.config.scenario.name)])
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
                        code = lost_code(job, process.pid, self.config, self.config.hydra)
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
        """Start the first job whose time has come, if there is room for it."""
        job = next((job for job in waiting if job.not_before <= time.monotonic()), None)
        if job is not None and len(running) < self.limit:
            waiting.remove(job)
            running[self._process(job)] = job

    def _process(self, job: SweepJob) -> BaseProcess:
        env = environment(job, self.config.hydra)
        if self.limit > 1:
            env["TERM"] = "dumb"  # the progress bars of several would overwrite each other
        work = (command(job, self.config.hydra, sys.argv[0]), env)
        for start in (START, START):
            with suppress(EOFError, ConnectionError):
                return _started(start, work)
            to_stderr("warning: the fork server died while it imported; started again")
            time.sleep(REAP_S)
        return _started("spawn", work)

    def _result(self, job: SweepJob, code: int, pid: int) -> JobReturn:
        """Return what Hydra wants to know."""
        result = JobReturn(overrides=job.overrides, status=JobStatus.COMPLETED)
        try:
            result.return_value = outcome(job, code, pid, self.config, self.config.hydra)
        except JobFailed as failure:
            result.return_value, result.status = failure, JobStatus.FAILED
        return result


def command(job: SweepJob, hydra: DictConfig, script: str) -> list[str]:
    """The script as it was started for the sweep, with one job's overrides."""
    own = [text for text in hydra.overrides.hydra if not text.startswith(OF_THE_SWEEP)]
    paths = {"main": "--config-path", "command-line": "--config-dir"}
    places = [(paths[s.provider], s.path) for s in hydra.runtime.config_sources if s.provider in paths]
    flags = [f"--config-name={hydra.job.config_name}", *(f"{flag}={path}" for flag, path in places)]
    return [str(Path(script).resolve()), *flags, *job.overrides, *own]


def environment(job: SweepJob, hydra: DictConfig) -> dict[str, str]:
    """What tells that command which job it is."""
    return {JOB: str(job.number), SWEEP_DIR: str(hydra.sweep.dir)}


def outcome(job: SweepJob, code: int, pid: int, config: DictConfig, hydra: DictConfig) -> Any:
    """Return the sweep's objective, as found by a job whose process ended with this exit code. Raise JobFailed.

    Report what a job that was killed can no longer report.
    """
    sweep_dir = Path(hydra.sweep.dir)
    attempt_id = attempt_of(sweep_dir, job.number)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code < 0:
        reason = f"killed by {signal.Signals(-code).name}"
        _bury(job, attempt_id, pid, reason, config)
        if config.sweep.fail_fast:
            stop(sweep_dir, code=1)
    if code:
        raise JobFailed(max(code, 1))
    stored: dict[str, Any] = read_result(Path(config.runs_dir, attempt_id)) if attempt_id is not None else {}
    return stored.get(config.sweep.objective)


def lost_code(job: SweepJob, pid: int, config: DictConfig, hydra: DictConfig) -> int:
    """Return the exit code of a job that has ended without its fork server, judged by what it has left."""
    sweep_dir = Path(hydra.sweep.dir)
    if not any(line.get("job") == job.number for line in jobs(sweep_dir)):
        return BUSY  # it has begun nothing, or waits for another process: start it once more
    attempt_id = attempt_of(sweep_dir, job.number)
    status = read_result(Path(config.runs_dir, attempt_id)).get("status") if attempt_id else "failed"
    if status == "running":
        _bury(job, attempt_id, pid, "ended without a word, as its fork server did", config)
    return 0 if status == "done" else 1


def _bury(job: SweepJob, attempt_id: str | None, pid: int, reason: str, config: DictConfig) -> None:
    to_stderr(f"error: {job}: {reason}")
    if attempt_id is not None:
        Run.bury(config.runs_dir, attempt_id, pid, reason)


def _orphan(process: BaseProcess | Orphan, job: SweepJob) -> Orphan | None:
    """Return a job's process that goes on without its fork server, and say so; None where both have ended."""
    if isinstance(process, Orphan):
        return None
    with suppress(ProcessLookupError):
        orphan = Orphan(process.pid)
        if orphan.exitcode is None:
            to_stderr(f"warning: the fork server died; {job} goes on without it")
            return orphan
    return None


def _started(start: str, work: tuple) -> BaseProcess:
    """Return a new process. Raise EOFError or ConnectionError where the fork server dies meanwhile.

    A Ctrl-C while a server starts is for this process, which takes the server along.
    """
    process = multiprocessing.get_context(start).Process(target=_run, args=work)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if start == "forkserver":
            multiprocessing.forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, handler)
    process.start()
    return process


def _run(argv: list[str], env: Mapping[str, str]) -> None:
    """The life of a job: launch.py as if it were typed."""
    follow_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the server ignores
    os.environ.update(env)
    sys.argv[:] = argv
    runpy.run_path(argv[0], run_name="__main__")


def _stop(running: dict[BaseProcess | Orphan, SweepJob]) -> None:
    """Let the jobs that are left mark themselves as interrupted, and end those that do not."""
    for process in running:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)
    for process in running:
        process.join(GRACE_S)
        process.kill()
