"""Measure what recurrent layers leave of the gain of self-speculation, and predict it for a model
of 27B on H100s: write docs/results/hybrids*.csv, and the page that shows them, modules.md.

    python benchmarks/hybrids.py            # a quarter of an hour on two idle cores; resumable
    python benchmarks/hybrids.py --quick    # a minute: small sizes; prints the tables

Three models have SmolLM2-135M's sizes and random weights: Qwen3.5 with attention in all layers, and
with attention in one of four, with each way to take a verification back. A random model says
nothing about acceptance: the speedups follow from the times and an assumed alpha of 0.8.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Any

from modules import ALPHA, CPU, FP32, SMOLLM2, engine
from page import RESULTS, Cells, setting
from render import Row, table, write, write_csv
from today import GAMMAS, described
from transformers import Qwen3_5TextConfig

from magicdec.attention.cpp import CppAttention
from magicdec.costmodel.hardware import hardware_named
from magicdec.costmodel.prediction import predict
from magicdec.costmodel.round import Setup
from magicdec.costmodel.speedup import omega
from magicdec.models.adapter.load_modules import random
from magicdec.models.adapter.modules_transformer import ModulesTransformer
from magicdec.models.description import describe
from magicdec.scenarios.profile import time_points

LAYERS = SMOLLM2["num_hidden_layers"]
DELTA_RULE = {
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 9,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
KINDS = {"attention in all layers": "", "hybrid, keep": "keep", "hybrid, replay": "replay"}
MEASURED_GAMMAS, BATCH, CONTEXTS = (1, 3, 5), 8, (1024, 4096, 8192)
REPEATS, TURNS = 3, 3
PREDICTED = ("qwen3.5-27b", "qwen2.5-32b")
MACHINES, PREDICTED_BATCHES = ("h100", "8xh100"), (1, 8, 32, 128)
PREDICTED_CONTEXTS = (4096, 32768, 131072)


def model_of(kind: str, longest: int) -> ModulesTransformer:
    """Return a model with random weights. One layer of four has attention in a hybrid."""
    every = 4 if KINDS[kind] else 1
    types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(LAYERS)]
    shape = Qwen3_5TextConfig(**SMOLLM2, **DELTA_RULE, head_dim=64, layer_types=types)
    config: Any = describe(shape.to_dict(), kind, "transformers")
    if config.recurrence is not None:
        recurrence = replace(config.recurrence, rollback=KINDS[kind])
        config = replace(config, recurrence=recurrence)
    return random(config, FP32, CPU, CppAttention(), longest)


def measured(context: int, batch: int, turns: int) -> list[Row]:
    """Return a row for each model and gamma: T_T, T_D, T_V(gamma), the speedup that follows, and
    what a row keeps. All take turns, so that a machine that slows down slows all of them; times are
    medians over the turns.
    """
    targets = {kind: model_of(kind, context + 64) for kind in KINDS}
    points = list(product(KINDS, MEASURED_GAMMAS))
    lines: dict[tuple[str, int], list[Row]] = {point: [] for point in points}
    for kind, gamma in points * turns:
        cell = (batch, context, gamma)
        lines[kind, gamma] += time_points(engine(targets[kind], gamma), [cell], REPEATS)
    rows = []
    for (kind, gamma), timed in lines.items():
        times = {
            step: median(line[f"time/{step}_ms"] for line in timed)
            for step in ("target_decode", "draft", "verify", "round")
        }
        rows.append(
            {
                "model": kind,
                "batch": batch,
                "context": context,
                "gamma": gamma,
                **{f"{step}_ms": ms for step, ms in times.items()},
                "speedup": times["target_decode"] * omega(gamma, ALPHA) / times["round"],
                "row_mib": targets[kind].config.kept_bytes(context, FP32.itemsize) / 2**20,
                "measured_by": setting(),
            }
        )
    return rows


def predicted() -> Iterator[Row]:
    """Yield the speedup of a hybrid and of a dense model of its size."""
    for name, machine, batch, context in product(
        PREDICTED, MACHINES, PREDICTED_BATCHES, PREDICTED_CONTEXTS
    ):
        if context > described(name).max_position_embeddings:
            continue
        setup = Setup(described(name), hardware_named(machine, "vllm"), batch, context)
        prediction = predict(setup, GAMMAS, ALPHA)
        best, times = prediction.best, prediction.best.times
        yield {
            "target": name,
            "machine": machine,
            "batch": batch,
            "context": context,
            "gamma": best.gamma,
            "target_ms": 1e3 * setup.target_time.total,
            "draft_over_step": times.draft.total / setup.target_time.total,
            "verify_over_step": times.verify.total / setup.target_time.total,
            "speedup": best.speedup,
            "fits": prediction.fits,
        }


def main() -> None:
    """Measure what is missing, and write the CSV files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes; print the tables")
    parser.add_argument("--restart", action="store_true", help="forget the cells measured so far")
    options = parser.parse_args()
    contexts, batch, turns = ((256,), 2, 1) if options.quick else (CONTEXTS, BATCH, TURNS)
    cells = Cells("hybrids-quick" if options.quick else "hybrids", options.restart)
    for context in map(str, contexts):
        if context not in cells:
            cells[context] = measured(int(context), batch, turns)
            cells.save()
            print(f"measured {context}", flush=True)
    rows = [row for context in contexts for row in cells[str(context)]]
    on_gpus = list(predicted())
    if options.quick:
        print(
            table(rows, "model", "gamma", "target_decode_ms:.1f", "draft_ms:.1f", "verify_ms:.1f")
        )
        print(table(on_gpus, "target", "machine", "batch", "context", "gamma", "speedup:.2f"))
        return
    write_csv(RESULTS / "hybrids.csv", rows)
    write_csv(RESULTS / "hybrids-predicted.csv", on_gpus)
    write("modules")


if __name__ == "__main__":
    main()
