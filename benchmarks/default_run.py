"""Which rows, context, policy, budget and gamma the default run should have: a table of what each gains and takes.

    python benchmarks/default_run.py            # ten minutes, on an otherwise idle machine; prints a table
    python benchmarks/default_run.py --quick    # one small cell, to try it out

Self-speculation of the bundled target. The choices that meet all aims come first, the fastest of them at the top.
Repeat the command to resume: a cell that this commit has measured is not measured again (--restart forgets them).
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from typing import Any

import magicdec  # noqa: F401 - before PyTorch, which reads once how its threads wait

# isort: split
from page import Cells, provenance

from magicdec.config.load import compose
from magicdec.engine.native import Batch, warm_up
from magicdec.measure import metrics
from magicdec.planning import build
from magicdec.planning.resolve import resolve
from magicdec.registry import POLICIES
from magicdec.scenarios.outputs import speeds
from magicdec.tracking.cells import markdown_table
from magicdec.tracking.progress import progress

CELLS = ((24, 4096), (16, 4096), (32, 4096), (16, 6144), (8, 8192), (12, 8192))  # rows, context
QUICK = ((2, 512),)
CHOICES = tuple(product(("streaming", "snapkv"), (128, 256, 512), (2, 3, 4)))  # policy, budget, gamma
REPEATS = 2
# Of the run: seconds from the command to its table, of which so many are start-up, profile and predictions.
SECONDS, REST = 60.0, 12.0
AIMS = {"speedup": 1.4, "speedup_wall": 1.2}
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
        draft = replace(engine, gamma=gamma, cache=facts).draft_for(decoder)
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


def main() -> None:
    """Measure what is missing, and print the table after every cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small cell")
    parser.add_argument("--restart", action="store_true", help="forget what has been measured")
    arguments = parser.parse_args()
    found = Cells("default-run", restart=arguments.quick or arguments.restart)
    for rows, context in QUICK if arguments.quick else CELLS:
        name = f"{rows} x {context}"
        if name not in found:
            with ProcessPoolExecutor(1, get_context("spawn")) as own:
                found[name] = own.submit(measure, rows, context).result()
            if not arguments.quick:
                found.save()
        print(table([choice for cell in found.values() for choice in cell]), flush=True)
    print(
        f"\n{provenance('python benchmarks/default_run.py')}; an estimated run has {REST:.0f} s of start-up and profile"
    )


if __name__ == "__main__":
    main()
