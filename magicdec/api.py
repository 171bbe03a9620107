"""magicdec for Python programs and notebooks: generate text, run experiments, read their results,
predict.

The functions take the configuration of the command line: the usual keys as arguments, all others as
`overrides`. All of them are attributes of the package, as in `magicdec.load`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from magicdec.config.checks import refuse_unread
from magicdec.config.load import compose, override, to_dict
from magicdec.config.schema import Config
from magicdec.costmodel.prediction import Prediction
from magicdec.errors import UserError
from magicdec.planning.fits import fitting
from magicdec.planning.resolve import resolve
from magicdec.planning.shared import SHARED
from magicdec.report.rows import read_rows, read_runs
from magicdec.scenarios import Job
from magicdec.scenarios import run as run_scenario
from magicdec.scenarios.predict import predicted
from magicdec.tracking.console import Console
from magicdec.tracking.descriptions import described_models
from magicdec.tracking.progress import progress as progress_bars
from magicdec.tracking.result_types import RunResult
from magicdec.tracking.run_files import ROW, read_lines
from magicdec.tracking.sweep import TIME

if TYPE_CHECKING:
    from pandas import DataFrame

    from magicdec.serving.loaded_model import Model

# The arguments of `load` and `predict` that set a key of another name.
KEYS = {
    "budget": "cache.budget",
    "gamma": "draft.gamma",
    "gammas": "scenario.gammas",
    "alpha": "scenario.alpha",
    "device": "hardware.device",
    "dtype": "hardware.dtype",
    "batch_size": "batch.size",
    "context_len": "batch.context_len",
    "temperature": "sampling.temperature",
    "seed": "sampling.seed",
}


def load(
    target: str | Path = "tiny",
    *,
    draft: str = "self",
    draft_model: str | Path | None = None,
    cache: str | None = None,
    budget: int | None = None,
    gamma: int | None = None,
    attention: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    batch_size: int = 8,
    context_len: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    progress: bool = True,
) -> "Model":
    """Load a target and its draft, ready to generate.

    `target` and `draft_model` are options of conf/target, or checkpoints: a path or a hub id with a
    slash in it. `batch_size` prompts are decoded together, each of up to batch.context_len +
    batch.generate_len tokens with its continuation. None means as in conf/. Raise UserError for
    mistakes, and where memory does not suffice.
    """
    # Here, because predicting and reading runs must not wait for PyTorch.
    from magicdec.scenarios.serve import served
    from magicdec.serving.loaded_model import Model

    typed = _typed(
        draft=draft, cache=cache, budget=budget, gamma=gamma, attention=attention, device=device
    )
    typed += _typed(
        dtype=dtype,
        batch_size=batch_size,
        context_len=context_len,
        temperature=temperature,
        seed=seed,
    )
    typed = [*_models(target, draft_model), *typed, *_listed(overrides)]

    def display() -> Any:
        return progress_bars(None if progress else Console(quiet=True))

    with display() as bars:
        plan, slots, tokenizer = served(typed, bars)
    title = described_models(to_dict(plan.config))
    return Model(
        slots, tokenizer, display, f"{title}; {slots.num_slots} slots of {slots.max_len:,} tokens"
    )


@dataclass(frozen=True)
class Result:
    """A stored run. `metrics` is what result.json holds, `history` and `generations` the lines of
    their files.
    """

    folder: Path
    metrics: RunResult = field(repr=False)
    generations: list[dict[str, Any]] = field(repr=False)
    history: list[dict[str, Any]] = field(repr=False)


def run(overrides: Sequence[str] = ()) -> Result:
    """Do what `python launch.py OVERRIDES` does, and return the run that it has stored."""
    return _result(compose(_listed(overrides)), Job(tuple(overrides)))


def study(cells: Sequence[Sequence[str]]) -> list[Result]:
    """Do what a sweep over these lists of overrides does, in this process and in this order.

    Neighbours that agree in target, device, data and batch share loaded weights and prefilled
    prompts (`sweep.share`). A cell that this software has measured before is skipped. The first
    that fails ends the study with its exception; the results of those before it are stored.
    """
    configs = [compose(_listed(overrides)) for overrides in cells]  # mistakes before work
    started = f"{datetime.now():{TIME}}"
    try:
        return [
            _result(
                config,
                Job(
                    tuple(overrides),
                    Path(config.runs_dir, "sweeps", f"{started}_study"),
                    number,
                    True,
                ),
            )
            for number, (config, overrides) in enumerate(zip(configs, cells, strict=True))
        ]
    finally:
        SHARED.begin("none")


def _result(config: Config, job: Job) -> Result:
    if config.sweep.dry_run:
        raise UserError("sweep.dry_run=true: a dry run has no result")
    metrics = cast(RunResult, run_scenario(config, job))
    folder = Path(config.runs_dir, metrics["id"])
    generations = read_lines(folder / "generations.jsonl", ROW)
    history = read_lines(folder / "history.jsonl", ROW)
    return Result(folder, metrics, generations, history)


def runs(runs_dir: str | Path = "runs", sweep: str | None = None) -> "DataFrame":
    """Return a row per stored run, as the report has it: settings (cache.budget) and metrics
    (speedup).

    `sweep` is the name of a sweep, whose runs alone are read. Columns have nullable types. Raise
    UserError where there are no runs.
    """
    return _frame(read_rows(runs_dir, sweep))


def histories(runs_dir: str | Path = "runs", sweep: str | None = None) -> "DataFrame":
    """Return the lines of the runs' history.jsonl: a row per round, with the run's id. See
    `runs`.
    """
    stored, _ = read_runs(runs_dir, sweep)
    files = {each["id"]: Path(each["folder"], "history.jsonl") for each in stored}
    return _frame(
        [{"id": name} | line for name, path in files.items() for line in read_lines(path, ROW)]
    )


def predict(
    target: str | Path,
    hardware: str,
    *,
    draft: str = "self",
    draft_model: str | Path | None = None,
    cache: str | None = None,
    budget: int | None = None,
    gammas: Sequence[int] | None = None,
    batch_size: int | None = None,
    context_len: int | None = None,
    alpha: float | None = None,
    overrides: Sequence[str] = (),
) -> Prediction:
    """Predict a configuration by the cost model, as scenario=predict does, without weights or a
    GPU.

    Without `alpha`, acceptance is looked up in the runs of runs_dir and in published ones. None
    means as in conf/.
    """
    typed = _typed(
        hardware=hardware, draft=draft, cache=cache, budget=budget, gammas=gammas, alpha=alpha
    )
    typed += _typed(batch_size=batch_size, context_len=context_len)
    typed = [*_models(target, draft_model), *typed, *_listed(overrides)]
    config = compose(["scenario=predict", *typed])
    refuse_unread(config, typed)
    return predicted(fitting(resolve(config), config.batch))


def _models(target: str | Path, draft: str | Path | None) -> list[str]:
    """Return the overrides that choose the models: by option, or by path."""
    typed = []
    for group, key, model in (
        ("target", "target", target),
        ("target@draft.model", "draft.model", draft),
    ):
        if isinstance(model, Path) or (model is not None and re.search(r"[/\\]", model)):
            typed += [override(group, "custom"), override(f"{key}.path", str(model))]
        elif model is not None:
            typed.append(override(group, model))
    return typed


def _typed(**given: Any) -> list[str]:
    """Return arguments as overrides; None is left out."""
    return [
        override(KEYS.get(name, name), value) for name, value in given.items() if value is not None
    ]


def _listed(overrides: Sequence[str]) -> Sequence[str]:
    """Return the overrides. Raise UserError for a single string, which would be read as a list of
    characters.
    """
    if isinstance(overrides, str):
        raise UserError(f"overrides={overrides!r}: must be a list, as in [{overrides!r}]")
    return overrides


def _frame(rows: list[dict[str, Any]]) -> "DataFrame":
    # Here, because only these functions need pandas.
    from magicdec.report.query import table

    return table(rows)
