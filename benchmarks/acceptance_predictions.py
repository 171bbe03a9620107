"""Predict speedups from the acceptance that sweeps/acceptance.yaml measures.

    python benchmarks/acceptance_predictions.py    # makes docs/predictions/smollm2.md

Acceptances are those that ship with the package. Nothing is measured here: give `--cpu` the figures
of an idle machine, such as magicdec/measure/ceilings.py finds.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import render
from page import ROOT
from render import write_csv

from magicdec.config.load import compose
from magicdec.costmodel.acceptance import Curves, Point, published_points
from magicdec.costmodel.hardware import configured, hardware_named
from magicdec.costmodel.prediction import Prediction, predict
from magicdec.costmodel.round import Setup
from magicdec.planning.resolve import resolve
from magicdec.planning.setup import setup_of

TARGET = "smollm2-135m-q4"
# The best informed first.
POLICIES = ("topk", "verify_guided", "quest", "snapkv", "pyramidkv", "streaming", "window")
FOLDER = ROOT / "docs/predictions"
GPUS = ("A100", "H100", "H200", "L40")
BATCHES, CONTEXTS, GAMMAS = (1, 8, 32, 128, 256), (1024, 2048, 4096, 8000), range(1, 9)
CRITICAL = (8, 128)  # the batches that S* compares
WAYS = {"text at temperature 0.7": "temperature 0.7", "text": "greedy"}
BUDGET = 256  # at which S* is compared
FP32, BF16 = 4, 2
CPU = (50.45, 493.8)  # GB/s, and GFLOP/s in fp32: the machine of docs/results/costmodel.md


class Choice(NamedTuple):
    """A policy and a budget with a known acceptance."""

    policy: str
    budget: int


def machines(cpu: tuple[float, float]) -> Iterator[tuple[str, Setup]]:
    """Yield every device with a setup on it, whose cache, batch and context are replaced."""
    base = setup_of(resolve(compose(["scenario=predict", f"target={TARGET}", "hardware=h100"])))
    for name in GPUS:
        yield name, replace(base, hardware=hardware_named(name.lower()))
    hardware = configured("cpu", 1, cpu[0], cpu[1] / 1000)
    name = f"a CPU of {cpu[0]:.0f} GB/s and {cpu[1]:.0f} GFLOP/s"
    yield name, replace(base, hardware=hardware, element_bytes=FP32, stored_weight_bytes=BF16)


def choices(points: list[Point]) -> list[Choice]:
    """Return the policies and budgets of these points."""
    practical = {
        Choice(point.policy, point.budget) for point in points if point.policy in POLICIES[1:]
    }
    return sorted(practical, key=lambda choice: (POLICIES.index(choice.policy), choice.budget))


def predictions(setup: Setup, task: str) -> dict[tuple[int, int], dict[Choice, Prediction]]:
    """Return what is predicted of each choice, by batch and context, from the acceptances on one
    text.
    """
    points = [point for point in published_points() if (point.target, point.task) == (TARGET, task)]
    found: dict[tuple[int, int], dict[Choice, Prediction]] = {}
    for choice in choices(points):
        cache = compose([f"cache={choice.policy}", f"cache.budget={choice.budget}"]).cache
        for batch, context in product(BATCHES, CONTEXTS):
            at = setup.at(cache=cache, batch=batch, context=context)
            prediction = predict(at, GAMMAS, curves=Curves(points, task), batches=CRITICAL)
            if (
                prediction.estimate is not None
                and prediction.estimate.is_measured
                and prediction.fits
            ):
                found.setdefault((batch, context), {})[choice] = prediction
    return found


def write(cpu: tuple[float, float]) -> None:
    """Write the CSV files and the page."""
    best_rows, critical = [], []
    for device, setup in machines(cpu):
        for way in WAYS:
            found = predictions(setup, way)
            for (batch, context), by_choice in found.items():
                choice, prediction = max(
                    by_choice.items(), key=lambda item: item[1].best.speedup or 0.0
                )
                row = {"device": device, "tokens": WAYS[way], "batch": batch, "context": context}
                row |= {
                    "speedup": prediction.best.speedup,
                    **choice._asdict(),
                    "gamma": prediction.best.gamma,
                }
                best_rows.append(row)
            at = found.get((BATCHES[2], 4096), {}) if way == next(iter(WAYS)) else {}
            for choice, prediction in at.items():
                if choice.budget == BUDGET:
                    row = {
                        "device": device,
                        "policy": choice.policy,
                        "gamma": prediction.best.gamma,
                    }
                    row |= {
                        "speedup": prediction.best.speedup,
                        "critical_context": prediction.critical_context,
                    }
                    critical.append(row)
    write_csv(FOLDER / "smollm2.csv", best_rows)
    write_csv(FOLDER / "smollm2-critical.csv", critical)
    render.write("predictions/smollm2")


def main() -> None:
    """Predict, and write the CSV files and the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cpu", type=float, nargs=2, default=CPU, metavar=("GB/S", "GFLOP/S"), help="of a CPU"
    )
    write(parser.parse_args().cpu)


if __name__ == "__main__":
    main()
