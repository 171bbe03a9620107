"""Read timed points from files: runs of scenario=profile and scenario=serve, and results of load
generators.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from magicdec.architectures.model_config import ModelConfig
from magicdec.calibrate.steps import (
    ELEMENT_BYTES,
    FIGURES,
    Measured,
    measured,
    profile_rows,
    rates_of,
    this_machine,
)
from magicdec.config.load import compose
from magicdec.costmodel.hardware import CPU
from magicdec.costmodel.tables import Row
from magicdec.costmodel.targets import from_values
from magicdec.errors import UserError
from magicdec.inputs.others import from_json
from magicdec.peers.results.base import LoadResult
from magicdec.peers.results.read import read_results
from magicdec.planning.resolve import resolve
from magicdec.tracking.reader import RESULT, load_run
from magicdec.tracking.run_files import ROW, read_lines

BASELINE = "autoregressive/"


class Source(NamedTuple):
    """A model on a machine, as described by a run's configuration or the command line."""

    model: str
    models: dict[str, ModelConfig]
    hardware: Mapping[str, Any]
    device_name: str = ""
    weight_bytes: float | None = None  # None: as activations

    @property
    def element_bytes(self) -> float:
        """Return the bytes of a key, a value or an activation."""
        return ELEMENT_BYTES[self.hardware["dtype"]]


Given = Callable[[], Source | None]  # that of the command line, evaluated only when a file needs it


def of_results(paths: Sequence[Path], overrides: Sequence[str]) -> Measured:
    """Return the points of files, which must be of one machine. Overrides, if any, name the target
    and the machine.
    """
    given = cache(lambda: given_source(overrides) if overrides else None)
    parts = [
        measured(
            rows, source.models, source.hardware, "", source.device_name, _rates(source), is_served
        )
        for source, rows, is_served in [_of_file(path, given) for path in paths]
    ]
    machines = list(dict.fromkeys(part.machine.name for part in parts))
    if len(machines) > 1:
        raise UserError(
            f"--results: of several machines ({', '.join(machines)}); calibrate one at a time"
        )
    return parts[0]._replace(
        rows=[row for part in parts for row in part.rows],
        models={name: model for part in parts for name, model in part.models.items()},
        source=", ".join(map(str, paths)),
        is_served=any(part.is_served for part in parts),
    )


def given_source(overrides: Sequence[str]) -> Source:
    """Return the target and the machine that overrides describe."""
    plan = resolve(compose(["scenario=predict", "batch.context_len=64", *overrides]))
    hardware = asdict(plan.config.hardware)
    dtype = hardware["dtype"]
    usual = "float32" if hardware["name"] == CPU else "bfloat16"
    hardware["dtype"] = usual if dtype == "auto" else dtype
    name = plan.config.target.name
    return Source(name, {name: plan.target.config}, hardware)


def _rates(source: Source) -> tuple[float, float] | None:
    """Return the rates that this CPU reaches, if it was the one measured. A CPU has no datasheet
    here.
    """
    if source.hardware.get("device") != "cpu" or any(source.hardware.get(key) for key in FIGURES):
        return None
    here = this_machine(["hardware=cpu"])
    return rates_of(here) if here.device_name == source.device_name else None


def _of_file(path: Path, given: Given) -> tuple[Source, list[Row], bool]:
    """Return the source of a file's points, the points, and whether a server was measured."""
    of_result = path.parent if path.name == RESULT else None
    folder = path if path.is_dir() else of_result
    if folder is not None:
        return _of_run(folder, given)
    tool, levels = read_results(path)
    source = given()
    if source is None:
        raise UserError(
            f"{path}: say what {tool} has measured, as in target=llama-3.1-8b hardware=h200"
        )
    return source, [_row_of_load(level, source, path) for level in levels], True


