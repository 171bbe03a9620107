"""Calibrate the cost model for our engine on CPUs, and compare its predictions with what was
measured.

    python benchmarks/costmodel_cpu.py            # ten minutes, on an otherwise idle machine; needs scipy
    python benchmarks/costmodel_cpu.py --quick    # a few small points, to try it out; writes nothing

Writes magicdec/costmodel/calibrated/cpu.yaml and docs/results/costmodel.md. Measures the
bundled models and, where MAGICDEC_SMOLLM2 names a folder made by tools/get_smollm2.py,
SmolLM2-135M. Repeat the command to resume: points that this commit has measured are not measured
again (--restart forgets them).
"""  # noqa: E501

import argparse
import os
from collections.abc import Sequence
from itertools import product
from statistics import median
from typing import Any

import magicdec  # noqa: F401 - before PyTorch, which reads once how its threads wait

# isort: split
import render
from page import RESULTS, Cells, setting
from render import write_csv

from magicdec.calibrate.steps import rates_of, row_of, time_plan
from magicdec.config.load import compose
from magicdec.costmodel import hardware
from magicdec.costmodel.calibration import ON_CPUS, Calibration, calibrate, to_yaml
from magicdec.costmodel.hardware import Hardware, configured
from magicdec.costmodel.round import round_times
from magicdec.costmodel.stacks import OWN_STACK
from magicdec.costmodel.tables import Row
from magicdec.costmodel.targets import architecture
from magicdec.planning.resolve import resolve
from magicdec.tracking.progress import progress

SMOLLM2 = os.environ.get("MAGICDEC_SMOLLM2", "")
MODELS = {name: [f"target={name}"] for name in ("tiny", "tiny-draft", "smollm2-135m-q4")}
MODELS["smollm2-135m-q4"].append(f"target.path={SMOLLM2}")
BATCHES, CONTEXTS, GAMMAS = (1, 8, 24), (1024, 2048, 4096, 8000), (2, 4)
QUICK = ((1, 2), (512, 1024), (2, 4))
BUDGET = 256
STEPS = {"T_T": "time/target_decode_ms", "T_D": "time/draft_ms", "T_V": "time/verify_ms"}
FILE = hardware.CALIBRATED / "cpu.yaml"


def measure(model: str, points: Sequence[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """Time a round's steps over caches of noise at each point (rows, context, gamma), and what the
    machine can do.
    """
    rows, context, gamma = map(max, zip(*points, strict=True))
    sizes = [
        f"batch.size={rows}",
        f"batch.context_len={context}",
        f"draft.gamma={gamma}",
        f"cache.budget={BUDGET}",
    ]
    plan = resolve(compose([*MODELS[model], "hardware=cpu", *sizes]))
    with progress() as bars:
        found = list(time_plan(plan, bars, points))
    rates = dict(zip(("bandwidth", "rate"), rates_of(plan), strict=True))
    return [point | rates for point in found]


def fit(
    found: dict[str, list[dict[str, Any]]], models: Sequence[str], start: Hardware
) -> Calibration:
    """Fit the machine to the points of some models."""
    rows = [row_of(model, point, BUDGET) for model in models for point in found[model]]
    return calibrate(rows, architecture, {hardware.CPU: start}, ON_CPUS)


def errors(row: Row, machine: Hardware) -> list[float]:
    """Return the relative errors of T_T, T_D and T_V."""
    times = round_times(row.setup(architecture, machine), row.gamma)
    predicted = (times.target.total, row.gamma * times.draft.total, times.verify.total)
    measured = (row.autoregressive_ms, row.draft_ms, row.verify_ms)
    return [1e3 * ours / ms - 1 for ours, ms in zip(predicted, measured, strict=True) if ms]


def write(
    found: dict[str, list[dict[str, Any]]], start: Hardware, calibration: Calibration
) -> None:
    """Write the CSV files and the page."""
    machine, summary, steps = calibration.machines[hardware.CPU], [], []
    for model, points in found.items():
        rows = [row_of(model, point, BUDGET) for point in points]
        others = [other for other in found if other != model]
        unseen = fit(found, others, start).machines[hardware.CPU] if others else machine
        known, left_out = ([errors(row, one) for row in rows] for one in (machine, unseen))
        for which, (step, key) in enumerate(STEPS.items()):
            medians = [median(abs(row[which]) for row in one) for one in (known, left_out)]
            worst = max((row[which] for row in known), key=abs)
            line = {"model": model, "step": step, "median_error": medians[0], "worst_error": worst}
            summary.append(line | {"median_error_left_out": medians[1]})
            for point, error in zip(points, known, strict=True):
                where = {
                    "batch": point["batch_size"],
                    "context": point["context_len"],
                    "gamma": point["gamma"],
                }
                line = (
                    {"model": model}
                    | where
                    | {"step": step, "ms": point[key], "error": error[which]}
                )
                steps.append(line | {"measured_by": f"{setting()}, attention=cpp"})
    write_csv(RESULTS / "costmodel-cpu.csv", steps)
    write_csv(RESULTS / "costmodel-cpu-models.csv", summary)
    rates = {
        "read bandwidth, GB/s": machine.device.bandwidth / 1e9,
        "matmul rate, GFLOP/s": machine.device.flops / 1e9,
    }
    numbers = (
        rates
        | vars(machine.efficiency)
        | {"root mean square error of a time": calibration.residual}
    )
    write_csv(
        RESULTS / "costmodel-cpu-fit.csv", [{"number": k, "value": v} for k, v in numbers.items()]
    )
    render.write("costmodel")


def main() -> None:
    """Measure what is missing, fit, and write the file and the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few small points; write nothing")
    parser.add_argument("--restart", action="store_true", help="forget what has been measured")
    arguments = parser.parse_args()
    stored = Cells("costmodel-cpu", restart=arguments.quick or arguments.restart)
    points = list(product(*(QUICK if arguments.quick else (BATCHES, CONTEXTS, GAMMAS))))
    for model in MODELS:
        if model not in stored and (SMOLLM2 or model != "smollm2-135m-q4"):
            stored[model] = measure(model, points)
            print(f"measured {model}", flush=True)
            if not arguments.quick:
                stored.save()
    best = [
        max(point[key] for points in stored.values() for point in points)
        for key in ("bandwidth", "rate")
    ]
    start = configured(hardware.CPU, 1, best[0] / 1e9, best[1] / 1e12, stack=OWN_STACK)
    calibration = fit(stored, list(stored), start)
    print(calibration)
    if not arguments.quick:
        write(stored, start, calibration)
        origin = [f"CPUs, by {calibration.num_rows} points on one: docs/results/costmodel.md."]
        origin += ["Fractions are of the read bandwidth and the matmul rate that a run measures."]
        origin += ["Written by `python benchmarks/costmodel_cpu.py`."]
        FILE.write_text(to_yaml(calibration.machines[hardware.CPU], origin, ON_CPUS))


if __name__ == "__main__":
    main()
