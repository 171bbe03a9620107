"""The default run: how much its results spread, what a busy neighbour does to them, and what other choices would gain.

    python benchmarks/default_run.py            # half an hour, on an otherwise idle machine
    python benchmarks/default_run.py --quick    # one small cell, to try it out; writes nothing

Writes docs/results/default-run.md after every run and cell: `python launch.py` in processes of its own, ten times on
the idle machine and three times next to a process that computes all the time; then choices of rows, context, policy,
budget and gamma, each in pairs on one prefill. Repeat the command to resume: what this commit has measured is not
measured again (--restart forgets it).
"""

import argparse
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from typing import Any

import magicdec  # noqa: F401 - before PyTorch, which reads once how its threads wait

# isort: split
import render
from busy import launch, neighbour
from page import RESULTS, Cells, setting
from render import rounded, write_csv

from magicdec.config.load import compose
from magicdec.config.registry import POLICIES
from magicdec.engine.native import Batch, warm_up
from magicdec.measure import metrics
from magicdec.planning import build
from magicdec.planning.resolve import resolve
from magicdec.scenarios.outputs import speeds
from magicdec.tracking.progress import progress

CELLS = ((24, 4096), (12, 8192))  # rows, context
QUICK = (2, 512)
CHOICES = tuple(product(("streaming", "snapkv"), (128, 256, 512), (2, 3)))  # policy, budget, gamma
REPEATS = 2
REST = 12.0  # seconds of a run for start-up, profile and predictions
RUNS = {"idle": 10, "busy": 3}
COLUMNS = {
    "autoregressive_ms": "autoregressive/time_per_output_token_ms",
    "speculative_ms": "speculative/time_per_output_token_ms",
    "speedup": "speedup",
    "speedup_wall": "speedup_wall",
    "run_s": "run_s",
}


def measure(rows: int, context: int) -> list[dict[str, Any]]:
    """Measure every choice on one prefill, each as pairs with an autoregressive pass."""
    largest = [max(values) for values in tuple(zip(*CHOICES, strict=True))[1:]]
    sizes = [f"batch.size={rows}", f"batch.context_len={context}"]
    plan = resolve(compose(["hardware=cpu", f"cache.budget={largest[0]}", f"draft.gamma={largest[1]}", *sizes]))
    with progress() as bars:
        engine = build.engine(plan, bars)
    opened = engine.open(build.prompts(plan, build.tokenizer(plan)).tokens)
    decoder, found = opened.decoder, []
    prefill = decoder.prefill(engine.prefill_chunk)
    for policy, budget, gamma in CHOICES:
        facts = POLICIES[policy].facts(budget=budget)
        draft = replace(engine, draft=replace(engine.draft, gamma=gamma), cache=facts).draft_for(decoder)
        warm_up(Batch(decoder, draft))
        pairs = [(decoder.generate(), decoder.generate(draft)) for _ in range(REPEATS)]
        ways = [
            [metrics.speed_metrics([metrics.row_times(one, prefill)]) for one in way]
            for way in zip(*pairs, strict=True)
        ]
        speed = speeds(*ways)
        both = sum(float(speed[f"{way}/decode_s"] or 0.0) for way in ("autoregressive", "speculative"))
        choice = {"batch": rows, "context": context, "policy": policy, "budget": budget, "gamma": gamma}
        choice |= {"acceptance_length": metrics.acceptance_metrics([fast for _, fast in pairs])["acceptance_length"]}
        choice |= {key: speed[key] for key in ("speedup", "speedup_wall")} | {
            "lossless": pairs[0][0].tokens == pairs[0][1].tokens
        }
        found.append(choice | {"prefill_s": prefill, "run_s": REST + prefill + plan.config.scenario.repeats * both})
    return found


def write(found: Cells) -> None:
    """Write the CSV files and the page of what has been measured."""
    by = {"measured_by": setting()}
    runs = [
        rounded({"kind": kind, "run": number, **run, **by})
        for kind, runs in found["runs"].items()
        for number, run in enumerate(runs, 1)
    ]
    write_csv(RESULTS / "default-run.csv", runs)
    choices = [rounded(choice | by) for cell in found["choices"].values() for choice in cell]
    write_csv(RESULTS / "default-run-choices.csv", choices)
    render.write("default-run")


def missing_runs(found: Cells) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each run that has not been measured, with its kind, once it is done."""
    for kind, number in RUNS.items():
        with neighbour() if kind == "busy" else nullcontext():
            for _ in range(number - len(found["runs"][kind])):
                run = launch()
                yield kind, {key: run[name] for key, name in COLUMNS.items()}


def main() -> None:
    """Measure what is missing, and write the page after every run and cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small cell; write nothing")
    parser.add_argument("--restart", action="store_true", help="forget what has been measured")
    arguments = parser.parse_args()
    if arguments.quick:
        for choice in measure(*QUICK):
            print(choice)
        return
    found = Cells("default-run", restart=arguments.restart)
    found.setdefault("runs", {kind: [] for kind in RUNS})
    found.setdefault("choices", {})
    for kind, run in missing_runs(found):
        found["runs"][kind].append(run)
        print(kind, *(f"{key} {value:.2f}" for key, value in run.items()), flush=True)
        found.save()
        write(found)
    for rows, context in CELLS:
        if (name := f"{rows} x {context}") not in found["choices"]:
            with ProcessPoolExecutor(1, get_context("spawn")) as own:
                found["choices"][name] = own.submit(measure, rows, context).result()
            print(f"measured {name}", flush=True)
            found.save()
        write(found)


if __name__ == "__main__":
    main()