def _of_run(folder: Path, given: Given) -> tuple[Source, list[Row], bool]:
    run = load_run(folder)
    history = read_lines(folder / "history.jsonl", ROW) if run.get("status") == "done" else []
    if not history or run["config"]["scenario"]["name"] not in ("profile", "serve"):
        raise UserError(f"{folder}: not a finished run of scenario=profile or scenario=serve")
    config = run["config"]
    named = given()
    if named is None and config.get("engine", {}).get("name") == "openai":
        raise UserError(
            f"{folder}: name the server's machine, as in target=llama-3.1-8b hardware=h200"
        )
    source = named or Source(
        config["target"]["name"],
        _models(config),
        config["hardware"],
        str(run.get("device", "")),
    )
    source = source._replace(weight_bytes=run.get("weights/bytes"))
    is_outside = config.get("engine", {}).get("name", "native") != "native"
    if config["scenario"]["name"] == "profile" and is_outside:
        return source, outside_rows(source, history), True
    if config["scenario"]["name"] == "profile":
        rows = profile_rows(config, history, run.get("weights/bytes"))
        return source._replace(models=_models(config) | source.models), rows, False
    levels = list(filter(None, (_level(line, run) for line in history)))
    if not levels:
        raise UserError(f"{folder}: has no level without speculation; measure with draft=none")
    return source, [_row_of_load(level, source, folder) for level in levels], True


def _models(config: Mapping[str, Any]) -> dict[str, ModelConfig]:
    """Return the target of a run, and the model that drafts, if it is an independent one: other
    drafts are in no row.
    """
    draft = config["draft"]
    choices = [config["target"], *([draft["model"]] if draft["name"] == "model" else [])]
    return {choice["name"]: _architecture(choice) for choice in choices}


def _level(line: Mapping[str, Any], run: Mapping[str, Any]) -> LoadResult | None:
    """Return the autoregressive part of a line of the history of scenario=serve."""
    metrics = {
        key.removeprefix(BASELINE): value for key, value in line.items() if key.startswith(BASELINE)
    }
    if not metrics.get("tokens_per_second"):
        return None
    batch = run["config"]["batch"]
    context_len = run.get("data/context_len_mean") or batch["context_len"]
    return LoadResult(
        None, context_len, batch["generate_len"], line.get("concurrency"), line.get("rate"), metrics
    )


def _row_of_load(level: LoadResult, source: Source, where: Path) -> Row:
    """Return a level of load as a row to fit. Raise UserError for one that says nothing about a
    decode step.

    By Little's law, rate x time per token is the number of requests that decode at a time. While
    one decodes a token, others are prefilled: its time per token includes theirs.
    """
    metrics = level.metrics
    if level.speculation:
        raise UserError(
            f"{where}: the server has speculated; a calibration needs one that does not"
        )
    if not level.load:
        raise UserError(
            f"{where}: bounds neither concurrency nor rate, so that nobody knows the batch"
        )
    if not metrics.get("time_per_output_token_ms"):
        raise UserError(f"{where}: has no time per output token; measure with streaming")
    step_ms = metrics["time_per_output_token_ms"]
    requests, tokens = metrics["requests_per_second"], metrics["tokens_per_second"]
    users = level.load.get("concurrency")
    prompt_len = round(level.context_len)
    return Row(
        target=source.model,
        draft="self",
        policy="full",
        hardware=str(source.hardware["name"]),
        context_len=round(level.context_len + level.generate_len / 2),
        batch_size=max(1, round((tokens - requests) * step_ms / 1e3)),
        gamma=1,
        autoregressive_ms=step_ms,
        prompt_len=prompt_len,
        prefills=requests * step_ms / 1e3 * (1 - 1 / users if users else 1),
        # Otherwise it includes waiting.
        prefill_ms=metrics.get("time_to_first_token_ms") if users == 1 else None,
        element_bytes=source.element_bytes,
        weight_bytes=source.weight_bytes,
    )


def outside_rows(source: Source, history: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return a row for every batch and context at which a profile from outside has timed T_T."""
    cells = {
        (line["batch_size"], line["context_len"]): line
        for line in history
        if "time/target_decode_ms" in line
    }
    return [
        Row(
            target=source.model,
            draft="self",
            policy="full",
            hardware=str(source.hardware["name"]),
            context_len=round(context + line["decoded"]),
            batch_size=batch,
            gamma=1,
            autoregressive_ms=line["time/target_decode_ms"],
            element_bytes=source.element_bytes,
            weight_bytes=source.weight_bytes,
        )
        for (batch, context), line in cells.items()
    ]


def _architecture(choice: Mapping[str, Any]) -> ModelConfig:
    if not choice.get("architecture"):
        raise UserError(
            f"target={choice['name']} has no architecture in its configuration; take one that"
            " names it"
        )
    if config_json := choice["architecture"].get("config_json"):  # of transformers' modules
        # Here, because it imports PyTorch.
        from magicdec.models.description import describe

        return describe(from_json(config_json), choice["name"], "transformers", runs=False)
    return from_values(choice["architecture"])
