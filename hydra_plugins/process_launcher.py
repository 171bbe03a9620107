"""Hydra's launcher for sweeps: every job in its own process, so that neither memory, caches nor crashes leak.

A job that dies, even by a signal, is one failed run, and the sweep goes on. Jobs are spread over the visible GPUs;
without one, they run one after another. What another sweep is running is left to the end of the queue.

Importing PyTorch and its company takes longer than a small job does. On Linux a server process imports them once, and
every job is forked from it, before anything has touched a GPU or started a thread; elsewhere each job imports its own.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
from magicdec.errors import JobFailed
from magicdec.scenarios import imports
from magicdec.scenarios.ranks import follow_parent
from magicdec.tracking.reader import read_result
from magicdec.tracking.store import Run
from magicdec.tracking.sweep import BUSY, INTERRUPTED, JOB, SWEEP_DIR, run_of

START = "forkserver" if sys.platform == "linux" else "spawn"
POLL_S, RETRY_S, GRACE_S = 0.05, 2.0, 10.0
# What Hydra was told about the sweep as a whole.
OF_THE_SWEEP = ("hydra.mode=", "hydra/launcher", "hydra.launcher", "hydra/sweeper", "hydra.sweeper", "hydra.sweep.")


@dataclass
class ProcessLauncherConf:
    """hydra/launcher=process. `jobs` at once: null is as many as the GPUs allow, and one where there is none."""

    _target_: str = "hydra_plugins.process_launcher.ProcessLauncher"
    jobs: int | None = None


ConfigStore.instance().store(group="hydra/launcher", name="process", node=ProcessLauncherConf)


@dataclass
class Job:
    """One of the sweep's."""

    number: int
    overrides: list[str]
    gpus: list[str] = field(default_factory=list)  # those that it has, while it runs
    not_before: float = 0.0

    def __str__(self) -> str:
        return f"job {self.number} ({' '.join(self.overrides)})"


class ProcessLauncher(Launcher):
    """Start processes, watch them, and tell what became of them."""

    def __init__(self, jobs: int | None = None):
        self.gpus = visible_gpus()
        self.free = list(self.gpus)
        self.limit = jobs or len(self.gpus) or 1

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Hydra's way to hand over what a launcher needs."""
        hydra_context.config_loader = Composer(hydra_context.config_loader)  # type: ignore[assignment]
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all jobs; their results in their order, without those that sweep.fail_fast has kept from starting."""
        if self.config.sweep.dry_run:
            return list_jobs(self.context, self.task, self.config, job_overrides, initial_job_idx)
        waiting = deque(Job(initial_job_idx + i, list(overrides)) for i, overrides in enumerate(job_overrides))
        running: dict[BaseProcess, Job] = {}
        results: dict[int, JobReturn] = {}
        _start_server(["launch", *imports(self.config.scenario.name)])  # the first job's: others import what they lack
        try:
            while waiting or running:
                self._start_next(waiting, running)
                wait([process.sentinel for process in running], POLL_S)
                for process in [process for process in running if process.exitcode is not None]:
                    job = running.pop(process)
                    self.free += job.gpus
                    if process.exitcode == BUSY:
                        job.not_before = time.monotonic() + RETRY_S
                        waiting.append(job)
                        continue
                    results[job.number] = self._result(job, process)
                    if process.exitcode and self.config.sweep.fail_fast and waiting:
                        print(f"sweep.fail_fast: {len(waiting)} jobs are not started", file=sys.stderr)
                        waiting.clear()
        finally:
            _stop(running)
        return [results[number] for number in sorted(results)]

    def _start_next(self, waiting: deque[Job], running: dict[BaseProcess, Job]) -> None:
        """Start the first job whose time has come, if there is room for it."""
        job = next((job for job in waiting if job.not_before <= time.monotonic()), None)
        if job is None or len(running) >= self.limit:
            return
        wanted = self._gpus_wanted(job) if self.gpus else 0
        if len(self.free) >= wanted:
            waiting.remove(job)
            job.gpus, self.free = self.free[:wanted], self.free[wanted:]
            running[self._process(job)] = job

    def _gpus_wanted(self, job: Job) -> int:
        """A run on the CPU of a GPU machine has it to itself, too: others would disturb its times."""
        hardware = self.context.config_loader.load_sweep_config(self.config, job.overrides).hardware
        return len(self.gpus) if hardware.device == "cpu" else min(hardware.tensor_parallel, len(self.gpus))

    def _process(self, job: Job) -> BaseProcess:
        """launch.py, as it was started for the sweep, with one job's overrides."""
        hydra = self.config.hydra
        own = [text for text in hydra.overrides.hydra if not text.startswith(OF_THE_SWEEP)]
        paths = {"main": "--config-path", "command-line": "--config-dir"}
        places = [(paths[s.provider], s.path) for s in hydra.runtime.config_sources if s.provider in paths]
        flags = [f"--config-name={hydra.job.config_name}", *(f"{flag}={path}" for flag, path in places)]
        env = {JOB: str(job.number), SWEEP_DIR: str(hydra.sweep.dir)}
        if job.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(job.gpus)
        if self.limit > 1:
            env["TERM"] = "dumb"  # the progress bars of several would overwrite each other
        command = [str(Path(sys.argv[0]).resolve()), *flags, *job.overrides, *own]
        process = multiprocessing.get_context(START).Process(target=_run, args=(command, env))
        process.start()
        return process

    def _result(self, job: Job, process: BaseProcess) -> JobReturn:
        """What Hydra wants to know; on the way, say what a job that was killed can no longer say."""
        code, runs_dir = process.exitcode, self.config.runs_dir
        run_id = run_of(Path(self.config.hydra.sweep.dir), job.number)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if code < 0:
            reason = f"killed by {signal.Signals(-code).name}"
            print(f"error: {job}: {reason}", file=sys.stderr)
            if run_id is not None:
                Run.bury(runs_dir, run_id, process.pid, reason)
        stored: dict[str, Any] = read_result(Path(runs_dir, run_id)) if run_id is not None else {}
        result = JobReturn(overrides=job.overrides, status=JobStatus.FAILED if code else JobStatus.COMPLETED)
        result.return_value = JobFailed(max(code, 1)) if code else stored.get(self.config.sweep.objective)
        return result


def _start_server(modules: list[str]) -> None:
    """What imports once for all jobs. A Ctrl-C meanwhile is for this process, which takes the server along."""
    if START == "forkserver":
        multiprocessing.set_forkserver_preload(modules)
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        multiprocessing.forkserver.ensure_running()
        signal.signal(signal.SIGINT, handler)


def _run(command: list[str], env: Mapping[str, str]) -> None:
    """The life of a job: launch.py as if it were typed."""
    follow_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the server ignores
    os.environ.update(env)
    sys.argv[:] = command
    runpy.run_path(command[0], run_name="__main__")


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them; asked of the driver's own tool, so that no CUDA starts in this process."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip() not in ("", "-1")]
    if not shutil.which("nvidia-smi"):
        return []
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0
    return [str(index) for index in range(count)]


def _stop(running: dict[BaseProcess, Job]) -> None:
    """Let the jobs that are left mark themselves as interrupted, and end those that do not."""
    for process in running:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)
    for process in running:
        process.join(GRACE_S)
        process.kill()
