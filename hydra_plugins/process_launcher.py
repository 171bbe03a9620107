"""Hydra's launcher for sweeps: every job in its own process, so that neither memory, caches nor crashes leak.

A job that dies, even by a signal, is one failed run, and the sweep goes on. Jobs are spread over the visible GPUs;
without one, they run one after another. What another sweep is running is left to the end of the queue.
"""

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from magicdec.errors import JobFailed
from magicdec.tracking.store import Run
from magicdec.tracking.sweep import jobs

BUSY, INTERRUPTED = 75, 130  # exit codes of launch.py
POLL_S, RETRY_S, GRACE_S = 0.05, 2.0, 10.0
# What Hydra was told about the sweep as a whole.
OF_THE_SWEEP = ("hydra.mode=", "hydra/launcher", "hydra.launcher", "hydra/sweeper", "hydra.sweeper", "hydra.sweep.")


@dataclass
class ProcessLauncherConf:
    """hydra/launcher=process. `jobs` at once: null is one per visible GPU, and one where there is none."""

    _target_: str = "hydra_plugins.process_launcher.ProcessLauncher"
    jobs: int | None = None


ConfigStore.instance().store(group="hydra/launcher", name="process", node=ProcessLauncherConf)


@dataclass
class Job:
    """One of the sweep's."""

    number: int
    overrides: list[str]
    places: list[str | None] = field(default_factory=list)  # the GPUs that it has; None stands for the CPU
    not_before: float = 0.0


class ProcessLauncher(Launcher):
    """Start processes, watch them, and tell what became of them."""

    def __init__(self, jobs: int | None = None):
        gpus: list[str | None] = [*visible_gpus()]
        count = jobs or len(gpus) or 1
        self.free = [gpus[i % len(gpus)] if gpus else None for i in range(count)]
        self.count = count

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Hydra's way to hand over what a launcher needs."""
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all jobs; their results in the order in which they ended."""
        if self.config.sweep.dry_run:
            logging.getLogger(BasicLauncher.__module__).setLevel(logging.WARNING)  # the list says it all
            basic = BasicLauncher()
            basic.setup(hydra_context=self.context, task_function=self.task, config=self.config)
            return basic.launch(job_overrides, initial_job_idx)
        waiting = deque(Job(initial_job_idx + i, list(overrides)) for i, overrides in enumerate(job_overrides))
        running: dict[subprocess.Popen, Job] = {}
        results: list[JobReturn] = []
        try:
            while waiting or running:
                self._start(waiting, running)
                for process in [process for process in running if process.poll() is not None]:
                    job = running.pop(process)
                    self.free += job.places
                    if process.returncode == BUSY:
                        job.not_before = time.monotonic() + RETRY_S
                        waiting.append(job)
                    else:
                        results.append(self._result(job, process))
                        if process.returncode and self.config.sweep.fail_fast and waiting:
                            print(f"sweep.fail_fast: {len(waiting)} jobs are not started", file=sys.stderr)
                            waiting.clear()
                time.sleep(POLL_S)
        finally:
            _stop(running)
        return results

    def _start(self, waiting: deque[Job], running: dict[subprocess.Popen, Job]) -> None:
        """Start the first job whose time has come, if there is a place for it."""
        ready = next((job for job in waiting if job.not_before <= time.monotonic()), None)
        if ready is None or not self.free:
            return
        hardware = self.context.config_loader.load_sweep_config(self.config, ready.overrides).hardware
        # One on the CPU of a GPU machine has it to itself: others would disturb its times.
        wanted = self.count if hardware.device == "cpu" and self.free[0] is not None else hardware.tensor_parallel
        wanted = min(wanted, self.count) if self.free[0] is not None else 1
        if len(self.free) < wanted:
            return
        waiting.remove(ready)
        ready.places, self.free = self.free[:wanted], self.free[wanted:]
        running[self._process(ready)] = ready

    def _process(self, job: Job) -> subprocess.Popen:
        hydra = self.config.hydra
        own = [text for text in hydra.overrides.hydra if not text.startswith(OF_THE_SWEEP)]
        folders = [s.path for s in hydra.runtime.config_sources if s.provider == "command-line"]
        flags = [f"--config-name={hydra.job.config_name}", *(f"--config-dir={folder}" for folder in folders)]
        env = os.environ | {"MAGICDEC_JOB": str(job.number), "MAGICDEC_SWEEP_DIR": str(hydra.sweep.dir)}
        if gpus := [place for place in job.places if place is not None]:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        if self.count > 1:
            env["TERM"] = "dumb"  # the progress bars of several would overwrite each other
        program = str(Path(sys.argv[0]).resolve())  # launch.py, as it was started for the sweep
        command = [sys.executable, program, *flags, *job.overrides, *own]
        return subprocess.Popen(command, env=env, stdin=subprocess.PIPE)  # open as long as we live

    def _result(self, job: Job, process: subprocess.Popen) -> JobReturn:
        result = JobReturn(overrides=job.overrides, status=JobStatus.COMPLETED)
        code = process.returncode
        if code < 0:
            reason = f"killed by {signal.Signals(-code).name}"
            print(f"error: job {job.number} ({' '.join(job.overrides)}): {reason}", file=sys.stderr)
            for line in jobs(Path(self.config.hydra.sweep.dir)):
                if line.get("job") == job.number:
                    Run.bury(self.config.runs_dir, line["id"], process.pid, reason)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if code:
            result.status = JobStatus.FAILED
            result.return_value = JobFailed(max(code, 1))
        return result


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


def _stop(running: dict[subprocess.Popen, Job]) -> None:
    """Let the jobs that are left mark themselves as interrupted, and end those that do not."""
    for process in running:
        process.send_signal(signal.SIGINT)
    for process in running:
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
