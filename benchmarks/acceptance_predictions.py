"""Speedups predicted from the acceptance that benchmarks/acceptance_study.py has measured.

    python benchmarks/acceptance_predictions.py    # makes docs/predictions/smollm2.md

Acceptances are those that ship with the package. Nothing is measured here: give `--cpu` the figures of an idle machine,
such as magicdec/measure/ceilings.py finds, or benchmarks/cpu.py reports.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from acceptance_page import fill
from acceptance_results import POLICIES, TARGET
from page import ROOT

from magicdec.config.load import compose
from magicdec.costmodel.acceptance import AT, Curves, Point, published
from magicdec.costmodel.hardware import configured, hardware_named
from magicdec.costmodel.predict import Prediction, predict
from magicdec.costmodel.round import Setup
from magicdec.planning.resolve import resolve
from magicdec.tracking.cells import markdown_table

PAGE = ROOT / "docs/predictions/smollm2.md"
GPUS = ("A100", "H100", "H200", "L40")
BATCHES, CONTEXTS, GAMMAS = (1, 8, 32, 128, 256), (1024, 2048, 4096, 8000), range(1, 9)
CRITICAL = (8, 128)  # the batches that S* compares
WAYS = ("text at temperature 0.7", "text")
FP32, BF16 = 4, 2
CPU = (35.0, 130.0)  # GB/s, and GFLOP/s in fp32: two cores of an AMD EPYC with AVX2

TEXT = """# Predicted speedups of SmolLM2-135M drafting for itself

{finding}

**Measured:** acceptance, on novels, of SmolLM2-135M-Instruct after 4-bit quantisation, dequantised
([how, and with which intervals](../results/smollm2.md)). **Predicted:** all times, by the
[cost model](../cost-model.md); none of these speedups has been measured. One device, bfloat16 on GPUs; on a CPU fp32
with weights in bfloat16. How much of its datasheet each device achieves:

{notes}

These were calibrated on far larger models: on a GPU a step of so small a model is mostly launch
overhead, which is the least certain part of the prediction.

Each entry is the highest speedup over the measured policies and budgets and gamma 1 to 8: policy, budget, gamma.
`topk` is left out, because choosing its entries reads every key. A dash: no acceptance is known there, or the memory
does not suffice. For one configuration: `python launch.py scenario=predict target={target} hardware=h100`.

{sections}

