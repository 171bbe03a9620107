"""Measure how the cost of a study grows: seconds of whole sweeps of 1 to 12 cells, with and without sharing.

    python benchmarks/studies.py --smollm FOLDER    # writes docs/results/studies.csv and studies.md; about 20 minutes
    python benchmarks/studies.py --quick            # the bundled pair at a small size; prints the page

FOLDER holds target=smollm2-135m-q4. Both ways of a size are measured one after the other, each by a command of its own.
A size that this commit has measured is not measured again.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import page
from page import RESULTS, ROOT, Cells
from render import rounded, write_csv

from magicdec.tracking.cells import markdown_table

GRIDS = {1: ("2", "128"), 3: ("2", "64,128,256"), 6: ("1,2", "64,128,256"), 12: ("1,2,4,8", "64,128,256")}
WAYS = ("none", "prefill")  # sweep.share
MODELS = {
    "the bundled pair, 8 x 4,096": ["batch.size=8"],
    "SmolLM2-135M (4-bit), 4 x 2,048": [
        *("target=smollm2-135m-q4", "batch.size=4", "batch.context_len=2048", "batch.generate_len=32")
    ],
}
QUICK = ["batch.size=2", "batch.context_len=512", "batch.generate_len=16", "scenario.repeats=1"]
PAGE = """# How the cost of a study grows

A sweep over gamma and budget costs one prefill and, for each cell, the decoding that differs. With `sweep.share=none`
it pays for loading and prefill in every cell.

{table}

Seconds of the whole command, from its start to its report. The {sizes} cells are gammas and budgets of
`sweeps/gamma_x_budget.yaml`. One measurement each; {provenance}. The figures are in [studies.csv](studies.csv).
"""


def measure(overrides: Sequence[str], cells: int, share: str) -> float:
    """Return the seconds of a sweep."""
    gammas, budgets = GRIDS[cells]
    with TemporaryDirectory() as store:
        command = [sys.executable, "launch.py", "-m", f"draft.gamma={gammas}", f"cache.budget={budgets}", *overrides]
        start = time.perf_counter()
        own = [f"sweep.share={share}", "wandb.mode=disabled", f"runs_dir={store}"]
        subprocess.run([*command, *own], cwd=ROOT, check=True, capture_output=True)
        seconds = time.perf_counter() - start
        assert len(list(Path(store).glob("*/result.json"))) == cells
    return seconds


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a line for each model and number of cells."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for cells in dict.fromkeys(row["cells"] for row in rows):
            alone, shared = (
                next(
                    row["seconds"] for row in rows if (row["model"], row["cells"], row["share"]) == (model, cells, way)
                )
                for way in WAYS
            )
            per_cell = [f"{seconds / cells:.1f}" for seconds in (alone, shared)]
            lines.append([model, str(cells), f"{alone:.0f}", f"{shared:.0f}", *per_cell, f"{shared / alone:.2f}"])
    heads = ["model", "cells", "share=none, s", "default, s", "none, s per cell", "default, s per cell", "ratio"]
    return markdown_table(heads, lines)


def measured(
    models: dict[str, list[str]], sizes: Sequence[int], known: dict[str, float], save: Callable[[], None]
) -> list[dict[str, Any]]:
    """Return the row of every cell; those that are not known yet are measured."""
    rows = []
    for model, cells, way in product(models, sizes, WAYS):
        name = f"{model}, {cells} cells, share={way}"
        if name not in known:
            known[name] = measure(models[model], cells, way)
            save()
        rows.append(rounded({"model": model, "cells": cells, "share": way, "seconds": known[name]}))
    return rows


def main() -> None:
    """Measure every size of study both ways, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--smollm", type=Path, metavar="FOLDER", help="SmolLM2-135M; without it, the bundled pair alone"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes; write nothing")
    options = parser.parse_args()
    first, second = MODELS
    models = {first: MODELS[first] + (QUICK if options.quick else [])}
    if options.smollm:
        models[second] = [*MODELS[second], f"target.path={options.smollm.resolve()}"]
    sizes = list(GRIDS)[: 2 if options.quick else None]
    known = Cells("studies", restart=options.quick)
    rows = measured(models, sizes, known, (lambda: None) if options.quick else known.save)
    command = "python benchmarks/studies.py" + (" --smollm FOLDER" if options.smollm else "")
    text = PAGE.format(table=table(rows), sizes=", ".join(map(str, sizes)), provenance=page.provenance(command))
    if options.quick:
        print(text)
        return
    write_csv(RESULTS / "studies.csv", rows)
    (RESULTS / "studies.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
