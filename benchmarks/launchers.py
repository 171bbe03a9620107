"""Measure what a job costs under each launcher of one machine: CPU seconds of whole sweeps, as the kernel counts.

    python benchmarks/launchers.py              # a line per launcher; about two minutes
    python benchmarks/launchers.py basic        # of one

A job is a tiny run. Sweeps of two lengths are timed from outside; their difference is divided by that of their jobs, so
that what a sweep costs once (imports, a fork server, the report) cancels. CPU time is less disturbed by other programs
than wall-clock time. Needs Linux.
"""

import ctypes
import os
import resource
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

LAUNCH = Path(__file__).parents[1] / "launch.py"
TINY = ["hardware=cpu", "attention=sdpa", "batch.size=1", "batch.context_len=128", "batch.generate_len=4"]
TINY += ["cache.budget=64", "scenario.repeats=1", "scenario.profile_repeats=1", "wandb.mode=disabled"]
FEW, MANY = 2, 6
PR_SET_CHILD_SUBREAPER = 36  # of prctl: orphans, such as a fork server, become our children


def cpu_seconds(launcher: str, num_jobs: int) -> float:
    """Return the CPU seconds of a sweep, those of all its processes included."""
    seeds = ",".join(map(str, range(1, num_jobs + 1)))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, LAUNCH, "-m", f"hydra/launcher={launcher}", f"runs_dir={folder}", *TINY]
        subprocess.run([*command, f"data.seed={seeds}"], check=True, capture_output=True)
    with suppress(ChildProcessError):
        while True:  # rusage counts a process once its end has been waited for
            os.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Print a line per launcher."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for launcher in sys.argv[1:] or ["process", "basic"]:
        per_job = (cpu_seconds(launcher, MANY) - cpu_seconds(launcher, FEW)) / (MANY - FEW)
        print(f"{launcher}: {per_job:.2f} CPU s a job")
    return 0


if __name__ == "__main__":
    sys.exit(main())
