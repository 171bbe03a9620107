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
from statistics import median
from typing import Any

import magicdec  # noqa: F401 - before PyTorch, which reads once how its threads wait

# isort: split
from busy import launch, neighbour
from page import RESULTS, Cells, provenance

from magicdec.config.load import compose
from magicdec.config.registry import POLICIES
from magicdec.engine.native import Batch, warm_up
from magicdec.measure import metrics
from magicdec.planning import build
from magicdec.planning.resolve import resolve
from magicdec.scenarios.outputs import speeds
from magicdec.tracking.cells import markdown_table
from magicdec.tracking.progress import progress
from magicdec.units import both_speedups

CELLS = ((24, 4096), (12, 8192))  # rows, context
QUICK = (2, 512)
CHOICES = tuple(product(("streaming", "snapkv"), (128, 256, 512), (2, 3)))  # policy, budget, gamma
REPEATS = 2
# Of the run: seconds from the command to its table, of which so many are start-up, profile and predictions.
SECONDS, REST = 60.0, 12.0
AIMS = {"speedup": 1.4, "speedup_wall": 1.2}
RUNS = {"idle": 10, "busy": 3}
COLUMNS = {
    "autoregressive, ms per token": "autoregressive/time_per_output_token_ms",
    "speculative, ms per token": "speculative/time_per_output_token_ms",
    **{key: key for key in AIMS},
    "run, s": "run_s",
}
HEADER = ["batch", "context", "policy", "budget", "gamma", "length", *AIMS, "lossless", "prefill, s", "run, s", "aims"]


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
        choice |= {"length": metrics.acceptance_metrics([fast for _, fast in pairs])["acceptance_length"]}
        choice |= {key: speed[key] for key in AIMS} | {"lossless": pairs[0][0].tokens == pairs[0][1].tokens}
        found.append(choice | {"prefill, s": prefill, "run, s": REST + prefill + plan.config.scenario.repeats * both})
    return found


def meets(choice: dict[str, Any]) -> bool:
    """Return whether a choice meets all aims."""
    return choice["run, s"] <= SECONDS and choice["lossless"] and all(choice[key] >= aim for key, aim in AIMS.items())


def table(choices: list[dict[str, Any]]) -> str:
    """Return all choices, those that meet the aims first, by their speedup in wall-clock time."""
    ordered = sorted(choices, key=lambda choice: (meets(choice), choice["speedup_wall"]), reverse=True)
    lines = []
    for choice in ordered:
        row = choice | {"aims": "met" if meets(choice) else "", "lossless": "yes" if choice["lossless"] else "NO"}
        lines.append([f"{row[key]:.2f}" if isinstance(row[key], float) else str(row[key]) for key in HEADER])
    return markdown_table(HEADER, lines)


def spread(values: list[float]) -> float:
    """Return the distance of the extremes, as a share of the median."""
    return (max(values) - min(values)) / median(values)


def page(runs: dict[str, list[dict[str, Any]]], choices: list[dict[str, Any]]) -> str:
    """Return the page as Markdown, with what has been measured."""
    idle, busy = ({key: [run[key] for run in runs[kind]] for key in COLUMNS.values()} for kind in RUNS)
    rows = [[str(i), *(f"{run[key]:.2f}" for key in COLUMNS.values())] for i, run in enumerate(runs["idle"], 1)]
    rows.append(["median", *(f"{median(values):.2f}" for values in idle.values())])
    rows.append(["spread", *(f"{100 * spread(values):.0f}%" for values in idle.values())])
    if runs["busy"]:
        rows.append(["median next to a neighbour", *(f"{median(values):.2f}" for values in busy.values())])
    speedups = [
        both_speedups(median(of["speedup"]), median(of["speedup_wall"])) for of in (idle, busy) if of["speedup"]
    ]
    return PAGE.format(
        speedups=speedups[0],
        seconds=median(idle["run_s"]),
        spread=100 * spread(idle["speedup"]),
        busy=f"Next to a busy neighbour, it is {speedups[1]}." if runs["busy"] else "",
        provenance=provenance("python benchmarks/default_run.py"),
        runs=markdown_table(["run", *COLUMNS], rows),
        choices=table(choices) if choices else "",
    )


def missing_runs(found: Cells) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each run that has not been measured, with its kind, once it is done."""
    for kind, number in RUNS.items():
        with neighbour() if kind == "busy" else nullcontext():
            for _ in range(number - len(found["runs"][kind])):
                run = launch()
                yield kind, {key: run[key] for key in COLUMNS.values()}


def main() -> None:
    """Measure what is missing, and write the page after every run and cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small cell; write nothing")
    parser.add_argument("--restart", action="store_true", help="forget what has been measured")
    arguments = parser.parse_args()
    if arguments.quick:
        print(table(measure(*QUICK)))
        return
    found = Cells("default-run", restart=arguments.restart)
    found.setdefault("runs", {kind: [] for kind in RUNS})
    found.setdefault("choices", {})

    def save() -> None:
        found.save()
        choices = [choice for cell in found["choices"].values() for choice in cell]
        (RESULTS / "default-run.md").write_text(page(found["runs"], choices))

    for kind, run in missing_runs(found):
        found["runs"][kind].append(run)
        print(kind, *(f"{key} {value:.2f}" for key, value in run.items()), flush=True)
        save()
    for rows, context in CELLS:
        if (name := f"{rows} x {context}") not in found["choices"]:
            with ProcessPoolExecutor(1, get_context("spawn")) as own:
                found["choices"][name] = own.submit(measure, rows, context).result()
            print(f"measured {name}", flush=True)
            save()


PAGE = """# The default run

The speedup of `python launch.py`, by self-speculation, is {speedups}, in
{seconds:.0f} s from the command to the table. {busy}

{provenance}.

## Ten runs

Each is a process of its own on an idle machine: start-up, a prefill, pairs of passes, and the profile. The spread is
the distance of the extremes over the median: {spread:.0f}% for `speedup`. The neighbour is a process of the lowest
priority that computes all the time.

{runs}
## Other choices

Rows, context, policy, budget and gamma, in pairs on one prefill. `length` is tokens per round. `aims` marks a `speedup`
of at least 1.4 and a `speedup_wall` of at least 1.2 in a run of at most 60 s, which is estimated from the prefill and
the passes. Each was measured once, in two pairs: the spread above holds for them too.

{choices}"""


if __name__ == "__main__":
    main()
