"""What a sweep leaves beside its runs: which they are, a line per job in <runs_dir>/sweeps/<name>/jobs.jsonl.

Here too is how the process launcher (hydra_plugins/) and the jobs that it starts (launch.py) talk to each other.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from magicdec.tracking.reader import read_lines

JOBS = "jobs.jsonl"
# The environment of a job: its number and the sweep's folder.
JOB, SWEEP_DIR = "MAGICDEC_JOB", "MAGICDEC_SWEEP_DIR"
# Its exit codes, beside those of any run: another process is running this run (EX_TEMPFAIL); Ctrl-C.
BUSY, INTERRUPTED = 75, 130


def record(sweep_dir: Path, number: int, run_id: str | None, overrides: Sequence[str]) -> None:
    """Say which run a job is, None where it ended before it was one: in one write, so that lines do not mix."""
    line = json.dumps({"job": number, "id": run_id, "overrides": list(overrides)}) + "\n"
    sweep_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(sweep_dir / JOBS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def jobs(sweep_dir: Path) -> list[dict[str, Any]]:
    """The lines that are whole: a full disk may have torn one."""
    return read_lines(sweep_dir / JOBS)


def run_of(sweep_dir: Path, number: int) -> str | None:
    """The id of the run that a job is, if it came as far as to know it."""
    return next((line["id"] for line in jobs(sweep_dir) if line.get("job") == number and line.get("id")), None)
