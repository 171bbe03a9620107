"""The default launcher of sweeps: processes that run one job after another.

Jobs that agree in everything but their draft, its cache and the sampling form a group. A group has
a process of its own, in which loaded weights and prefilled prompts are kept from job to job
(planning/shared.py). A job that dies, even by a signal, is one failed run: its process is replaced,
and the sweep goes on. As many processes run at once as there are visible GPUs, each with its own;
without a GPU there is one. A job whose run is being done by another sweep goes to the end of the
queue.

Importing PyTorch and other libraries takes longer than a small job. On Linux a server process
imports them once, and the others are forked from it before it has used a GPU or a thread; on other
systems each imports its own. A server that dies is replaced, and the processes that it has started
go on.
"""

import gc
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated, Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from hydra_plugins.magicdec._groups import SweepJob, Titles, group_of
from magicdec.errors import JobFailed, UserError, to_stderr
from magicdec.inputs.rules import Count, must, parse
from magicdec.processes import LOST, PipedProcess, end_all, wait_for_all
from magicdec.tracking.gpus import visible_gpus
from magicdec.tracking.reader import read_result
from magicdec.tracking.store import Run
from magicdec.tracking.sweep import BUSY, INTERRUPTED, JOB, SWEEP_DIR, attempt_of, jobs, stop

START = "forkserver" if sys.platform == "linux" else "spawn"
POLL_S, RETRY_S, GRACE_S = 0.05, 2.0, 10.0
REAP_S = 0.5  # after its pipes have closed, a process that was killed still exists for a moment
JobsAtOnce = Annotated[Count | None, must("must be at least 1, or null")]
# Overrides of Hydra's that concern the sweep as a whole, not its jobs.
OF_THE_SWEEP = (
    "hydra.mode=",
    "hydra/launcher",
    "hydra.launcher",
    "hydra/sweeper",
    "hydra.sweeper",
    "hydra.sweep.",
)


class JobResult(JobReturn):
    """A job's result. The failure of one has been printed: Hydra's class would print one more line
    about it.
    """

    @property
    def return_value(self) -> Any:
        """Return the sweep's objective. Raise JobFailed for a job that has failed."""
        if self.status == JobStatus.FAILED:
            raise self._return_value
        return self._return_value


class JobWorker:
    """A process that runs the jobs of one group, one after another."""

    def __init__(self, group: Hashable):
        """Start the process. A fork server that dies while it imports is replaced once."""
        self.group: Hashable = group
        self.job: SweepJob | None = None
        for start in (START, START, "spawn"):
            with suppress(EOFError, ConnectionError):
                self.process = PipedProcess(start, _work)
                break
            to_stderr("warning: the fork server died while it imported; started again")
            time.sleep(REAP_S)

    def begin(self, job: SweepJob, argv: list[str], env: Mapping[str, str]) -> None:
        """Run a job."""
        self.job, self.began = job, time.monotonic()
        with suppress(BrokenPipeError):  # the process has died: `ended` finds out
            self.process.pipe.send((argv, env))

    def has_ended(self) -> bool:
        """Return whether the job, or the whole process, has ended."""
        if self.job is None:
            return False
        return self.process.pipe.poll() or self.process.exit_code() not in (None, LOST)

    def code(self) -> int:
        """Return the exit code of the job that has ended; of a process that died, -N for signal N,
        or LOST.
        """
        self.job = None
        try:
            return self.process.pipe.recv()
        except (EOFError, ConnectionError):
            code = self.process.exit_code(GRACE_S)
            return LOST if code is None else code

    def close(self) -> None:
        """Let the process end, which runs no job."""
        self.process.pipe.close()
        wait_for_all([self.process], GRACE_S)
        end_all([self.process], 0.0)


