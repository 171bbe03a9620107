"""What a sweep leaves beside its runs: which they are, a line per job in <runs_dir>/sweeps/<name>/jobs.jsonl."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

JOBS = "jobs.jsonl"


def record(sweep_dir: Path, number: int, run_id: str, overrides: Sequence[str]) -> None:
    """Say which run a job is: in one write, so that the lines of several processes do not mix."""
    line = json.dumps({"job": number, "id": run_id, "overrides": list(overrides)}) + "\n"
    sweep_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(sweep_dir / JOBS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def jobs(sweep_dir: Path) -> Iterator[dict[str, Any]]:
    """The lines that are whole: a full disk may have torn one."""
    try:
        text = (sweep_dir / JOBS).read_text(encoding="utf-8")
    except OSError:
        return
    for line in text.splitlines():
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict):
            yield content
