"""Whether a schedule holds: its gamma next to every other one, and to no speculation, at each batch and context."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Group
from rich.table import Table

from magicdec.config.schema import Config, Verify
from magicdec.costmodel.acceptance import Curves
from magicdec.costmodel.engine_settings import read_vllm
from magicdec.costmodel.hardware import device_in
from magicdec.costmodel.schedules import Cell, Schedule, predicted_cells, schedule
from magicdec.engine.decoder import Generation
from magicdec.engine.native import Batch, NativeEngine, warm_up
from magicdec.errors import UserError
from magicdec.measure import metrics
from magicdec.measure.ceilings import matmul_rate, read_bandwidth
from magicdec.planning import build
from magicdec.planning.resolve import Plan, resolve
from magicdec.scenarios.outcome import Outcome, keeping
from magicdec.tracking.cells import new_table
from magicdec.tracking.progress import Progress


class Found(NamedTuple):
    """What was measured of a batch and a context: speedups per row by gamma, and alpha."""

    cell: Cell
    alpha: float


def prepare(config: Config) -> Plan:
    """Resolve a run at the largest point of the grid. Raise UserError for a file that holds no schedule."""
    scenario = config.settings(Verify)
    if not config.speculates or config.draft.synthetic_acceptance is not None:
        raise UserError(
            "scenario=verify measures a draft; choose draft=self or draft=model, without synthetic_acceptance"
        )
    batch = replace(config.batch, size=max(scenario.batch_sizes), context_len=max(scenario.context_lens))
    return resolve(replace(config, batch=batch, draft=replace(config.draft, gamma=_gammas(scenario)[-1])))


def run(plan: Plan, progress: Progress) -> Outcome:
    """Measure every cell of the grid; a cell is a line of the history."""
    scenario, found = plan.config.settings(Verify), list[Found]()
    build.check_memory(plan, int(plan.config.batch.size), plan.config.batch.context_len)
    engine, tokenizer = build.engine(plan, progress), build.tokenizer(plan)
    total = len(scenario.batch_sizes) * len(scenario.context_lens)
    with keeping(lambda: Outcome({}, history=[_line(one) for one in found])), progress.task("cells", total) as task:
        for context in scenario.context_lens:
            prompts = build.prompts(plan, tokenizer, max(scenario.batch_sizes), context).tokens
            for rows in scenario.batch_sizes:
                found.append(_measured(engine, prompts[:rows], context, scenario))
                task.advance(1)
    by = _schedule(plan, scenario, found)
    shares = [by.share(one.cell) for one in found]
    results: metrics.Metrics = {"device": plan.device_name, **plan.sources}
    results |= {"verify/worst_share": min(shares), "verify/median_share": median(shares)}
    history = [_line(one) | _of(by, one.cell) for one in found]
    return Outcome(results, history=history, view=Group(_view(by, found), _sentence(shares)))


def _gammas(scenario: Verify) -> list[int]:
    """Return the gammas to measure, but for 0."""
    own = {entry.gamma for entry in _from(scenario.file).entries} if scenario.file else set()
    return sorted({*scenario.gammas, *own} - {0})


def _from(file: str) -> Schedule:
    try:
        return read_vllm(json.loads(Path(file).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"scenario.file={file}: {error}") from None


def _measured(engine: NativeEngine, prompts: list[list[int]], context: int, scenario: Verify) -> Found:
    """Decode one batch with every gamma in turn, and again. The speedup of a gamma is its median over the repeats."""
    batch = engine.open(prompts)
    batch.decoder.prefill(engine.prefill_chunk)
    warm_up(batch)
    gammas, speedups, widest = [0, *_gammas(scenario)], [], list[Generation]()
    for gamma in gammas:  # kernels of each width
        _decoded(batch, gamma)
    for _ in range(scenario.repeats):
        decoded = {gamma: _decoded(batch, gamma) for gamma in gammas}
        seconds = {
            gamma: metrics.time_per_output_token_ms(metrics.row_times(one, 0.0)) for gamma, one in decoded.items()
        }
        speedups.append({gamma: seconds[0] / one for gamma, one in seconds.items()})
        widest.append(decoded[gammas[-1]])
    batch.close()
    cell = Cell(len(prompts), context, {gamma: median(one[gamma] for one in speedups) for gamma in gammas})
    return Found(cell, float(metrics.acceptance_metrics(widest)["alpha"] or 0.0))


def _decoded(batch: Batch, gamma: int) -> Generation:
    return batch.decoder.generate(batch.draft, gamma=gamma) if gamma else batch.decoder.generate()


def _schedule(plan: Plan, scenario: Verify, found: Sequence[Found]) -> Schedule:
    """Return the schedule of the file, or the one that is predicted from the acceptance at each context."""
    if scenario.file:
        return _from(scenario.file)
    known = device_in(plan.device_name)
    bandwidth = None if known else read_bandwidth(plan.device) / 1e9
    setup = plan.setup(bandwidth, None if known else matmul_rate(plan.device, plan.dtype) / 1e12)
    cells: list[Cell] = []
    for context in scenario.context_lens:
        alpha = median(one.alpha for one in found if one.cell.context == context)
        largest, gammas = max(scenario.batch_sizes), _gammas(scenario)
        cells += predicted_cells(setup, largest, [context], gammas, alpha, Curves([]), plan.config.batch.generate_len)
    return schedule(cells, scenario.tolerance)


def _line(one: Found) -> dict[str, Any]:
    cell = one.cell
    speedups = {f"speedup/gamma_{gamma}": speedup for gamma, speedup in cell.speedups.items()}
    return {
        "batch_size": cell.batch,
        "context_len": cell.context,
        "alpha": one.alpha,
        "best_gamma": cell.best,
        **speedups,
    }


def _of(by: Schedule, cell: Cell) -> dict[str, Any]:
    return {"gamma": by.gamma(cell.batch, cell.context), "share_of_best": by.share(cell)}


def _view(by: Schedule, found: Sequence[Found]) -> Table:
    """Return the measured speedups of all cells."""
    gammas = list(found[0].cell.speedups)
    columns = ("batch", "context", *map(str, gammas), "schedule", "of the best")
    table = new_table(*columns, title="measured speedup per row, by gamma; 0: no speculation", num_words=0)
    for one in found:
        cell, chosen = one.cell, _of(by, one.cell)
        speedups = [f"{cell.speedups[gamma]:.2f}" + ("*" if gamma == cell.best else "") for gamma in gammas]
        table.add_row(
            f"{cell.batch}", f"{cell.context:,}", *speedups, str(chosen["gamma"]), f"{chosen['share_of_best']:.1%}"
        )
    return table


def _sentence(shares: Sequence[float]) -> str:
    return (
        f"* the best; the schedule reaches {min(shares):.1%} of it at worst and {median(shares):.1%} in the median cell"
    )
