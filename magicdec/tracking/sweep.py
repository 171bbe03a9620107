"""The record of a sweep: a line per job in <runs_dir>/sweeps/<name>/jobs.jsonl.

Also the environment variables and exit codes by which launchers (hydra_plugins/) and their jobs
(magicdec/cli.py) communicate.
"""

import errno
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from magicdec.errors import JobFailed, to_stderr
from magicdec.tracking.run_files import JOB_LINE, JobLine, read_lines

JOBS = "jobs.jsonl"
# Before the name of a sweep, in that of its folder: with microseconds, so that no two share one.
TIME = "%Y-%m-%d_%H-%M-%S-%f"
STAMP = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(?:-\d+)?_")
STOPPED = "stopped"  # a file: a job has failed under sweep.fail_fast
# The environment of a job: its number and the sweep's folder.
JOB, SWEEP_DIR = "MAGICDEC_JOB", "MAGICDEC_SWEEP_DIR"
# A job's own exit codes: another process is running this run (EX_TEMPFAIL); Ctrl-C.
BUSY, INTERRUPTED = 75, 130
# The seconds that each job of a dry run of this process will take, None where that is not known.
planned: list[float | None] = []


@dataclass(frozen=True)
class Job:
    """The overrides typed to get a run, and the sweep that it is a job of."""

    overrides: tuple[str, ...] = ()
    sweep_dir: Path | None = None  # None: a single run
    number: int = 0
    # For a run that another process is running; otherwise that is raised as Busy.
    waits: bool = False


def record(
    sweep_dir: Path, number: int, attempt_id: str | None, overrides: Sequence[str], before: int = 0
) -> None:
    """Append the attempt that a job has made or found done, or None if it failed before. Lines of
    jobs do not mix.

    `before` are repeats of the attempt that do not count towards those that the sweep asks for.
    """
    content = {"job": number, "id": attempt_id, "overrides": list(overrides), "before": before}
    line = json.dumps(content) + "\n"
    sweep_dir.mkdir(parents=True, exist_ok=True)
    path = sweep_dir / JOBS
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a full disk has torn a line
            line = "\n" + line
        encoded = line.encode()
        if os.write(descriptor, encoded) < len(encoded):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def jobs(sweep_dir: Path) -> list[JobLine]:
    """Return the complete lines by job number: a full disk may have torn one."""
    return sorted(read_lines(sweep_dir / JOBS, JOB_LINE), key=lambda line: line["job"])


def is_named(sweep_dir: Path, name: str) -> bool:
    """Return True for the name of a sweep's folder, or the sweep's own: gamma_x_budget."""
    return name in (sweep_dir.name, STAMP.sub("", sweep_dir.name, count=1))


def last_line(sweep_dir: Path, number: int) -> JobLine | None:
    """Return the last line of a job that names an attempt: a cluster may have started the job
    again.
    """
    lines = [line for line in jobs(sweep_dir) if line["job"] == number and line["id"]]
    return lines[-1] if lines else None


def attempt_of(sweep_dir: Path, number: int) -> str | None:
    """Return the id of the attempt that a job has made or found done, or None."""
    line = last_line(sweep_dir, number)
    return line["id"] if line else None


def stop(sweep_dir: Path, code: int) -> None:
    """Keep the sweep's other jobs from starting, on any machine, because one has failed with this
    exit code.
    """
    with suppress(OSError):  # a full disk
        sweep_dir.mkdir(parents=True, exist_ok=True)
        (sweep_dir / STOPPED).write_text(str(code))


def refuse_if_stopped(sweep_dir: Path, number: int) -> None:
    """Raise JobFailed if the sweep has been stopped before this job."""
    if (sweep_dir / STOPPED).exists():
        to_stderr(f"sweep.fail_fast: job {number} is not started")
        code = (sweep_dir / STOPPED).read_bytes()[:3]
        raise JobFailed(int(code) if code.isdigit() else 1)
