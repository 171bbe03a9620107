"""What a launcher adds to a job: the CPU time of tiny runs beyond their work.

    python benchmarks/launchers.py      # a line per launcher; about a minute

CPU time, because a shared machine's clock tells of its other users, too. Hydra's composing of the jobs is in it, shared
out among them. What is done once in a sweep is not: with `process`, a job counts from the first moment of its process,
after the server's imports; with `basic`, the first job, which imports everything, is left out.
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
from hydra_plugins.basic_launcher import Composer
from magicdec.tracking.sweep import JOB

NOTES = "MAGICDEC_NOTES"  # where jobs note their costs, in the environment of a sweep that is measured
TINY = ["hardware=cpu", "attention=sdpa", "batch.size=1", "batch.context_len=128", "batch.generate_len=4"]
TINY += ["cache.budget=64", "scenario.repeats=1", "scenario.profile_repeats=1", "draft.gamma=1,2,3,4", "data.seed=1,2"]


def costs(launcher: str) -> list[float]:
    """CPU seconds beyond the work, of each job of a small sweep."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "notes")
        command = [sys.executable, __file__, "-m", f"hydra/launcher={launcher}", f"runs_dir={folder}/runs", *TINY]
        subprocess.run(command, env=os.environ | {NOTES: str(notes)}, check=True, capture_output=True)
        noted = [json.loads(line) for line in notes.read_text().splitlines()]
    jobs = [seconds for what, seconds in noted if what == "job"]
    composing = sum(seconds for what, seconds in noted if what == "composing") / len(jobs)
    return [composing + seconds for seconds in jobs]


def main() -> int:
    """A line per launcher."""
    for launcher, first in (("process", 0), ("basic", 1)):
        print(f"{launcher}: {median(costs(launcher)[first:]):.2f} CPU s a job")
    return 0


def noted() -> int:
    """launch.py, which notes what its jobs cost, and their composing."""
    work, worked = magicdec.scenarios._work, 0.0

    def clock() -> float:
        return time.process_time() - worked

    def timed_work(*args, **kwargs):
        nonlocal worked
        begin = time.process_time()
        outcome = work(*args, **kwargs)
        worked += time.process_time() - begin
        return outcome

    def note(what: str, seconds: float) -> None:
        with open(os.environ[NOTES], "a") as notes:
            notes.write(json.dumps([what, seconds]) + "\n")

    def noting(what: str, function):
        def timed(*args, **kwargs):
            begin = clock()
            result = function(*args, **kwargs)
            note(what, clock() - begin)
            return result

        return timed

    magicdec.scenarios._work = timed_work
    if JOB not in os.environ:
        Composer.load_sweep_config = noting("composing", Composer.load_sweep_config)
        hydra.core.utils.run_job = noting("job", hydra.core.utils.run_job)
    import launch  # which copies run_job

    code = launch.main()
    if JOB in os.environ:
        note("job", clock())
    return code


if __name__ == "__main__":
    sys.exit(noted() if NOTES in os.environ else main())
