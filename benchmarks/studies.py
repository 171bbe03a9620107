"""Measure how the cost of a study grows: seconds of whole sweeps of 1 to 12 cells, with and without
sharing.

    python benchmarks/studies.py --smollm FOLDER    # writes docs/results/studies.csv and studies.md; about 25 minutes
    python benchmarks/studies.py --quick            # the bundled pair at a small size; prints the times

FOLDER holds target=smollm2-135m-q4. Both ways of a size are measured one after the other, each by a
command of its own. A size that this commit has measured is not measured again.
"""  # noqa: E501

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from page import RESULTS, ROOT, Cells, setting
from render import write, write_csv

GRIDS = {
    1: ("2", "128"),
    3: ("2", "64,128,256"),
    6: ("1,2", "64,128,256"),
    12: ("1,2,4,8", "64,128,256"),
}
WAYS = ("none", "prefill")  # sweep.share
MODELS = {
    "the bundled pair, 8 x 4,096": ["batch.size=8"],
    "SmolLM2-135M (4-bit), 4 x 2,048": [
        "target=smollm2-135m-q4",
        "batch.size=4",
        "batch.context_len=2048",
        "batch.generate_len=32",
    ],
}
QUICK = ["batch.size=2", "batch.context_len=512", "batch.generate_len=16", "scenario.repeats=1"]


def measure(overrides: Sequence[str], cells: int, share: str) -> float:
    """Return the seconds of a sweep."""
    gammas, budgets = GRIDS[cells]
    with TemporaryDirectory() as store:
        command = [
            sys.executable,
            "launch.py",
            "-m",
            f"draft.gamma={gammas}",
            f"cache.budget={budgets}",
            *overrides,
        ]
        start = time.perf_counter()
        own = [f"sweep.share={share}", "wandb.mode=disabled", f"runs_dir={store}"]
        subprocess.run([*command, *own], cwd=ROOT, check=True, capture_output=True)
        seconds = time.perf_counter() - start
        assert len(list(Path(store).glob("*/result.json"))) == cells
    return seconds


def main() -> None:
    """Measure every size of study both ways, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    smollm = "SmolLM2-135M; without it, the bundled pair alone"
    parser.add_argument("--smollm", type=Path, metavar="FOLDER", help=smollm)
    parser.add_argument("--quick", action="store_true", help="small sizes; write nothing")
    options = parser.parse_args()
    first, second = MODELS
    models = {first: MODELS[first] + (QUICK if options.quick else [])}
    if options.smollm:
        models[second] = [*MODELS[second], f"target.path={options.smollm.resolve()}"]
    known, rows = Cells("studies", restart=options.quick), []
    for model, cells, way in product(models, list(GRIDS)[: 2 if options.quick else None], WAYS):
        name = f"{model}, {cells} cells, share={way}"
        if name not in known:
            known[name] = measure(models[model], cells, way)
        if options.quick:
            print(f"{model}, {cells} cells, sweep.share={way}: {known[name]:.1f} s")
            continue
        known.save()
        row = {
            "model": model,
            "cells": cells,
            "share": way,
            "way": f"sweep.share={way}",
            "seconds": known[name],
        }
        rows.append(row | {"seconds_per_cell": known[name] / cells, "measured_by": setting()})
    if rows:
        write_csv(RESULTS / "studies.csv", rows)
        write("studies")


if __name__ == "__main__":
    main()
