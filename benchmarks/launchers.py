"""What a launcher adds to a job: the CPU time of tiny runs beyond their work.

    python benchmarks/launchers.py      # a line per launcher; under a minute

CPU time, because a shared machine's clock tells of its other users, too. With `process`, a job counts from the first
moment of its process; what the server imports once for all jobs is not in it. With `basic`, it counts from where Hydra
has composed it, and the first one, which imports everything, is left out.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import hydra.core.utils

sys.path.insert(0, str(Path(__file__).parents[1]))

import magicdec.scenarios
from magicdec.tracking.sweep import JOB

NOTES = "MAGICDEC_NOTES"  # where jobs note their costs, in the environment of a sweep that is measured
TINY = ["hardware=cpu", "attention=sdpa", "batch.size=1", "batch.context_len=128", "batch.generate_len=4"]
TINY += ["cache.budget=64", "scenario.repeats=1", "scenario.profile_repeats=1", "draft.gamma=1,2,3,4"]


def costs(launcher: str) -> list[float]:
    """CPU seconds beyond the work, of each job of a small sweep."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "notes")
        command = [sys.executable, __file__, "-m", f"hydra/launcher={launcher}", f"runs_dir={folder}/runs", *TINY]
        subprocess.run(command, env=os.environ | {NOTES: str(notes)}, check=True, capture_output=True)
        return [json.loads(line) for line in notes.read_text().splitlines()]


def main() -> int:
    """A line per launcher."""
    for launcher, first in (("process", 0), ("basic", 1)):
        print(f"{launcher}: {median(costs(launcher)[first:]):.2f} CPU s a job")
    return 0


def noted() -> int:
    """launch.py, whose jobs note what they cost."""
    run_job, work, spent = hydra.core.utils.run_job, magicdec.scenarios._work, 0.0

    def timed_work(*args, **kwargs):
        nonlocal spent
        begin = time.process_time()
        outcome = work(*args, **kwargs)
        spent = time.process_time() - begin
        return outcome

    def note(seconds: float) -> None:
        with open(os.environ[NOTES], "a") as notes:
            notes.write(f"{seconds - spent}\n")

    def timed_job(*args, **kwargs):
        begin = time.process_time()
        result = run_job(*args, **kwargs)
        note(time.process_time() - begin)
        return result

    magicdec.scenarios._work, hydra.core.utils.run_job = timed_work, timed_job
    import launch  # which copies run_job

    code = launch.main()
    if os.environ.get(JOB):
        note(time.process_time())
    return code


if __name__ == "__main__":
    sys.exit(noted() if NOTES in os.environ else main())