class ProcessLauncher(Launcher):
    """hydra/launcher=magicdec: start processes, wait for them, and report how they have ended."""

    def __init__(self, jobs: int | None = None):
        """Take the keys of conf/hydra/launcher/magicdec.yaml."""
        parse(JobsAtOnce, jobs, "hydra.launcher.jobs")  # type: ignore[arg-type]
        self.limit = jobs or len(visible_gpus()) or 1

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take the sweep's configuration; jobs compose their own."""
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run all jobs. Return their results in order, without jobs that sweep.fail_fast has kept
        from starting.
        """
        from magicdec.scenarios import imports  # here, because every command imports this module

        waiting = deque(
            SweepJob(initial_job_idx + i, list(overrides), turn)
            for turn in self._turns(job_overrides)
            for i, overrides in enumerate(job_overrides)
        )
        self.groups = {
            job.number: group_of(job.number, job.overrides, self.config) for job in waiting
        }
        self.titles = Titles([job.overrides for job in waiting])
        workers: list[JobWorker] = []
        results: dict[int, JobReturn] = {}
        # What the first job needs; a job of another kind imports the rest itself.
        if START == "forkserver":
            multiprocessing.set_forkserver_preload(
                ["magicdec.cli", *imports(self.config.scenario.name, self.config)]
            )
        try:
            while waiting or workers:
                self._start_jobs(waiting, workers)
                wait([worker.process.pipe for worker in workers], POLL_S)
                for worker in [worker for worker in workers if worker.has_ended()]:
                    job, code = worker.job, worker.code()
                    if code == LOST:
                        code = lost_code(job, worker.process.pid, self.config)
                    # What the job has left in its process may be the reason why the next one fails.
                    if code:
                        workers.remove(worker)
                        worker.close()
                    if code == BUSY:
                        job.not_before = time.monotonic() + RETRY_S
                        self.titles.begun -= 1
                        waiting.append(job)
                        continue
                    if code:
                        waiting = deque(other for other in waiting if other.number != job.number)
                    results[job.number] = self._result(job, code, worker.process.pid)
                    self.titles.seconds.append(time.monotonic() - worker.began)
                    if code and self.config.sweep.fail_fast and waiting:
                        to_stderr(f"sweep.fail_fast: {len(waiting)} jobs are not started")
                        waiting.clear()
        finally:
            _stop(workers)
        return [results[number] for number in sorted(results)]

    def _turns(self, job_overrides: Sequence[Sequence[str]]) -> Sequence[int]:
        """Return the turns of each job: as many as repeats where jobs that share a prefill take
        turns. Raise UserError where jobs have different numbers of them.
        """
        if not self.config.sweep.get("turns") or self.config.sweep.dry_run:
            return (0,)
        key = "scenario.repeats"
        if len({text for each in job_overrides for text in each if text.startswith(f"{key}=")}) > 1:
            raise UserError(
                f"sweep.turns=true: every job takes {key} turns, which cannot be swept; set one"
                " number, or sweep.turns=false"
            )
        repeats = self.config.scenario.get("repeats")
        return range(1, repeats + 1) if isinstance(repeats, int) else (0,)

    def _of_turn(self, turn: int) -> list[str]:
        """Return the overrides of a turn: so many repeats in all; trackers hear of the last one,
        which is complete.
        """
        if not turn:
            return []
        is_last = turn == self.config.scenario.repeats
        return [f"scenario.repeats={turn}", *([] if is_last else ["tracker=[]"])]

    def _start_jobs(self, waiting: deque[SweepJob], workers: list[JobWorker]) -> None:
        """Give every process its next job, and start processes while there is room for them.

        A new process begins a group that no other works on; the last groups are divided.
        """
        for worker in [worker for worker in workers if worker.job is None]:
            if job := self._due(waiting, lambda group: group == worker.group):  # noqa: B023 - called at once
                self._begin(worker, job)
            elif not any(self.groups[job.number] == worker.group for job in waiting):
                workers.remove(worker)
                worker.close()
        while len(workers) < self.limit:
            taken = {worker.group for worker in workers}
            job = self._due(waiting, lambda group: group not in taken) or self._due(  # noqa: B023
                waiting, lambda _: True
            )  # noqa: B023, RUF100
            if job is None:
                return
            workers.append(JobWorker(self.groups[job.number]))
            self._begin(workers[-1], job)

    def _due(self, waiting: deque[SweepJob], suits: Callable[[Hashable], bool]) -> SweepJob | None:
        """Take the first job of a suitable group that need not wait any longer."""
        now = time.monotonic()
        job = next(
            (job for job in waiting if job.not_before <= now and suits(self.groups[job.number])),
            None,
        )
        if job is not None:
            waiting.remove(job)
        return job

    def _begin(self, worker: JobWorker, job: SweepJob) -> None:
        env = {JOB: str(job.number), SWEEP_DIR: str(self.config.hydra.sweep.dir)}
        to_stderr(self.titles(job, self.limit))
        if self.limit > 1:
            env["TERM"] = "dumb"  # the progress bars of several would overwrite each other
        worker.begin(job, [*command(job, self.config.hydra), *self._of_turn(job.turn)], env)

    def _result(self, job: SweepJob, code: int, pid: int) -> JobReturn:
        """Return what Hydra asks of a job that has ended with this exit code; report one that was
        killed.
        """
        sweep_dir = Path(self.config.hydra.sweep.dir)
        attempt_id = attempt_of(sweep_dir, job.number)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if code < 0:
            _mark_crashed(
                job, attempt_id, pid, f"killed by {signal.Signals(-code).name}", self.config
            )
            if self.config.sweep.fail_fast:
                stop(sweep_dir, code=1)
        if code:
            failure = JobFailed(max(code, 1))
            return JobResult(
                overrides=job.overrides, status=JobStatus.FAILED, _return_value=failure
            )
        stored = read_result(Path(self.config.runs_dir, attempt_id)) if attempt_id else {}
        objective = stored.get(self.config.sweep.objective)
        return JobResult(
            overrides=job.overrides, status=JobStatus.COMPLETED, _return_value=objective
        )


def command(job: SweepJob, hydra: DictConfig) -> list[str]:
    """Return the command of the sweep with one job's overrides in place of the grid."""
    of_hydra = [text for text in hydra.overrides.hydra if not text.startswith(OF_THE_SWEEP)]
    paths = {"main": "--config-path", "command-line": "--config-dir"}
    places = [
        (paths[s.provider], s.path) for s in hydra.runtime.config_sources if s.provider in paths
    ]
    flags = [f"--config-name={hydra.job.config_name}", *(f"{flag}={path}" for flag, path in places)]
    return [sys.argv[0], *flags, *job.overrides, *of_hydra]


