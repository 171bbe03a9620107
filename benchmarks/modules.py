"""Measure what a model costs that runs as transformers' modules, and how well that is predicted.

    python benchmarks/modules.py            # 15 minutes on two idle cores; writes docs/results/modules-*.csv and the page; needs scipy
    python benchmarks/modules.py --quick    # a minute: small sizes; prints the tables, and is no measurement
    python benchmarks/modules.py --smollm2 FOLDER   # the weights of the first part; random ones of its sizes otherwise

Repeat the command to resume: cells that this commit has measured are not measured again (--restart
forgets them).

The cost: SmolLM2-135M by our own transformer and by transformers' modules, in pairs that alternate,
one step and one prefill of each. The experts: T_T, T_V(gamma) and T_D of a Qwen3-MoE and a gpt-oss
of that width with random weights, over batch and context, and how many experts a pass touches.
Random routers choose nearly uniformly, which touches most. The cost model is calibrated by half of
a model's cells and predicts the other half, and the other way round.
"""  # noqa: E501

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from page import RESULTS, Cells, setting
from render import Row, table, write, write_csv
from torch.profiler import ProfilerActivity, profile
from transformers import GptOssConfig, LlamaConfig, Qwen3MoeConfig

from magicdec.attention.cpp import CppAttention
from magicdec.calibrate.steps import row_of
from magicdec.config.groups import BatchConfig, HardwareConfig, SamplingConfig
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.costmodel import hardware
from magicdec.costmodel.calibration import OF_EXPERTS, calibrate
from magicdec.costmodel.hardware import Hardware, configured
from magicdec.costmodel.round import round_times
from magicdec.costmodel.speedup import omega
from magicdec.costmodel.stacks import OWN_STACK
from magicdec.engine.native import NativeEngine
from magicdec.measure.ceilings import matmul_rate, read_bandwidth
from magicdec.measure.expert_choices import recording
from magicdec.models.adapter.load_modules import load, random
from magicdec.models.checkpoint import load as load_native
from magicdec.models.description import describe, read_config
from magicdec.models.kv_cache import KVCache
from magicdec.models.transformer import Transformer
from magicdec.scenarios.profile import time_points

