"""Decoding on a CPU: the times of a round's steps as shares of their limit, speedups, prefill and memory.

    python benchmarks/cpu.py              # writes docs/results/cpu.md; ten minutes, on an otherwise idle machine
    python benchmarks/cpu.py --quick      # small cells, to try it out; writes nothing

Measures the bundled pair and, where MAGICDEC_SMOLLM2 names a folder made by tools/get_smollm2.py, SmolLM2-135M. The
page is written after every cell. Repeat the command to resume: a cell that this commit has measured is not measured
again (--restart forgets them).
"""

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from statistics import median
from typing import Any

import magicdec  # noqa: F401 - before PyTorch, which reads once how its threads wait

# isort: split
import render
from page import RESULTS, Cells, setting
from render import rounded, write_csv

from magicdec.config.choices import DraftConfig
from magicdec.config.load import compose
from magicdec.config.registry import DRAFTS
from magicdec.config.schema import Efficiency
from magicdec.costmodel.roofline import operators
from magicdec.costmodel.round import Setup, round_times
from magicdec.engine.audit import audit
from magicdec.engine.native import Batch, NativeEngine, warm_up
from magicdec.measure import memory, metrics
from magicdec.measure.ceilings import matmul_rate, read_bandwidth
from magicdec.measure.profile import profile_round
from magicdec.planning import build
from magicdec.planning.resolve import Plan, resolve
from magicdec.scenarios.outputs import speeds
from magicdec.tracking.progress import progress
from magicdec.units import GIB

SMOLLM2 = os.environ.get("MAGICDEC_SMOLLM2", "")
MODELS = {"tiny": ["draft=model"], "SmolLM2-135M": ["target=smollm2-135m-q4", f"target.path={SMOLLM2}"]}
CELLS = [("tiny", 24, 4096), ("tiny", 8, 8192), ("tiny", 8, 4096), ("tiny", 1, 8192), ("tiny", 8, 2048)]
CELLS += [("SmolLM2-135M", 8, 4096)]  # model, rows, context
QUICK_CELLS = [("tiny", 2, 512), ("SmolLM2-135M", 2, 256)]
DRAFTS_GAMMAS = (("self", 2), ("self", 4), ("ngram", 3), ("model", 3))
NEW_TOKENS, REPEATS, PROFILE_REPEATS = 48, 2, 20
STEPS = ("target_decode_ms", "draft_ms", "verify_ms")
RESULT = ("round_ms", "acceptance_rate", "acceptance_length", "speedup", "speedup_wall", "lossless")
RATES = {"read_gb_s": "bandwidth", "matmul_gflop_s": "rate"}


def prepared(model: str, rows: int, context: int) -> Plan:
    """Return a plan as `launch.py` would make it. The largest gamma gives the caches room for all."""
    largest = max(gamma for _, gamma in DRAFTS_GAMMAS)
    sizes = [f"batch.context_len={context}", f"batch.size={rows}", f"batch.generate_len={NEW_TOKENS}"]
    return resolve(compose([*MODELS[model], f"draft.gamma={largest}", "hardware=cpu", *sizes]))


def measure_cell(model: str, rows: int, context: int) -> dict[str, Any]:
    """Measure every draft on one prefill, and what the machine can do at most, in the same minutes."""
    plan = prepared(model, rows, context)
    prompts = build.prompts(plan, build.tokenizer(plan)).tokens
    peak = memory.Peak(plan.device)
    with progress() as bars:
        engine = build.engine(plan, bars)
    opened = engine.open(prompts)
    prefill = opened.decoder.prefill(engine.prefill_chunk)
    kinds = [(name, gamma) for name, gamma in DRAFTS_GAMMAS if name != "model" or plan.draft is not None]
    measured = [measure(plan, engine, opened, name, gamma) for name, gamma in kinds]
    weights = sum(part.step_weight_bytes for part in (engine.target, engine.draft_model) if part is not None)
    found: dict[str, Any] = {"attention": plan.config.attention, "prefill": prefill, "drafts": measured}
    found |= {"peak": peak.num_bytes / GIB, "held": (weights + opened.decoder.cache.num_bytes) / GIB}
    bandwidth, rate = (max(row[key] for row in measured) for key in ("bandwidth", "rate"))  # the machine's best
    setup = at_the_limit(plan, DRAFTS["self"].facts(), 1e9 * bandwidth, 1e9 * rate)
    return found | {"prefill_limit": prefill_limit(setup)}