def lost_code(job: SweepJob, pid: int, config: DictConfig) -> int:
    """Return the exit code of a job that has ended without its fork server, judged by the files
    that it has left.
    """
    sweep_dir = Path(config.hydra.sweep.dir)
    if not any(line.get("job") == job.number for line in jobs(sweep_dir)):
        return BUSY  # it has begun nothing, or waits for another process: start it once more
    attempt_id = attempt_of(sweep_dir, job.number)
    status = (
        read_result(Path(config.runs_dir, attempt_id)).get("status") if attempt_id else "failed"
    )
    if status == "running":
        _mark_crashed(
            job, attempt_id, pid, "ended without an exit code, as its fork server did", config
        )
    return 0 if status == "done" else 1


def _mark_crashed(
    job: SweepJob, attempt_id: str | None, pid: int, reason: str, config: DictConfig
) -> None:
    to_stderr(f"error: {job}: {reason}")
    if attempt_id is not None:
        Run.mark_crashed(config.runs_dir, attempt_id, pid, reason)


def _work(pipe: Connection) -> None:
    """Run jobs, each a command line, until there are no more or one fails; answer each with its
    exit code.
    """
    from magicdec.cli import main

    gc.freeze()  # what was imported stays: collecting between jobs need not look at it
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the server ignores
    code = 0
    # At the pipe's end, or while there is no job.
    with suppress(EOFError, ConnectionError, KeyboardInterrupt):
        while not code:
            sys.argv[:], env = pipe.recv()
            os.environ.update(env)
            code = main()
            pipe.send(code)


def _stop(workers: list[JobWorker]) -> None:
    """Interrupt the jobs that are left, which then mark their runs as interrupted; kill those that
    do not end.
    """
    for worker in workers:
        with suppress(ProcessLookupError):
            os.kill(worker.process.pid, signal.SIGINT)
    for worker in workers:
        worker.close()
