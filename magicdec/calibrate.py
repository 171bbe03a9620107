"""`magicdec calibrate`: measure what a machine achieves, and write it as an option of the group hardware.

    magicdec calibrate                       # about a minute; predictions then take hardware=calibrated
    magicdec calibrate --name my-h200 --run runs/RUN_ID    # from runs of scenario=profile, here or elsewhere

Calibrating times a few steps of our engine. Every third point is held back first, so that the errors that are
reported are those of points it has not seen; the file is then fitted to all of them.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml

from magicdec.architectures import ModelConfig
from magicdec.config.load import compose
from magicdec.config.schema import Efficiency
from magicdec.costmodel.calibration import ON_CPUS, OWN, Calibration, calibrate, errors_of, option_yaml
from magicdec.costmodel.hardware import CPU, OWN_STACK, Hardware, configured, device_in
from magicdec.costmodel.roofline import BF16
from magicdec.costmodel.tables import Row
from magicdec.costmodel.targets import from_values
from magicdec.data import PromptRequest, load_prompts
from magicdec.engine.native import warm_up
from magicdec.errors import USER_ERROR, UserError, to_stderr
from magicdec.measure.ceilings import matmul_rate, read_bandwidth
from magicdec.measure.profile import profile_round
from magicdec.planning import build
from magicdec.planning.resolve import resolve
from magicdec.rules import FileName, parse
from magicdec.tracking.cells import new_table
from magicdec.tracking.console import Console
from magicdec.tracking.progress import progress
from magicdec.tracking.store import shown

OPTIONS = Path("conf", "hardware")  # of the working directory
WRITTEN_BY = "Written by: magicdec calibrate"
HELD_BACK = 3  # every so many points
REPEATS = 5
BUDGET = 256
# Small and large models, because a small one's steps say little about weights. Rows, contexts, gammas.
TARGETS = {
    "cpu": (["target=tiny"], ["target=smollm2-135m", "target.weights=random"]),
    "cuda": (["target=llama-3.2-1b", "target.weights=random"], ["target=llama-3.1-8b", "target.weights=random"]),
}
GRIDS = {"cpu": ((1, 4, 8), (1024, 4096), (2,)), "cuda": ((1, 8, 32), (2048, 8192), (1, 4))}
ELEMENT_BYTES = {"float32": 4.0, "bfloat16": BF16, "float16": 2.0}
STEPS = {"target": "T_T", "draft": "T_D", "verify": "T_V"}


class Measured(NamedTuple):
    """Timed points, and the machine to fit, which is not calibrated yet."""

    rows: list[Row]
    models: dict[str, ModelConfig]
    machine: Hardware
    source: str  # what was measured, in words
    values: dict[str, Any]  # of the group hardware


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="magicdec calibrate", description="Measure what a machine achieves.")
    parser.add_argument("--name", default="calibrated", help="name of the option to write: conf/hardware/NAME.yaml")
    parser.add_argument("--run", action="append", type=Path, default=[], help="folder of a run of scenario=profile")
    parser.add_argument("override", nargs="*", help="KEY=VALUE of what is timed, such as target=llama-3.1-8b")
    arguments = parser.parse_args(argv)
    try:
        parse(FileName, arguments.name, "--name")  # type: ignore[arg-type]
        path = OPTIONS / f"{arguments.name}.yaml"
        if path.exists() and WRITTEN_BY not in path.read_text(encoding="utf-8"):
            raise UserError(f"--name {arguments.name}: {shown(path)} is there already; choose another name")
        if arguments.run and arguments.override:
            raise UserError(f"{arguments.override[0]}: --run has measured already; leave one of them out")
        measured = of_runs(arguments.run) if arguments.run else measure_here(arguments.override)
        write(path, measured)
    except UserError as error:
        to_stderr(f"error: {error}")
        return USER_ERROR
    return 0


def write(path: Path, measured: Measured) -> None:
    """Fit the machine, show the errors of points that it has not seen, and write the option."""
    console = Console(file=sys.stdout)
    seen = [row for number, row in enumerate(measured.rows) if number % HELD_BACK != 1]
    unseen = [row for number, row in enumerate(measured.rows) if number % HELD_BACK == 1]
    before = configured(measured.machine.name, *_figures(measured.machine), stack=OWN_STACK)
    table = new_table("errors, median and worst", *STEPS.values())
    cases = {"before": (before, measured.rows)}
    if unseen:
        cases["held back"] = (_fit(measured, seen).machines[measured.machine.name], unseen)
    calibration = _fit(measured, measured.rows)
    machine = calibration.machines[measured.machine.name]
    cases["after"] = (machine, measured.rows)
    for name, (candidate, rows) in cases.items():
        found = [errors_of(candidate, row, measured.models.__getitem__) for row in rows]
        table.add_row(name, *(_summary([one[step] for one in found if step in one]) for step in STEPS))
    console.print(table)
    origin = [f"{measured.source}: {calibration.num_rows} points. {WRITTEN_BY}"]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(option_yaml(machine, measured.values, origin), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {shown(path)}: {error.strerror}; run it in a folder of your own") from error
    console.print(f"{shown(path)}: predictions take it with hardware={path.stem}", soft_wrap=True)


def measure_here(overrides: Sequence[str]) -> Measured:
    """Time a few steps on this machine: of the models of TARGETS, or of the target that `overrides` name."""
    rows: list[Row] = []
    models: dict[str, ModelConfig] = {}
    rates = []
    device = resolve(compose(["target=tiny", *_other(overrides)])).device.type
    own = any(text.startswith("target") for text in overrides)
    for target in [[]] if own else TARGETS[device]:
        points = list(product(*GRIDS[device]))
        sizes = [f"batch.size={max(GRIDS[device][0])}", f"batch.context_len={max(GRIDS[device][1])}"]
        plan = resolve(compose(["scenario=profile", f"cache.budget={BUDGET}", *sizes, *target, *overrides]))
        models[plan.config.target.name] = plan.target.config
        with progress() as bars, bars.task(f"timing {plan.config.target.name}", total=len(points)) as task:
            rates.append((read_bandwidth(plan.device), matmul_rate(plan.device, plan.dtype)))
            for point in time_points(plan, bars, points):
                rows.append(row_of(plan.config.target.name, point, BUDGET))
                task.advance(1)
            rates.append((read_bandwidth(plan.device), matmul_rate(plan.device, plan.dtype)))
    known, ranks = device_in(plan.device_name), plan.config.hardware.tensor_parallel
    bandwidth, flops = (max(rate) for rate in zip(*rates, strict=True))
    name = known.name if known else CPU if device == "cpu" else plan.device_name
    figures = {} if known else {"bandwidth_gbs": round(bandwidth / 1e9, 2), "tflops": round(flops / 1e12, 4)}
    start = Efficiency() if known else None  # of a CPU: its fractions so far, which have no tensor cores
    machine = configured(name, ranks, **figures, efficiency=start, stack=OWN_STACK)
    rows = [replace(row, hardware=machine.name) for row in rows]
    values = {"name": name, "device": device, "tensor_parallel": ranks, **figures}
    return Measured(rows, models, machine, plan.device_name, values)


def time_points(plan: Any, bars: Any, points: Iterable[tuple[int, int, int]]) -> Iterable[dict[str, Any]]:
    """Yield the times of a round's steps over caches of noise, at each point (rows, context, gamma)."""
    engine = build.engine(plan, bars)
    for rows, context, gamma in points:
        prompts = load_prompts("random", PromptRequest(rows, context, plan.target.config.vocab_size))
        batch = replace(engine, draft=replace(engine.draft, gamma=gamma)).open(prompts.tokens)
        batch.simulate_prefill()
        warm_up(batch)
        point = {"rows": rows, "context": context, "gamma": gamma, **profile_round(batch, REPEATS)}
        batch.close()
        stored = BF16 if plan.in_bfloat16(plan.target) else None
        yield point | {"element_bytes": plan.dtype.itemsize, "weight_bytes": stored}


