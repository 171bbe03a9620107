"""The process launcher's queue, with processes that only wait."""

import contextlib
import itertools
import multiprocessing
import os
import signal
import time

import pytest
from hydra.core.utils import JobStatus
from omegaconf import OmegaConf

from hydra_plugins.magicdec._launcher import ProcessLauncher
from magicdec.tracking.sweep import BUSY


class Queue(ProcessLauncher):
    def __init__(self, fates, sweep, limit=None):
        super().__init__(limit)
        self.fates, self.seen, self.most = fates, [], 0
        settings = {
            "fail_fast": False,
            "dry_run": False,
            "objective": "speedup",
            "share": "prefill",
        } | sweep
        places = {"runs_dir": "", "hydra": {"sweep": {"dir": ""}}, "engine": {"name": "native"}}
        self.config = OmegaConf.create(
            {"sweep": settings, "scenario": {"name": "predict"}, **places}
        )
        self.processes = []

    def _begin(self, worker, job):
        self.seen.append(job.number)
        self.processes.append(worker.process.pid)
        self.most = max(
            self.most, sum(child.is_alive() for child in multiprocessing.active_children())
        )
        worker.begin(job, *self.fates.pop(0))


@pytest.fixture
def waiting_processes(monkeypatch):
    """The jobs of a Queue only wait: a fate is the seconds and the exit code, or the signal that
    ends the process.
    """

    def work(pipe):
        with contextlib.suppress(EOFError):
            while True:
                seconds, code = pipe.recv()
                time.sleep(seconds)
                if code < 0:
                    os.kill(os.getpid(), -code)
                pipe.send(code)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("hydra_plugins.magicdec._launcher.START", "fork")
    monkeypatch.setattr("hydra_plugins.magicdec._launcher._work", work)
    # A forked process holds both ends of its pipe, so that it does not notice when the launcher
    # closes its own.
    monkeypatch.setattr("hydra_plugins.magicdec._launcher.GRACE_S", 0.2)


def test_as_many_jobs_at_once_as_visible_gpus(waiting_processes, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5,7")
    queue = Queue([(0.3, 0)] * 5, {})
    results = queue.launch([["{}"]] * 5, 10)
    assert queue.seen == [10, 11, 12, 13, 14]
    assert queue.most == 3
    assert len(set(queue.processes)) == 3, "one group, of which each takes a part"
    assert [result.return_value for result in results] == [None] * 5


def test_jobs_of_a_group_follow_one_another_in_one_process(waiting_processes, capfd):
    grid = itertools.product("ab", (1, 2), (1, 2))
    jobs = [
        [f"batch.size={rows}", f"cache={policy}", f"draft.gamma={gamma}"]
        for policy, rows, gamma in grid
    ]
    queue = Queue([(0, 0)] * 8, {})
    assert len(queue.launch(jobs, 0)) == 8
    assert queue.seen == [0, 1, 4, 5, 2, 3, 6, 7]
    assert queue.processes == [queue.processes[0]] * 4 + [queue.processes[4]] * 4
    queue = Queue([(0, 0)] * 3, {"share": "none"})
    queue.launch(jobs[:3], 0)
    assert (queue.seen, len(set(queue.processes))) == ([0, 1, 2], 3)
    queue = Queue([(0, 0), (0, 1), (0, -signal.SIGKILL), (0, 0)], {})
    results = queue.launch([["cache=a"]] * 4, 0)
    first, second, third, last = queue.processes
    assert first == second, "a process goes on after a job that is done"
    assert len({second, third, last}) == 3, (
        "and is replaced after one that failed, or that was killed"
    )
    done, failed = JobStatus.COMPLETED, JobStatus.FAILED
    assert [result.status for result in results] == [done, failed, failed, done]
    assert "job 2 (cache=a): killed by SIGKILL" in capfd.readouterr().err


def test_a_queue_without_gpus_that_fails_fast(waiting_processes, capsys):
    queue = Queue([(0, 0), (0, 1), (0, 0)], {"fail_fast": True})
    results = queue.launch([["{}"]] * 4, 0)
    assert queue.seen == [0, 1]
    assert [result.status for result in results] == [JobStatus.COMPLETED, JobStatus.FAILED]
    assert "2 jobs are not started" in capsys.readouterr().err


def test_a_run_that_another_sweep_is_running_is_left_to_the_end(waiting_processes, monkeypatch):
    monkeypatch.setattr("hydra_plugins.magicdec._launcher.RETRY_S", 0.1)
    queue = Queue([(0, BUSY), (0, 0), (0, 0)], {})
    results = queue.launch([["{}"]] * 2, 0)
    assert queue.seen == [0, 1, 0]
    assert len(results) == 2
