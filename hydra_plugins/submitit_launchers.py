"""Hydra's Submitit launchers, for Slurm and for this machine, whose sweeps go on when a job dies.

Theirs raise for the first job that ends without a result (killed, cancelled, out of time), and ask after no other. And
a dry run of theirs would queue its lines.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.search_path_plugin import SearchPathPlugin

from hydra_plugins.basic_launcher import list_jobs
from magicdec.errors import JobFailed


class Patient:
    """What both have in common, ahead of Hydra's own class."""

    config: Any
    hydra_context: Any
    task_function: Any

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Queue all jobs, and wait for all of them."""
        if self.config.sweep.dry_run:
            return list_jobs(self.hydra_context, self.task_function, self.config, job_overrides, initial_job_idx)
        import submitit  # here, because Hydra imports this module to see which launchers there are

        results = submitit.Job.results
        submitit.Job.results = lambda job: _results(job, results)
        try:
            return super().launch(job_overrides, initial_job_idx)  # type: ignore[misc]
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
        print(f"error: {text}", file=sys.stderr)
        failed = JobReturn(overrides=overrides, status=JobStatus.FAILED)
        failed.return_value = JobFailed(1)
        return [failed]


if find_spec("hydra_plugins.hydra_submitit_launcher"):  # the extra `submitit`
    from hydra_plugins.hydra_submitit_launcher import config, submitit_launcher

    class SlurmLauncher(Patient, submitit_launcher.SlurmLauncher):
        """hydra/launcher=submitit_slurm."""

    class LocalLauncher(Patient, submitit_launcher.LocalLauncher):
        """hydra/launcher=submitit_local."""

    @dataclass
    class SlurmQueueConf(config.SlurmQueueConf):
        """As Hydra's."""

        _target_: str = "hydra_plugins.submitit_launchers.SlurmLauncher"

    @dataclass
    class LocalQueueConf(config.LocalQueueConf):
        """As Hydra's."""

        _target_: str = "hydra_plugins.submitit_launchers.LocalLauncher"

    class InPlaceOfHydras(SearchPathPlugin):
        """Registers them when Hydra asks for search paths: by then, its own are registered under the same names."""

        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            """Leave it as it is."""
            for name, node in (("submitit_slurm", SlurmQueueConf), ("submitit_local", LocalQueueConf)):
                ConfigStore.instance().store(group="hydra/launcher", name=name, node=node)
