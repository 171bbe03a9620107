"""Profile the servers of several engines from outside, next to the profile of our own engine, and
write docs/results/engines.csv and the page that shows it, peers-cpu.md.

    python benchmarks/engines.py --small            # to try it out: two minutes
    python benchmarks/engines.py                    # the bundled pair: 35 minutes, with all engines
    python benchmarks/engines.py --smollm2 FOLDER   # and SmolLM2: 45 minutes more, 75 per peer

The machine must be idle otherwise. vLLM and llama.cpp are measured where MAGICDEC_VLLM_PYTHON and
MAGICDEC_LLAMACPP_PYTHON name their environments (docs/peers.md); OpenVINO GenAI has no server here.
FOLDER is what tools/get_smollm2.py has made. What is measured already is kept in runs/engines.json:
to resume, run the command again.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import exp
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from page import RESULTS, ROOT, Cells
from render import write, write_csv

from magicdec.measure.intervals import Estimate

STEPS = ("target_decode", "verify", "draft", "round")
NEW_TOKENS = 48
GRID = {"batch_sizes": [1, 4, 8], "context_lens": [1024, 2048, 4096], "gammas": [1, 2, 4]}
# SmolLM2 prefills slowly: with up to 4 users, our server takes 40 minutes.
GRIDS = {"tiny": GRID, "smollm2": GRID | {"batch_sizes": [1, 2, 4]}}
SMALL = {"batch_sizes": [1, 2], "context_lens": [256], "gammas": [2]}
# What drafts, by target and engine.
DRAFTS = {
    ("tiny", "magicdec"): ["draft=model"],
    ("tiny", "llamacpp"): ["draft=model", "cache=full"],
    ("tiny", "vllm"): ["draft=model", "cache=full"],
    ("smollm2", "magicdec"): ["draft=self"],
    ("smollm2", "llamacpp"): ["draft=ngram", "draft.max_ngram=2"],
    ("smollm2", "vllm"): ["draft=ngram"],
}
OTHERS = {"llamacpp": "MAGICDEC_LLAMACPP_PYTHON", "vllm": "MAGICDEC_VLLM_PYTHON"}


def profile(overrides: Sequence[str], grid: Mapping[str, list[int]]) -> dict[str, Any]:
    """Run scenario=profile; return its result, and its lines."""
    points = [f"scenario.{key}={values}".replace(" ", "") for key, values in grid.items()]
    with TemporaryDirectory() as folder:
        command = [sys.executable, ROOT / "launch.py", "scenario=profile", *overrides, *points]
        subprocess.run([*command, "tracker=[]", f"runs_dir={folder}"], check=True)
        (run,) = Path(folder).glob("*/result.json")
        lines = (run.parent / "history.jsonl").read_text().splitlines()
        return {"result": json.loads(run.read_text()), "lines": [json.loads(one) for one in lines]}


def runs_of(target: str, named: Sequence[str], grid: Mapping[str, list[int]]) -> Iterator[tuple]:
    """Yield the name, the overrides and the grid of each run on a target.

    Our engine is profiled before and after our server, at the contexts in the middle of its
    windows.
    """
    new = f"batch.generate_len={NEW_TOKENS}"
    ours = [*named, *DRAFTS[target, "magicdec"]]
    middle = [context + NEW_TOKENS // 2 for context in grid["context_lens"]]
    at_middle = {**grid, "context_lens": middle}
    yield "native before", ours, at_middle
    yield "magicdec", ["engine=magicdec", *ours, new], grid
    yield "native after", ours, at_middle
    for engine, variable in OTHERS.items():
        if os.environ.get(variable):
            yield engine, [f"engine={engine}", *named, *DRAFTS[target, engine], new], grid


def rows_of(target: str, engine: str, measured: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each step of each point."""
    result = measured["result"]
    made_by = f"commit {result['commit'][:8]}, {result['device']}, PyTorch {result['torch']}"
    for line in measured["lines"]:
        place = {"target": target, "engine": engine, "batch": line["batch_size"]}
        place |= {"context": line["context_len"], "gamma": line.get("gamma")}
        for step in STEPS:
            if f"time/{step}_ms" not in line:
                continue
            low, high = line.get(f"time/{step}_ms_ci95") or (None, None)
            times = {"step": step, "ms": line[f"time/{step}_ms"], "low": low, "high": high}
            known = {
                "limit_ms": line.get(f"limit/{step}_ms"),
                "acceptance_length": line.get("acceptance_length"),
                "cause": result.get("diagnosis/cause"),
                "sentence": result.get("diagnosis/sentence"),
                "measured_by": made_by,
            }
            yield place | times | known


def pairs_of(rows: Sequence[Mapping[str, Any]], target: str) -> dict[tuple, tuple[float, float]]:
    """Return our server's times and those of our engine around it, by step and point."""
    by_engine: dict[str, dict[tuple, float]] = {}
    for row in rows:
        if row["target"] == target:
            shift = NEW_TOKENS // 2 if row["engine"].startswith("native") else 0
            key = (row["step"], row["batch"], row["context"] - shift, row["gamma"])
            by_engine.setdefault(row["engine"], {})[key] = row["ms"]
    pairs = {}
    for key, time in by_engine.get("magicdec", {}).items():
        around = [by_engine[name].get(key) for name in ("native before", "native after")]
        if None not in around:
            pairs[key] = time, fmean(around)
    return pairs


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the median of the ratios of each step, the 95% interval of their mean, and what a user
    adds to a step.
    """
    lines = []
    for target in dict.fromkeys(row["target"] for row in rows):
        by_point = pairs_of(rows, target)
        for step in STEPS:
            # On a busy machine a short draft step may come out below 0.
            of_step = {
                key: pair for key, pair in by_point.items() if key[0] == step and min(pair) > 0
            }
            if len(of_step) < 2:
                continue
            ratios = [served / alone for served, alone in of_step.values()]
            added_ms = median((served - alone) / key[1] for key, (served, alone) in of_step.items())
            logs = np.log(ratios)
            low, high = (exp(end) for end in Estimate(float(logs.mean()), repeats_K=logs).ends)
            line = {"target": target, "step": step, "points": len(ratios)}
            line |= {"median": median(ratios), "low": low, "high": high}
            lines.append(line | {"added_ms": added_ms})
    return lines


def main() -> None:
    """Measure what is not measured yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smollm2", metavar="FOLDER")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    targets = {"tiny": ["target=tiny"]}
    if options.smollm2:
        targets["smollm2"] = ["target=smollm2-135m-q4", f"target.path={options.smollm2}"]
    cells = Cells("engines-small" if options.small else "engines")
    rows: list[dict[str, Any]] = []
    for target, named in targets.items():
        grid = SMALL if options.small else GRIDS[target]
        for engine, overrides, points in runs_of(target, named, grid):
            key = f"{target} {engine}"
            if key not in cells:
                try:
                    cells[key] = profile([*overrides, "hardware=cpu"], points)
                except subprocess.CalledProcessError:
                    print(f"{key}: not measured, see above; left out", file=sys.stderr)
                    continue
                cells.save()
            rows += rows_of(target, engine, cells[key])
    compared = summary(rows)
    for line in compared:
        print({key: round(one, 3) if isinstance(one, float) else one for key, one in line.items()})
    if not options.small:
        write_csv(RESULTS / "engines.csv", rows)
        write_csv(RESULTS / "engines-ratios.csv", compared)
        write("peers-cpu")


if __name__ == "__main__":
    main()
