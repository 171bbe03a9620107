"""Judge the diagnosis on servers whose faults are known, and write docs/results/diagnosis.csv.

    python benchmarks/diagnosis.py fix      # the half that the thresholds are fixed on: two minutes
    python benchmarks/diagnosis.py judge    # the other half, with the thresholds of the package

Servers are simulated (faulty_server.py): times are those of a clock that counts, so that the
machine that runs this does not matter. What they would answer is measured and diagnosed as for any
server.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import ceil
from typing import Any, NamedTuple

from faulty_server import Faults, Simulated, burst
from page import RESULTS
from render import write_csv

from magicdec.config.choices import ModelChoice
from magicdec.config.groups import Efficiency
from magicdec.config.omega import omega
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.costmodel.diagnosis import (
    ACCEPTANCE,
    CAUSES,
    DRAFTING,
    SCHEDULING,
    VERIFICATION,
    Diagnosis,
    Thresholds,
    diagnose,
)
from magicdec.costmodel.hardware import configured
from magicdec.costmodel.round import Setup
from magicdec.costmodel.targets import architecture
from magicdec.scenarios.diagnosed import cells_of
from magicdec.scenarios.outside_lines import MeasuredPoint, lines
from magicdec.units import FREE, WAYS

HEALTHY, STRENGTHS, TOKENS = 20, 4, 64
# The range of each fault's strength.
RANGES = {
    VERIFICATION: ("entry_reads", 0.1, 1.0),
    DRAFTING: ("draft", 0.2, 4.0),
    SCHEDULING: ("round_waits", 0.1, 1.5),
    ACCEPTANCE: ("lost", 0.1, 0.5),
}
GPUS = ("a100", "h100", "h200", "l40")
PAIRS = {
    "llama-3.1-8b": "llama-3.2-1b",
    "qwen3-8b": "qwen3-1.7b",
    "llama-2-7b-32k": "tinyllama-1.1b",
}
CPU_TARGET = "smollm2-135m"
PAYING = 1.05  # speedup that a healthy server has in its best cell, at least
CANDIDATES = [number / 100 for number in range(4, 31)]  # thresholds


class Case(NamedTuple):
    """A server, the grid that it is measured on, and what is wrong with it."""

    server: Simulated
    batches: list[int]
    contexts: list[int]
    gammas: list[int]
    faults: tuple[str, ...]


def cases(half: str) -> Iterator[Case]:
    """Yield the cases of a half: healthy servers, each fault at random strengths, and two at
    once.
    """
    draw = random.Random(half)
    faults: list[tuple[str, ...]] = [()] * HEALTHY
    faults += [(fault,) for fault, _ in product(CAUSES, range(STRENGTHS))]
    faults += combinations(CAUSES, 2)
    for some in faults:
        case = _case(draw, some)
        while not pays_when_healthy(case):
            case = _case(draw, some)
        yield case


def pays_when_healthy(case: Case) -> bool:
    """Return whether speculation would pay in any cell without the faults."""
    server = replace(case.server, faults=Faults())
    for batch, context, gamma in product(case.batches, case.contexts, case.gammas):
        step, whole = (server.seconds(batch, context, gamma, way) for way in WAYS)
        if omega(gamma, server.alpha) * step / whole > PAYING:
            return True
    return False


def _case(draw: random.Random, faults: tuple[str, ...]) -> Case:
    on_cpu = draw.random() < 0.25
    target = CPU_TARGET if on_cpu else draw.choice(sorted(PAIRS))
    machine, figures = ("cpu", (31.0, 0.14)) if on_cpu else (draw.choice(GPUS), (None, None))
    achieved = Efficiency(
        bandwidth_fraction=draw.uniform(0.6, 0.95),
        matmul_fraction=draw.uniform(0.4, 0.9),
        matmul_half_rows=0.0 if on_cpu else draw.uniform(0, 24),
        attention_fraction=draw.uniform(0.6, 1.0),
        overlap=draw.uniform(0.6, 1.0),
        layer_overhead_us=draw.uniform(5, 50),
        round_overhead_us=draw.uniform(100, 600),
    )
    kinds = ["self"] if on_cpu else ["self", "model"]
    kind = draw.choice(kinds if DRAFTING in faults else [*kinds, "ngram"])
    own = {}
    if kind == "model":
        own = {"model": ModelChoice(PAIRS[target], architecture=architecture(PAIRS[target]))}
    setup = Setup(
        architecture(target),
        configured(machine, 1, *figures, efficiency=achieved),
        8,
        4096,
        DRAFTS[kind].facts(gamma=4, **own),
        POLICIES["streaming"].facts(policy="streaming", budget=512),
        target_name=target,
        element_bytes=4.0 if on_cpu else 2.0,
    )
    strengths = {}
    for fault in faults:
        name, low, high = RANGES[fault]
        strengths[name] = low * (high / low) ** draw.random()
    batches = [1, 2, 4, 8] if on_cpu else [1, 2, 4, 8, 16, 32]
    contexts = [512, 1024, 2048, 4096] if on_cpu else [1024, 2048, 4096, 8192, 16384, 31000]
    server = Simulated(setup, draw.uniform(0.55, 0.9), Faults(**strengths), draw.getrandbits(30))
    gammas = [1, 2, 3, 4, 5, 6, 8]
    grid = (sorted(draw.sample(values, 3)) for values in (batches, contexts, gammas))
    return Case(server, *grid, faults)


def diagnosed(case: Case, thresholds: Thresholds | None = None) -> Diagnosis:
    """Return the diagnosis of a case, measured as from outside."""
    points = []
    for batch, context in product(case.batches, case.contexts):
        points.append(MeasuredPoint(WAYS[0], 0, batch, context))
        for way, gamma in product((FREE, WAYS[1]), case.gammas):
            points.append(MeasuredPoint(way, gamma, batch, context))
    found = {point: burst(case.server, point, TOKENS) for point in points}
    alpha = case.server.alpha
    cells = cells_of(
        lines({point: one for point, one in found.items() if one}),
        case.server.setup,
        expected_of=lambda context, gamma: omega(gamma, alpha),
    )
    return diagnose(cells, TOKENS, thresholds)


def row_of(number: int, half: str, case: Case, found: Diagnosis) -> dict[str, Any]:
    """Return a case and its diagnosis as a row."""
    setup, strengths = case.server.setup, case.server.faults
    row: dict[str, Any] = {"half": half, "case": number}
    row |= {"target": setup.target_name, "hardware": setup.hardware.name, "draft": setup.draft.name}
    row |= {"faults": " and ".join(case.faults) or "healthy"}
    for name, _, _ in RANGES.values():
        row[f"strength/{name}"] = getattr(strengths, name) or None
    row |= {"cause": found.cause, "named": " ".join(found.named)}
    row |= {f"share/{loss.cause}": loss.share for loss in found.losses}
    row |= {"missing": found.missing, "residual": found.engine.residual}
    row["sentence"] = found.sentence
    return row


def best_thresholds(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return for each cause the threshold that errs least: a false alarm counts as two misses. Of
    equally good ones, the middle. That of what is missing for no known reason is the most that any
    healthy server misses.
    """
    chosen = {}
    for cause in CAUSES:
        costs = {}
        for threshold in CANDIDATES:
            alarms = misses = 0
            for row in rows:
                is_named = row[f"share/{cause}"] >= max(threshold, 2 * row["residual"])
                has_fault = cause in row["faults"]
                alarms += is_named and not has_fault
                misses += has_fault and not is_named
            costs[threshold] = 2 * alarms + misses
        least = [one for one, cost in costs.items() if cost == min(costs.values())]
        chosen[cause] = least[len(least) // 2]
        print(f"{cause}: {chosen[cause]} of {least[0]} to {least[-1]}, cost {min(costs.values())}")
    healthy = max(row["missing"] for row in rows if row["faults"] == "healthy")
    return chosen | {"unknown": ceil(100 * healthy) / 100}


def main() -> None:
    """Run a half."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("half", choices=("fix", "judge"))
    half = parser.parse_args().half
    rows = []
    for number, case in enumerate(cases(half)):
        rows.append(row_of(number, half, case, diagnosed(case)))
        print(number, rows[-1]["faults"], "->", rows[-1]["cause"], rows[-1]["named"], flush=True)
    if half == "fix":
        print(best_thresholds(rows))
    write_csv(RESULTS / ("diagnosis.csv" if half == "judge" else "diagnosis-fix.csv"), rows)


if __name__ == "__main__":
    main()
