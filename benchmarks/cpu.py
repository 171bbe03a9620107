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
from page import RESULTS, Cells, provenance

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
from magicdec.tracking.cells import markdown_table
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


def page(found: dict[str, Any], cells: list[tuple[str, int, int]]) -> str:
    """Return the page as Markdown, with the cells that have been measured."""
    steps, wins, whole, attention = [], [], [], set()
    for model, rows, context in cells:
        if (cell := found.get(name_of(model, rows, context))) is None:
            continue
        attention.add(cell["attention"])
        where = [model, str(rows), f"{context:,}"]
        for row in cell["drafts"]:
            name = [*where, row["draft"], str(row["gamma"])]
            shares = zip(STEPS, row["limits"], strict=True)
            times = [text for step, limit in shares for text in (f"{row[step]:.2f}", share(limit, row[step]))]
            ratio = row["target_decode_ms"] / row["verify_ms"]
            steps.append([*name, *times, f"{row['round_ms']:.1f}", f"{ratio:.2f}"])
            speed = [f"{row[key]:.2f}" for key in ("acceptance_rate", "acceptance_length", "speedup", "speedup_wall")]
            step = f"{row['autoregressive/time_per_output_token_ms']:.1f}"
            wins.append([*name, step, *speed, "yes" if row["lossless"] else "NO"])
        speed = [f"{median(row[key] for row in cell['drafts']):.1f}" for key in ("bandwidth", "rate")]
        filled = [f"{cell['prefill']:.1f}", share(cell["prefill_limit"], cell["prefill"])]
        held = [f"{cell['peak']:.3f}", f"{cell['held']:.3f}", f"{cell['peak'] / cell['held']:.2f}"]
        whole.append([*where, *speed, *filled, *held])
    step_header = [text for step in ("T_T", "T_D", "T_V") for text in (f"{step}, ms", "of limit")]
    name_header = ["target", "batch", "context", "draft", "gamma"]
    whole_header = [
        "read, GB/s",
        "matmul, GFLOP/s",
        "prefill, s",
        "of limit",
        "peak, GiB",
        "weights + KV, GiB",
        "ratio",
    ]
    win_header = ["AR, ms", "rate", "length", "speedup", "speedup_wall", "lossless"]
    return PAGE.format(
        finding=finding([row for cell in found.values() for row in cell["drafts"]]),
        provenance=provenance("python benchmarks/cpu.py"),
        attention=", ".join(sorted(attention)),
        budget=compose([]).cache.budget,
        new=NEW_TOKENS,
        repeats=REPEATS,
        profile_repeats=PROFILE_REPEATS,
        steps=markdown_table([*name_header, *step_header, "round, ms", "T_T / T_V"], steps),
        wins=markdown_table([*name_header, *win_header], wins),
        whole=markdown_table([*name_header[:3], *whole_header], whole),
    )


def finding(rows: list[dict[str, Any]]) -> str:
    """Return what the rows of all cells come to, in two sentences."""
    per_row, per_batch = (
        {name: ranged([row[key] for row in rows if row["draft"] == name], "x") for name in ("self", "ngram")}
        for key in ("speedup", "speedup_wall")
    )
    shares = [
        ranged([limit / row[step] for row in rows if (limit := row["limits"][i])]) for i, step in enumerate(STEPS)
    ]
    return (
        f"Self-speculation decodes {per_row['self']} as fast per row as autoregressive decoding, "
        f"and {per_batch['self']} per batch;\nn-grams {per_row['ngram']} and {per_batch['ngram']}. "
        f"Of what memory and arithmetic allow, a decode step of the target reaches\n"
        f"{shares[0]}, a draft step {shares[1]}, and a verification {shares[2]}."
    )


def ranged(values: list[float], unit: str = "") -> str:
    """Return the least and the greatest value."""
    return f"{min(values):.2f}{unit} to {max(values):.2f}{unit}"


def share(limit: float, time: float) -> str:
    """Return the share of its limit that a time reaches; nothing where there is no limit to speak of."""
    return f"{limit / time:.2f}" if limit else ""


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
            (RESULTS / "cpu.md").write_text(page(found, cells))
    print(page(found, cells))


PAGE = """# Decoding on a CPU

{finding}

{provenance}, attention by {attention}, fp32, greedy, {new} new tokens. `self` and `model` draft over a streaming cache
of {budget} entries. `tiny` is the bundled target, and its independent draft the bundled one. SmolLM2-135M is the
instruct model after 4-bit quantisation, dequantised. All weights are stored, and read, in bfloat16.

## The steps of a round and their limit

Medians of {profile_repeats} alternating steps at the end of the prompts. The limit of a step is the sum over its
operators of max(bytes / read bandwidth, FLOPs / matmul rate); both are measured right before and right after, and the
higher counts. `of limit` is the limit over the time, 1.00 at best.

{steps}
## Speedup over our own autoregressive decoding

Medians of {repeats} pairs on one prefill. AR is autoregressive time per token. `speedup` is of times per token,
`speedup_wall` of the time until the last row is done.

{wins}
## Prefill and memory

Read bandwidth is that of a sum over a large tensor, the matmul rate that of a large square matmul in fp32. The limit of
a prefill is that of its matmuls and its attention, at the highest of both in the cell. Memory is what a
process of the cell's own grew by, from before the weights were loaded.

{whole}"""


if __name__ == "__main__":
    main()
