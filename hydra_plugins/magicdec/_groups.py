"""Groups of the jobs of a sweep that share weights and prefilled prompts, and how other launchers
run them.

The default launcher gives a group a process. Joblib, Ray and submitit start tasks elsewhere: here,
a task is a whole group, whose jobs run one after another in the task's process.
"""

import math
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, run_job
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from magicdec.errors import to_stderr
from magicdec.tracking.store import counted

# Overrides of what each job builds for itself from what its group keeps.
REBUILT = r"(\+|~)*(draft|target@draft\.model|cache|sampling|scenario\.(repeats|profile_repeats)|wandb|sweep)\b"  # noqa: E501


@dataclass
class SweepJob:
    """A job of the sweep, until its process has ended."""

    number: int
    overrides: Sequence[str]
    turn: int = 0  # the repeat to measure; 0: all
    not_before: float = -math.inf

    def __str__(self) -> str:
        return f"job {self.number} ({' '.join(self.overrides)})"


class Titles:
    """The line that announces each job: its number in the order of the sweep, what differs, and the
    minutes left.
    """

    def __init__(self, overrides: Sequence[Sequence[str]]):
        self.total, self.begun = len(overrides), 0
        self.common = set(overrides[0]).intersection(*overrides) if overrides else set()
        self.seconds: list[float] = []  # of the jobs that have ended

    def __call__(self, job: SweepJob, at_once: int) -> str:
        """Return the line of the next job."""
        left = self.total - self.begun
        self.begun += 1
        typed = " ".join(text for text in job.overrides if text not in self.common)
        typed = f"repeat {job.turn}: {typed}" if job.turn else typed
        minutes = left / at_once * fmean(self.seconds) / 60 if self.seconds else 0
        return (
            f"[{self.begun}/{self.total}]"
            f" {typed}{f', about {minutes:.0f} min left' if minutes >= 1 else ''}"
        )


def group_of(number: int, overrides: Sequence[str], config: DictConfig) -> Hashable:
    """Return what the jobs that share a process have in common; the job's own number if it shares
    nothing.
    """
    if config.sweep.share == "none" or config.engine.name != "native":
        return number
    return frozenset(text for text in overrides if not re.match(REBUILT, text))


@dataclass(frozen=True)
class GroupTask:
    """The task of a launcher, whose jobs are groups: run every job of the group whose number Hydra
    gives it.
    """

    groups: Sequence[Sequence[SweepJob]]
    context: HydraContext
    config: DictConfig
    task: TaskFunction

    def __call__(self, _first: DictConfig) -> list[JobReturn]:
        """Return the results of the group's jobs, failed ones included."""
        try:
            return [self._run(member) for member in self.groups[HydraConfig.get().job.num]]
        finally:
            # Here, because every command imports this module.
            from magicdec.planning.shared import SHARED

            SHARED.begin("none")  # the process may live on, next to that of the next group

    def _run(self, member: SweepJob) -> JobReturn:
        config = self.context.config_loader.load_sweep_config(self.config, list(member.overrides))
        with open_dict(config.hydra.job) as job:
            job.num = member.number
            job.id = f"{job.name}_{member.number}"
        keys = {"job_dir_key": "hydra.sweep.dir", "job_subdir_key": "hydra.sweep.subdir"}
        return run_job(hydra_context=self.context, task_function=self.task, config=config, **keys)


class GroupLauncher(Launcher):
    """Another launcher, which gets a task for each group of jobs."""

    def __init__(self, inner: Launcher):
        self.inner = inner

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take the sweep's configuration."""
        self.given: dict[str, Any] = {
            "context": hydra_context,
            "task": task_function,
            "config": config,
        }

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run all jobs; return their results in order."""
        config = self.given["config"]
        members = [
            SweepJob(number, overrides)
            for number, overrides in enumerate(job_overrides, initial_job_idx)
        ]
        groups = grouped(members, config)
        if len(groups) < len(members):
            name = config.hydra.runtime.choices["hydra/launcher"]
            tasks = (
                f"{len(members)} jobs in {counted(len(groups), 'task')} of jobs that share a"
                " prefill"
            )
            to_stderr(f"hydra/launcher={name}: {tasks} (sweep.jobs_per_task=N divides them)")
        task = GroupTask(groups, **self.given)
        self.inner.setup(hydra_context=task.context, task_function=task, config=config)
        returned = self.inner.launch([group[0].overrides for group in groups], 0)
        results: dict[int, JobReturn] = {}
        for group, ended in zip(groups, returned, strict=True):
            failed = ended.status != JobStatus.COMPLETED  # the task itself, and so every job of it
            each = [ended] * len(group) if failed else ended.return_value
            results |= {member.number: result for member, result in zip(group, each, strict=True)}
        return [results[member.number] for member in members]


def grouped(members: Sequence[SweepJob], config: DictConfig) -> list[list[SweepJob]]:
    """Return the groups in the order of their first jobs, in parts of at most
    sweep.jobs_per_task.
    """
    groups: dict[Hashable, list[SweepJob]] = {}
    for member in members:
        groups.setdefault(group_of(member.number, member.overrides, config), []).append(member)
    size = config.sweep.jobs_per_task or len(members)
    return [
        group[first : first + size]
        for group in groups.values()
        for first in range(0, len(group), size)
    ]