`python benchmarks/acceptance_predictions.py`
"""


class Choice(NamedTuple):
    """A policy and a budget with a known acceptance."""

    policy: str
    budget: int


def machines(cpu: tuple[float, float]) -> Iterator[tuple[str, Setup]]:
    """Yield every device with a setup on it, whose cache, batch and context are replaced."""
    base = resolve(compose(["scenario=predict", f"target={TARGET}", "hardware=h100"])).setup()
    for name in GPUS:
        yield name, replace(base, hardware=hardware_named(name.lower()))
    hardware = configured("cpu", 1, cpu[0], cpu[1] / 1000)
    name = f"a CPU of {cpu[0]:.0f} GB/s and {cpu[1]:.0f} GFLOP/s"
    yield name, replace(base, hardware=hardware, element_bytes=FP32, stored_weight_bytes=BF16)


def choices(points: list[Point]) -> list[Choice]:
    """Return the policies and budgets of these points."""
    practical = {Choice(point.policy, point.budget) for point in points if point.policy in POLICIES[1:]}
    return sorted(practical, key=lambda choice: (POLICIES.index(choice.policy), choice.budget))


def predictions(setup: Setup, task: str) -> dict[tuple[int, int], dict[Choice, Prediction]]:
    """Return what is predicted of each choice, by batch and context, from the acceptances on one text."""
    points = [point for point in published() if (point.target, point.task) == (TARGET, task)]
    found: dict[tuple[int, int], dict[Choice, Prediction]] = {}
    for choice in choices(points):
        cache = compose([f"cache={choice.policy}", f"cache.budget={choice.budget}"]).cache
        for batch in BATCHES:
            for context in CONTEXTS:
                at = setup.at(cache=cache, batch=batch, context=context)
                prediction = predict(at, GAMMAS, curves=Curves(points, task), batches=CRITICAL)
                if prediction.estimate is not None and prediction.estimate.is_measured and prediction.fits:
                    found.setdefault((batch, context), {})[choice] = prediction
    return found


def best(by_choice: dict[Choice, Prediction]) -> tuple[Choice, Prediction]:
    """Return the choice with the highest speedup."""
    return max(by_choice.items(), key=lambda item: item[1].best.speedup or 0.0)


def entry(by_choice: dict[Choice, Prediction] | None) -> str:
    """Return a cell of a table."""
    if not by_choice:
        return "-"
    choice, prediction = best(by_choice)
    return f"{prediction.best.speedup:.2f}x, {choice.policy} {choice.budget}, {prediction.best.gamma}"


def table(found: dict[tuple[int, int], dict[Choice, Prediction]]) -> str:
    """Return the best choices by batch and context."""
    contexts = [context for context in CONTEXTS if any(place[1] == context for place in found)]
    rows = [[str(batch), *(entry(found.get((batch, context))) for context in contexts)] for batch in BATCHES]
    return markdown_table(["batch", *(f"{context:,} tokens" for context in contexts)], rows)


def critical(every: dict[str, dict[str, dict[tuple[int, int], dict[Choice, Prediction]]]]) -> str:
    """Return S* of each device and policy, at budget 256 and the gamma that is best at the larger batch."""
    rows = []
    for name, by_way in every.items():
        at = by_way[WAYS[0]].get((BATCHES[2], 4096), {})
        for choice, prediction in at.items():
            if choice.budget == 256:
                s = prediction.critical_context
                gamma, speedup = prediction.best.gamma, f"{prediction.best.speedup:.2f}x"
                limit = f"beyond {prediction.setup.target.max_position_embeddings:,}" if s is None else f"{s:,}"
                rows.append([name, choice.policy, str(gamma), speedup, limit])
    head = ["device", "policy", "gamma", f"speedup at batch {BATCHES[2]}, 4,096 tokens", "S*"]
    return markdown_table(head, rows)


def page(cpu: tuple[float, float]) -> str:
    """Return the page."""
    setups = dict(machines(cpu))
    every = {name: {way: predictions(setup, way) for way in WAYS} for name, setup in setups.items()}
    notes = "\n".join(f"- {name}: {setup.hardware.note}" for name, setup in setups.items())
    parts = [
        f"## S*\n\nThe context beyond which a batch of {CRITICAL[1]} gains more than one of {CRITICAL[0]}. Budget 256, "
        f"{WAYS[0].removeprefix('text at ')}.\n\n{critical(every)}"
    ]
    for name, by_way in every.items():
        for way, found in by_way.items():
            if found:
                how = way.removeprefix("text at ") if AT in way else "greedy (easier to draft: its output loops)"
                parts.append(f"## {name[0].upper()}{name[1:]}, {how}\n\n{table(found)}")
    sections = "\n\n".join(part.strip() for part in parts)
    return TEXT.format(finding=finding(every), target=TARGET, notes=notes, sections=sections)


def finding(every: dict[str, dict[str, dict[tuple[int, int], dict[Choice, Prediction]]]]) -> str:
    """Return the two sentences that the page opens with."""
    place = (CRITICAL[1], 4096)
    way = next(way for way in WAYS if any(place in by_way[way] for by_way in every.values()))
    at = {name: best(by_way[way][place]) for name, by_way in every.items() if place in by_way[way]}
    reached = ", ".join(f"{prediction.best.speedup:.2f}x on {name}" for name, (_, prediction) in at.items())
    winners = " and ".join(dict.fromkeys(f"{choice.policy} {choice.budget}" for choice, _ in at.values()))
    return fill(
        f"At {place[1]:,} tokens and batch {place[0]}, on {way.replace('text', 'novels')}, the measured acceptance is "
        f"worth {reached}, as predicted. The best of the measured policies and budgets there: {winners}."
    )


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", type=float, nargs=2, default=CPU, metavar=("GB/S", "GFLOP/S"), help="of a CPU")
    PAGE.write_text(page(parser.parse_args().cpu))


if __name__ == "__main__":
    main()
