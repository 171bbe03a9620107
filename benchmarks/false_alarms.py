"""Count false alarms between real runs: pairs of equal configurations whose figures are called
different.

    python benchmarks/false_alarms.py              # 20 pairs, about ten minutes on an otherwise idle machine
    python benchmarks/false_alarms.py --pairs 2    # to try it out

Every run is a process of its own. Rows, prompts and tokens are the same, so that all differences
are noise of times.
"""  # noqa: E501

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from magicdec.measure.intervals import difference
from magicdec.report.verdict import estimates
from magicdec.tracking.columns import flatten
from magicdec.tracking.reader import iter_runs, number_of

ROOT = Path(__file__).parents[1]
RUN = ["experiment=quick", "batch.size=4", "scenario.repeats=3", "tracker=[]"]
FIGURES = ("speedup", "speedup_wall")


def main() -> None:
    """Run the pairs, and print how many of them differ by more than noise."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=20)
    pairs = parser.parse_args().pairs
    with TemporaryDirectory() as folder:
        for _ in range(2 * pairs):
            command = [sys.executable, ROOT / "launch.py", *RUN, f"runs_dir={folder}"]
            subprocess.run(command, check=True, capture_output=True)
        runs = sorted(iter_runs(folder), key=lambda run: number_of(run["id"]))
        found = [estimates(flatten(run)) for run in runs]
    for figure in FIGURES:
        changes = [
            difference(a[figure], b[figure], True)
            for a, b in zip(found[::2], found[1::2], strict=True)
        ]
        alarms = sum(abs(change.value) > change.half_width() for change in changes)
        print(f"{figure}: {alarms} false alarms in {pairs} pairs")


if __name__ == "__main__":
    main()