def measure(plan: Plan, engine: NativeEngine, opened: Batch, name: str, gamma: int) -> dict[str, Any]:
    """Measure pairs of an autoregressive and a speculative pass, the audit, and the parts of a round."""
    config = plan.config.draft if name == "model" else DRAFTS[name].facts()
    model = engine.draft_model if name == "model" else None
    draft = replace(engine, draft=replace(config, gamma=gamma), draft_model=model).draft_for(opened.decoder)
    batch = Batch(opened.decoder, draft)
    warm_up(batch)
    pairs = [(batch.decoder.generate(), batch.decoder.generate(draft)) for _ in range(REPEATS)]
    passes = [[metrics.speed_metrics([metrics.row_times(one, 0.0)]) for one in way] for way in zip(*pairs, strict=True)]
    found = {"draft": name, "gamma": gamma, **speeds(*passes)}
    found |= {"lossless": audit(batch.decoder, pairs[0][0].tokens, pairs[0][1].tokens).passed}
    found |= metrics.acceptance_metrics([fast for _, fast in pairs])
    before, times, after = ceilings(plan), profile_round(batch, PROFILE_REPEATS), ceilings(plan)
    bandwidth, rate = (max(pair) for pair in zip(before, after, strict=True))
    limits = round_times(at_the_limit(plan, config, bandwidth, rate), gamma)
    found |= times | {"bandwidth": bandwidth / 1e9, "rate": rate / 1e9}
    return found | {"limits": [1e3 * step.total for step in (limits.target, limits.draft, limits.verify)]}


def ceilings(plan: Plan) -> tuple[float, float]:
    """Return the bytes per second that the machine reads, and the FLOPs per second of a large matmul, measured now."""
    return read_bandwidth(plan.device), matmul_rate(plan.device, plan.dtype)


def at_the_limit(plan: Plan, draft: DraftConfig, bandwidth: float, rate: float) -> Setup:
    """Return what to predict for a machine on which every operator takes max(bytes / bandwidth, FLOPs / rate)."""
    everything = Efficiency(1.0, 1.0, matmul_half_rows=0.0, layer_overhead_us=0.0, round_overhead_us=0.0)
    hardware = replace(plan.config.hardware, efficiency=everything)
    found = replace(plan, config=replace(plan.config, draft=draft, hardware=hardware))
    return found.setup(bandwidth / 1e9, rate / 1e12)


def prefill_limit(setup: Setup) -> float:
    """Return the limit of a prefill in seconds: a token sees half of the context on average, and few need logits."""
    whole = setup.target_pass._replace(query_tokens=setup.context, cached_tokens=setup.context / 2)
    steps = [op for op in operators(whole, setup.hardware) if op.name not in ("head", "choice")]
    device = setup.hardware.device
    return sum(op.number * max(op.bytes / device.bandwidth, op.flops / device.flops) for op in steps)


def write(found: dict[str, Any], cells: list[tuple[str, int, int]]) -> None:
    """Write the CSV files and the page of the cells that have been measured."""
    steps, wholes = [], []
    for model, rows, context in cells:
        if (cell := found.get(name_of(model, rows, context))) is None:
            continue
        where = {"target": model, "batch": rows, "context": context}
        by = {"measured_by": f"{setting()}, attention={cell['attention']}"}
        for row in cell["drafts"]:
            line = where | {"draft": row["draft"], "gamma": row["gamma"]}
            for step, limit in zip(STEPS, row["limits"], strict=True):
                line |= {step: row[step], f"{step.removesuffix('_ms')}_of_limit": limit / row[step] if limit else None}
            line |= {"autoregressive_ms": row["autoregressive/time_per_output_token_ms"]}
            line |= {key: row[key] for key in RESULT}
            settings = {"generate_len": NEW_TOKENS, "repeats": REPEATS, "profile_repeats": PROFILE_REPEATS}
            steps.append(rounded(line | settings | by))
        rates = {key: median(row[name] for row in cell["drafts"]) for key, name in RATES.items()}
        prefill = {"prefill_s": cell["prefill"], "prefill_of_limit": cell["prefill_limit"] / cell["prefill"]}
        wholes.append(rounded(where | rates | prefill | {"peak_gib": cell["peak"], "held_gib": cell["held"]} | by))
    write_csv(RESULTS / "cpu.csv", steps)
    write_csv(RESULTS / "cpu-cells.csv", wholes)
    render.write("cpu")


def name_of(model: str, rows: int, context: int) -> str:
    return f"{model}, {rows} x {context}"


def main() -> None:
    """Measure what is missing, and write the page after every cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small cells; write nothing")
    parser.add_argument("--restart", action="store_true", help="forget what has been measured")
    arguments = parser.parse_args()
    cells = [cell for cell in (QUICK_CELLS if arguments.quick else CELLS) if SMOLLM2 or cell[0] == "tiny"]
    found = Cells("cpu", restart=arguments.quick or arguments.restart)
    for cell in cells:
        if name_of(*cell) in found:
            continue
        with ProcessPoolExecutor(1, get_context("spawn")) as own:  # which has no memory of the cell before
            found[name_of(*cell)] = own.submit(measure_cell, *cell).result()
        print(f"measured {name_of(*cell)}", flush=True)
        if not arguments.quick:
            found.save()
            write(found, cells)


if __name__ == "__main__":
    main()