def row_of(model: str, point: Mapping[str, Any], budget: int) -> Row:
    """Return a timed point of self-speculation over a streaming cache as a row to fit."""
    return Row(
        target=model,
        draft="self",
        policy="streaming",
        hardware=CPU,
        context_len=point["context"],
        batch_size=point["rows"],
        gamma=point["gamma"],
        kv_budget=budget,
        draft_ms=point["gamma"] * point["draft_ms"],
        verify_ms=point["verify_ms"],
        omega=1.0,
        autoregressive_ms=point["target_decode_ms"],
        speculative_ms=point["round_ms"],
        element_bytes=point["element_bytes"],
        weight_bytes=point["weight_bytes"],
    )


def of_runs(folders: Sequence[Path]) -> Measured:
    """Return the points of runs of scenario=profile, which must be of one machine."""
    rows: list[Row] = []
    models: dict[str, ModelConfig] = {}
    machines: dict[str, Hardware] = {}
    for folder in folders:
        try:
            config = yaml.safe_load((folder / "config.yaml").read_text())
            history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
        except (OSError, ValueError) as error:
            raise UserError(f"{folder}: not a finished run of scenario=profile ({error})") from None
        if config["scenario"]["name"] != "profile" or not history:
            raise UserError(f"{folder}: not a finished run of scenario=profile")
        hardware, draft = config["hardware"], config["draft"]
        models |= {one["name"]: _architecture(one) for one in (config["target"], draft.get("model")) if one}
        machine = configured(
            hardware["name"],
            hardware["tensor_parallel"],
            hardware["bandwidth_gbs"],
            hardware["tflops"],
            hardware["memory_gib"],
            Efficiency(),
        )
        machines[machine.name] = machine
        rows += profile_rows(config, history)
    if len(machines) > 1:
        raise UserError(f"--run: the runs are of several machines ({', '.join(machines)}); calibrate one at a time")
    keys = ("name", "device", "tensor_parallel", "bandwidth_gbs", "tflops", "memory_gib")
    values = {key: hardware[key] for key in keys if hardware.get(key) is not None}
    return Measured(rows, models, machine, ", ".join(map(str, folders)), values)