CPU, FP32 = torch.device("cpu"), torch.float32
WIDTH = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
}
SMOLLM2 = WIDTH | {"num_hidden_layers": 30, "intermediate_size": 1536}
EXPERTS = {
    "qwen3-moe": Qwen3MoeConfig(
        **WIDTH,
        num_hidden_layers=12,
        head_dim=64,
        intermediate_size=1536,
        moe_intermediate_size=384,
        num_experts=32,
        num_experts_per_tok=4,
    ),
    "gpt-oss": GptOssConfig(
        **WIDTH,
        num_hidden_layers=12,
        head_dim=64,
        intermediate_size=576,
        num_local_experts=16,
        num_experts_per_tok=4,
        sliding_window=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}
GAMMAS, BUDGET, ALPHA = (1, 2, 3, 5, 8), 256, 0.8
PAIRED = ((1, 8), (1024, 4096), 7)  # batches, contexts and repeats of the first part
TIMED = ((1, 4, 16), (1024, 4096), 5)  # of the others
QUICK = ((1, 2), (128, 256), 2)


def pairs_at(
    checkpoint: Callable[[], Path], batch: int, context: int, repeats: int
) -> Iterator[Row]:
    """Yield the times of a step, of a verification and of a prefill, of both implementations."""
    folder = checkpoint()
    models = {"native": native(folder), "modules": as_modules(folder, context + 128)}
    for kind, num_new in (("step", 1), ("verification of 4", 4), ("prefill", 128)):
        runs = {name: pass_of(model, batch, context, num_new) for name, model in models.items()}
        times = alternating(runs, repeats)
        yield {
            "pass": kind,
            "batch": batch,
            "context": context,
            **{f"{name}_ms": median(seen) for name, seen in times.items()},
            "ratio": median(b / a for a, b in zip(*times.values(), strict=True)),
        }


def operators_at(checkpoint: Callable[[], Path], context: int) -> Iterator[Row]:
    """Yield how many of PyTorch's operators a step of one row calls, those within others
    included.
    """
    folder = checkpoint()
    models = {"native": native(folder), "modules": as_modules(folder, context + 128)}
    counts: Row = {}
    for name, model in models.items():
        run = pass_of(model, 1, context, 1)
        run()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            run()
        called = [event for event in profiled.key_averages() if event.key.startswith("aten::")]
        counts[name] = sum(event.count for event in called)
    yield {"layers": models["native"].config.num_layers, **counts}


def native(folder: Path) -> Transformer:
    """Return a checkpoint in our own transformer."""
    config = read_config(folder, "native")
    with torch.device("meta"):
        model = Transformer(config, CppAttention())
    model.load_state_dict(load_native(folder, config, FP32, CPU), assign=True)
    return model.eval().requires_grad_(False)


def as_modules(folder: Path, longest: int) -> Transformer:
    """Return a checkpoint as transformers' modules."""
    config: Any = read_config(folder, "transformers")
    return load(folder, config, FP32, CPU, CppAttention(), longest)


def pass_of(model: Transformer, batch: int, context: int, num_new: int) -> Callable[[], None]:
    """Return a pass of so many new tokens behind a context, with the logits of a decoding."""
    cache = KVCache(model.config, batch, context + num_new, FP32, "cpu")
    cache.k_LBKSD.normal_()
    cache.v_LBKSD.normal_()
    tokens_BT = torch.randint(0, model.config.vocab_size, (batch, num_new))

    @torch.inference_mode()
    def run() -> None:
        cache.seqlens_B.fill_(context)
        hidden_BTE = model(tokens_BT, cache)
        model.logits(hidden_BTE[:, -4:])

    return run


def alternating(runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Return the milliseconds of each repeat, in turns that begin with another one each time."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            start = time.perf_counter()
            runs[name]()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: seen[1:] for name, seen in times.items()}


@cache
def target_of(name: str) -> Transformer:
    """Return a model with experts and random weights."""
    config: Any = describe(EXPERTS[name].to_dict(), name, "transformers")
    longest = config.max_position_embeddings
    return random(config, FP32, CPU, CppAttention(), longest)


def experts_at(name: str, batch: int, context: int, repeats: int) -> Iterator[Row]:
    """Yield T_T, T_D, T_V(gamma) and the time of a round, the experts that a pass touches, and the
    machine's rates.
    """
    rates = {"bandwidth": read_bandwidth(CPU), "rate": matmul_rate(CPU, FP32)}
    target = target_of(name)
    first = target.experts()[0]
    for gamma in GAMMAS:
        with recording([first], batch) as [passes]:
            [point] = time_points(engine(target, gamma), [(batch, context, gamma)], repeats)
        touched = {
            chosen_BTK.shape[1]: chosen_BTK.unique().numel() / int(first.num_experts)  # type: ignore[call-overload]
            for chosen_BTK in passes
        }
        yield {
            "model": name,
            "batch": batch,
            "context": context,
            "gamma": gamma,
            "target_ms": point["time/target_decode_ms"],
            **{f"{step}_ms": point[f"time/{step}_ms"] for step in ("draft", "verify", "round")},
            "experts_of_step": touched.get(1),
            "experts_of_verification": touched.get(gamma + 1),
            **rates,
        }


def with_steps_of_a_cell(rows: Sequence[Row]) -> list[Row]:
    """Return rows in which T_T, T_D and the experts of a step, which do not depend on gamma, are
    the medians over the gammas of a cell.
    """
    together = []
    for row in rows:
        cell = [one for one in rows if places_of(one) == places_of(row)]
        steps = {
            key: median(one[key] for one in cell)
            for key in ("target_ms", "draft_ms", "experts_of_step")
        }
        speedup = steps["target_ms"] * omega(row["gamma"], ALPHA) / row["round_ms"]
        together.append(row | steps | {"speedup": speedup})
    return together


def places_of(row: Row) -> tuple[Any, ...]:
    """Return what names the cell of a row."""
    return row["model"], row["batch"], row["context"]


def with_predictions(rows: Sequence[Row]) -> list[Row]:
    """Return the cells of one model with the times that are predicted of them, each by a machine
    that the other half of the cells has calibrated.
    """
    machine = configured(
        hardware.CPU,
        1,
        max(row["bandwidth"] for row in rows) / 1e9,
        max(row["rate"] for row in rows) / 1e12,
        stack=OWN_STACK,
    )
    batches = sorted({row["batch"] for row in rows})
    contexts = sorted({row["context"] for row in rows})

    def half_of(row: Row) -> int:  # of a chessboard: neighbours in batch or context differ
        return (batches.index(row["batch"]) + contexts.index(row["context"])) % 2

    machines = {}
    for half in (0, 1):
        points = [fitted_row(row) for row in rows if half_of(row) == half]
        calibration = calibrate(points, architecture, {hardware.CPU: machine}, OF_EXPERTS)
        machines[half] = calibration.machines[hardware.CPU]
    return [row | times_of(row, machines[1 - half_of(row)]) for row in rows]


def fitted_row(row: Row) -> Any:
    """Return a cell as a row to fit."""
    point = {"context_len": row["context"], "batch_size": row["batch"], "gamma": row["gamma"]}
    names = {"target_decode": "target", "draft": "draft", "verify": "verify", "round": "round"}
    point |= {f"time/{name}_ms": row[f"{ours}_ms"] for name, ours in names.items()}
    return row_of(row["model"], point | {"element_bytes": 4.0, "weight_bytes": None}, BUDGET)


def architecture(name: str) -> Any:
    """Return the sizes of a model with experts."""
    return describe(EXPERTS[name].to_dict(), name, "transformers").as_predicted()


def times_of(row: Row, machine: Hardware) -> Row:
    """Return what is predicted of a cell, and by how much it is wrong."""
    times = round_times(fitted_row(row).setup(architecture, machine), row["gamma"])
    steps = {"target": times.target, "draft": times.draft, "verify": times.verify}
    predicted = {step: 1e3 * time.total for step, time in steps.items()}
    errors = {f"{step}_error": ms / row[f"{step}_ms"] - 1 for step, ms in predicted.items()}
    return {f"predicted_{step}_ms": ms for step, ms in predicted.items()} | errors


def engine(target: Transformer, gamma: int) -> NativeEngine:
    """Return an engine that speculates over a streaming cache."""
    draft = DRAFTS["self"].facts(gamma=gamma, synthetic_acceptance=ALPHA)
    cache = POLICIES["streaming"].facts(budget=BUDGET, num_sink=4)
    hardware = HardwareConfig("cpu", "cpu", "float32", 1, "auto", False, False)
    batch = BatchConfig(1, 1, 32, 1, 128)
    return NativeEngine(batch, SamplingConfig(ignore_eos=True), draft, cache, hardware, target)


def random_checkpoint(folder: Path) -> Path:
    """Write a Llama with random weights of SmolLM2's sizes."""
    from transformers import AutoModelForCausalLM

    config = LlamaConfig(**SMOLLM2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def main() -> None:
    """Measure what is missing, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes; print the tables")
    parser.add_argument("--restart", action="store_true", help="forget the cells measured so far")
    parser.add_argument("--smollm2", type=Path, metavar="FOLDER", help="its checkpoint")
    options = parser.parse_args()
    cells = Cells("modules-quick" if options.quick else "modules", options.restart)
    with tempfile.TemporaryDirectory() as scratch:
        measure(cells, options, Path(scratch))
    cost = [row for key, rows in cells.items() if key.startswith("cost") for row in rows]
    experts = []
    for name in EXPERTS:
        rows = [row for key, rows in cells.items() if key.startswith(name) for row in rows]
        experts += with_predictions(with_steps_of_a_cell(rows))
    if options.quick:
        print(table(cost, "pass", "batch", "context", "native_ms:.1f", "ratio:.2f"))
        times = [
            f"{step}_{what}" for step in ("target", "verify") for what in ("ms:.1f", "error:.0%")
        ]
        print(table(experts, "model", "batch", "context", "gamma", *times))
        return
    write_csv(RESULTS / "modules-cost.csv", cost)
    write_csv(RESULTS / "modules-operators.csv", cells["operators"])
    write_csv(RESULTS / "modules-experts.csv", experts)
    write("modules")


def measure(cells: Cells, options: argparse.Namespace, scratch: Path) -> None:
    """Measure the cells that are missing, and keep each when it is measured."""
    smollm2 = cache(lambda: options.smollm2 or random_checkpoint(scratch))
    parts: dict[str, Callable[[], Iterator[Row]]] = {}
    *sizes, repeats = QUICK if options.quick else PAIRED
    for batch, context in product(*sizes):
        cell = partial(pairs_at, smollm2, batch, context, repeats)
        parts[f"cost {batch} x {context}"] = cell
    parts["operators"] = partial(operators_at, smollm2, sizes[1][0])
    *sizes, repeats = QUICK if options.quick else TIMED
    for name, batch, context in product(EXPERTS, *sizes):
        cell = partial(experts_at, name, batch, context, repeats)
        parts[f"{name} {batch} x {context}"] = cell
    for key, cell in parts.items():
        if key not in cells:
            cells[key] = [row | {"measured_by": setting()} for row in cell()]
            cells.save()
            print(f"measured {key}", flush=True)


if __name__ == "__main__":
    main()
