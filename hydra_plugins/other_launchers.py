"""Hydra's launchers for other processes and machines: joblib, Submitit (Slurm, and here) and Ray.

Here they are as in Hydra, but that each job gets a process of its own where they run it: what kills a job leaves the
worker alive, and the job can take GPUs of its own. A dry run queues nothing.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from hydra_plugins.basic_launcher import list_jobs
from hydra_plugins.process_launcher import RETRY_S, SweepJob, command, environment, outcome
from magicdec.errors import JobFailed, to_stderr
from magicdec.tracking.gpus import VISIBLE
from magicdec.tracking.sweep import BUSY, FOLLOWS, refuse_if_stopped


@dataclass
class InOwnProcess:
    """What a worker calls in place of the task."""

    script: str  # that was started for the sweep
    gpus: str | None  # CUDA_VISIBLE_DEVICES there: for workers to which the launcher gives no GPUs, and hides them
    gives_gpus: bool

    def __call__(self, config: DictConfig) -> Any:
        """Start the job, wait for it, and return the sweep's objective; raises JobFailed."""
        hydra = HydraConfig.get()
        job = SweepJob(hydra.job.num, list(hydra.overrides.task))
        if config.sweep.fail_fast:
            refuse_if_stopped(Path(hydra.sweep.dir), job.number)
        env = {**os.environ, **environment(job, hydra), FOLLOWS: "stdin", "TERM": "dumb"}
        if not self.gives_gpus:
            env.pop(VISIBLE, None)
            env |= {VISIBLE: self.gpus} if self.gpus is not None else {}
        while True:
            typed = [sys.executable, *command(job, hydra, self.script)]
            with subprocess.Popen(typed, env=env, stdin=subprocess.PIPE) as process:
                code = process.wait()
            if code != BUSY:
                return outcome(job, code, process.pid, config, hydra)
            time.sleep(RETRY_S)


class Elsewhere:
    """What all have in common, ahead of Hydra's own class."""

    config: Any
    hydra_context: Any
    typed: TaskFunction

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Hydra's way to hand over what a launcher needs."""
        self.typed = task_function
        own: Any = InOwnProcess(str(Path(sys.argv[0]).resolve()), os.environ.get(VISIBLE), self.gives_gpus())
        super().setup(hydra_context=hydra_context, task_function=own, config=config)  # type: ignore[misc]

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all jobs."""
        if self.config.sweep.dry_run:
            return list_jobs(self.hydra_context, self.typed, self.config, job_overrides, initial_job_idx)
        return super().launch(job_overrides, initial_job_idx)  # type: ignore[misc]

    def gives_gpus(self) -> bool:
        """Whether workers see the GPUs that they are to use, rather than some, or none."""
        return False


class Patient(Elsewhere):
    """Submitit's give up at the first worker that ends without a result: cancelled, out of time."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Queue all jobs, and wait for all of them."""
        import submitit  # here, because Hydra imports this module to see which launchers there are

        results = submitit.Job.results
        submitit.Job.results = lambda job: _results(job, results)
        try:
            return super().launch(job_overrides, initial_job_idx)
        finally:
            submitit.Job.results = results


def _results(job: Any, results: Callable) -> list[JobReturn]:
    """Submitit's, and for a job that left none the failure that it is."""
    from submitit.core.utils import FailedJobError, UncompletedJobError

    try:
        return results(job)
    except (FailedJobError, UncompletedJobError):
        overrides, _, number, *_ = job.submission().args
        text = f"job {number} ({' '.join(overrides)}): ended without a result ({job.state}); see {job.paths.stderr}"
        to_stderr(f"error: {text}")
        failed = JobReturn(overrides=overrides, status=JobStatus.FAILED)
        failed.return_value = JobFailed(1)
        return [failed]


nodes: dict[str, Any] = {}  # of the launchers whose extras are installed

if find_spec("hydra_plugins.hydra_joblib_launcher"):
    from hydra_plugins.hydra_joblib_launcher import config as joblib_config
    from hydra_plugins.hydra_joblib_launcher import joblib_launcher

    class JoblibLauncher(Elsewhere, joblib_launcher.JoblibLauncher):
        """hydra/launcher=joblib."""

    @dataclass
    class JoblibConf(joblib_config.JobLibLauncherConf):
        """As Hydra's."""

        _target_: str = "hydra_plugins.other_launchers.JoblibLauncher"

    nodes["joblib"] = JoblibConf

if find_spec("hydra_plugins.hydra_submitit_launcher"):
    from hydra_plugins.hydra_submitit_launcher import config, submitit_launcher

    class SlurmLauncher(Patient, submitit_launcher.SlurmLauncher):
        """hydra/launcher=submitit_slurm."""

        def gives_gpus(self) -> bool:
            """Slurm does."""
            return True

    class LocalLauncher(Patient, submitit_launcher.LocalLauncher):
        """hydra/launcher=submitit_local."""

    @dataclass
    class SlurmQueueConf(config.SlurmQueueConf):
        """As Hydra's."""

        _target_: str = "hydra_plugins.other_launchers.SlurmLauncher"

    @dataclass
    class LocalQueueConf(config.LocalQueueConf):
        """As Hydra's."""

        _target_: str = "hydra_plugins.other_launchers.LocalLauncher"

    nodes |= {"submitit_slurm": SlurmQueueConf, "submitit_local": LocalQueueConf}

if find_spec("hydra_plugins.hydra_ray_launcher"):
    from hydra_plugins.hydra_ray_launcher import _config as ray_config
    from hydra_plugins.hydra_ray_launcher import ray_launcher

    class RayLauncher(Elsewhere, ray_launcher.RayLauncher):
        """hydra/launcher=ray."""

        def gives_gpus(self) -> bool:
            """Ray does, if it is asked to."""
            return bool(self.ray_cfg.remote.get("num_gpus"))

    @dataclass
    class RayConf(ray_config.RayLauncherConf):
        """As Hydra's."""

        _target_: str = "hydra_plugins.other_launchers.RayLauncher"

    nodes["ray"] = RayConf


class InPlaceOfHydras(SearchPathPlugin):
    """Registers them when Hydra asks for search paths: by then, its own are registered under the same names."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Leave it as it is."""
        for name, node in nodes.items():
            ConfigStore.instance().store(group="hydra/launcher", name=name, node=node)