def profile_rows(config: Mapping[str, Any], history: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return a row for every point of a run of scenario=profile, from its parsed config.yaml and history.jsonl.

    A profile accepts no proposals, so a round counts as one token (omega 1). Raise UserError for a draft that a row
    cannot describe.
    """
    draft, cache = config["draft"], config["cache"]
    if draft["name"] not in ("self", "model") or draft["quantization"] != "none":
        raise UserError(
            f"draft={draft['name']} with draft.quantization={draft['quantization']}: a calibration needs draft=self or "
            "draft=model, unquantized"
        )
    return [
        Row(
            target=config["target"]["name"],
            draft=draft["model"]["name"] if draft["name"] == "model" else draft["name"],
            policy=cache["policy"],
            hardware=config["hardware"]["name"],
            context_len=point["context_len"],
            batch_size=point["batch_size"],
            gamma=point["gamma"],
            table="profile",
            kv_budget=cache["budget"],
            draft_ms=point["gamma"] * point["time/draft_ms"],
            verify_ms=point["time/verify_ms"],
            omega=1.0,
            autoregressive_ms=point["time/target_decode_ms"],
            speculative_ms=point["time/round_ms"],
            element_bytes=ELEMENT_BYTES[config["hardware"]["dtype"]],
        )
        for point in history
    ]


def _fit(measured: Measured, rows: Sequence[Row]) -> Calibration:
    priors = ON_CPUS if measured.machine.device.num_sms is None else OWN
    return calibrate(rows, measured.models.__getitem__, {measured.machine.name: measured.machine}, priors)


def _figures(machine: Hardware) -> tuple[int, float, float]:
    """Return the count, GB/s and TFLOP/s of a machine."""
    return machine.count, machine.device.bandwidth / 1e9, machine.device.flops / 1e12


def _summary(errors: Sequence[float]) -> str:
    """Return the median of absolute errors, and the worst with its sign."""
    if not errors:
        return "-"
    return f"{median(map(abs, errors)):.0%}, {max(errors, key=abs):+.0%}"


def _other(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that do not describe the target."""
    return [text for text in overrides if not text.startswith("target")]


def _architecture(choice: Mapping[str, Any]) -> ModelConfig:
    if not choice.get("architecture"):
        raise UserError(f"target={choice['name']} has no architecture in its configuration; take one that names it")
    return from_values(choice["architecture"])
