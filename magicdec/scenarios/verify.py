"""Comparison of a schedule of gammas with every fixed gamma, and with no speculation, at each batch
and context.

A first pass over each batch with every gamma only warms up. With scenario.steps=measured, every
other turn times rounds for the schedule; the turns in between judge it.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from magicdec.config.scenario_settings import Verify
from magicdec.config.schema import Config
from magicdec.costmodel.engine_settings import read_vllm
from magicdec.costmodel.round import round_times
from magicdec.costmodel.schedules import Cell, Schedule, batches_up_to, schedule
from magicdec.costmodel.speedup import batch_speedup
from magicdec.engine.decoder import Generation
from magicdec.engine.native import Batch, NativeEngine, warm_up
from magicdec.errors import UserError
from magicdec.inputs.others import from_json, read_regular
from magicdec.inputs.rules import MOST_GAMMA
from magicdec.measure import metrics
from magicdec.measure.intervals import ShareOfBest, share_of_best
from magicdec.planning import build
from magicdec.planning.resolve import resolve
from magicdec.planning.resolved import Plan
from magicdec.planning.setup import measured_rates, setup_of
from magicdec.scenarios.outcome import Outcome
from magicdec.scenarios.verify_view import shares_apart, view
from magicdec.tracking.progress import Progress
from magicdec.tracking.store import Run

log = logging.getLogger(__name__)


class MeasuredCell(NamedTuple):
    """Measurements of a batch at a context."""

    cell: Cell  # with the median speedup per row of each gamma
    turns: list[dict[int, float]]  # the speedups of each turn
    rounds: dict[int, metrics.Rounds]  # by gamma, as far as they count for acceptance
    # Seconds of a round by gamma, of a step for 0, in turns of their own; or empty.
    steps: dict[int, float]

    @property
    def alpha(self) -> float:
        """Return the acceptance at the largest gamma."""
        return _alpha([self], max(self.rounds))


def prepare(config: Config) -> Plan:
    """Resolve a run at the largest point of the grid. Raise UserError for a file that holds no
    schedule.
    """
    scenario = config.settings(Verify)
    if not config.speculates or config.draft.synthetic_acceptance is not None:
        raise UserError(
            "scenario=verify measures a draft; choose draft=self or draft=model, without"
            " synthetic_acceptance"
        )
    gammas = _gammas(scenario)
    for name, cache in config.budgeted.items():
        if gammas[-1] >= cache.budget:  # one of the file, as the others have been checked
            raise UserError(
                f"scenario.file={scenario.file}: holds gamma {gammas[-1]}, which must be below"
                f" {name}.budget={cache.budget}"
            )
    batch = replace(
        config.batch, size=max(scenario.batch_sizes), context_len=max(scenario.context_lens)
    )
    return resolve(replace(config, batch=batch, draft=replace(config.draft, gamma=gammas[-1])))


def run(plan: Plan, run: Run, progress: Progress) -> Outcome:
    """Measure every cell of the grid; a cell is a line of the history."""
    scenario = plan.config.settings(Verify)
    cells = list[MeasuredCell]()
    engine = build.engine(plan, progress)
    tokenizer = build.tokenizer(plan)
    total = len(scenario.batch_sizes) * len(scenario.context_lens)
    with progress.task("cells", total) as task:
        for context in scenario.context_lens:
            prompts = build.prompts(plan, tokenizer, max(scenario.batch_sizes), context).tokens
            for rows in scenario.batch_sizes:
                if (measured := _measured(engine, prompts, rows, scenario)) is not None:
                    cells.append(measured)
                    run.write_lines("history", map(_line, cells))
                else:
                    log.warning(
                        "left out: %d rows of %d tokens, which all end at their first token",
                        rows,
                        context,
                    )
                task.advance(1)
        if not cells:
            raise UserError(
                "data: every row ends at its first token; choose other prompts or"
                " sampling.ignore_eos=true"
            )
    by = _schedule(plan, scenario, cells)
    by_batch = schedule(
        by.cells or [cell.cell for cell in cells], scenario.tolerance, by_context=False
    )
    shares = _shares(by, cells)
    of_batch = _shares(by_batch, cells)
    results: metrics.Metrics = {"device": plan.device_name, **plan.sources}
    for name, values in (
        ("share", [share.of_best for share in shares]),
        ("share_apart", shares_apart(shares)),
        ("share_by_batch", [share.of_best for share in of_batch]),
        ("share_by_batch_apart", shares_apart(of_batch)),
    ):
        if values:
            results |= {
                f"verify/worst_{name}": min(values),
                f"verify/median_{name}": median(values),
            }
    history = []
    for cell, share, other in zip(cells, shares, of_batch, strict=True):
        line = _line(cell) | _of(by, cell.cell, share)
        line["gamma_by_batch"] = by_batch.gamma(cell.cell.batch, cell.cell.context)
        line["share_of_best_by_batch"] = other.of_best
        history.append(line)
    shown = view(by, [measured.cell for measured in cells], shares, of_batch)
    return Outcome(results, history=history, view=shown)


def _shares(by: Schedule, cells: Sequence[MeasuredCell]) -> list[ShareOfBest]:
    """Return the share of the best that a schedule reaches in each cell."""
    return [
        share_of_best(cell.turns, by.gamma(cell.cell.batch, cell.cell.context)) for cell in cells
    ]


def _gammas(scenario: Verify) -> list[int]:
    """Return the gammas to measure, but for 0."""
    from_file = {entry.gamma for entry in _from(scenario.file).entries} if scenario.file else set()
    return sorted({*scenario.gammas, *from_file} - {0})


def _from(file: str) -> Schedule:
    try:
        read = read_vllm(from_json(read_regular(Path(file))))
        if read.max_gamma > MOST_GAMMA:
            raise ValueError(f"gamma {read.max_gamma:,} is above {MOST_GAMMA:,}")
        return read
    except OSError as error:
        raise UserError(f"scenario.file={file}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"scenario.file={file}: {error}") from None


def _measured(
    engine: NativeEngine, prompts: list[list[int]], rows: int, scenario: Verify
) -> MeasuredCell | None:
    """Decode batches of so many rows with every gamma in turn. Turns take the prompts one batch
    after another, so that small batches are not a matter of the first prompt.

    The context is the mean length of all prompts: rows of a corpus may have lengths of their own.
    Return None if nothing is decoded, because every row ends at its first token.
    """
    gammas = [0, *_gammas(scenario)]
    turns: list[dict[int, float]] = []
    timed: list[dict[int, float]] = []
    rounds = {gamma: metrics.Rounds() for gamma in gammas[1:]}
    groups = len(prompts) // rows
    for group in range(min(groups, scenario.repeats)):
        batch = engine.open(prompts[group * rows : (group + 1) * rows])
        batch.decoder.prefill(engine.prefill_chunk)
        warm_up(batch)
        warmed_up = [_decoded(batch, gamma) for gamma in gammas]
        decodes = any(len(row) > 1 for row in warmed_up[0].tokens)
        for _ in range(group, scenario.repeats, groups) if decodes else ():
            if scenario.steps == "measured":
                timed.append(
                    {gamma: metrics.mean_round_s(_decoded(batch, gamma)) for gamma in gammas}
                )
            decoded = {gamma: _decoded(batch, gamma) for gamma in gammas}
            times = {
                gamma: metrics.row_times(generation, 0.0) for gamma, generation in decoded.items()
            }
            seconds = {
                gamma: metrics.time_per_output_token_ms(rows) for gamma, rows in times.items()
            }
            turns.append({gamma: seconds[0] / per_token for gamma, per_token in seconds.items()})
            for gamma in rounds:
                rounds[gamma].update(metrics.rounds_of(decoded[gamma]))
        batch.close()
    if not turns:
        return None
    steps = {gamma: median(turn[gamma] for turn in timed) for gamma in gammas if timed}
    speedups = {gamma: median(turn[gamma] for turn in turns) for gamma in gammas}
    cell = Cell(rows, round(fmean(map(len, prompts))), speedups)
    return MeasuredCell(cell, turns, rounds, steps)


def _decoded(batch: Batch, gamma: int) -> Generation:
    return batch.decoder.generate(batch.draft, gamma=gamma) if gamma else batch.decoder.generate()


def _alpha(cells: Sequence[MeasuredCell], gamma: int) -> float:
    """Return the acceptance of all rounds with a gamma: proposals late in a round are not accepted
    like the first.
    """
    rounds = sum((cell.rounds[gamma] for cell in cells), metrics.Rounds())
    return float(metrics.acceptance(rounds).get("alpha") or 0.0)


def _schedule(plan: Plan, scenario: Verify, measured: Sequence[MeasuredCell]) -> Schedule:
    """Return the schedule of the file, or the one that follows from the acceptance at each context
    and gamma.
    """
    if scenario.file:
        return _from(scenario.file)
    contexts = sorted({each.cell.context for each in measured})
    seconds = _predicted_steps(plan, scenario, contexts) if scenario.steps == "predicted" else {}
    seconds |= {each.cell[:2]: each.steps for each in measured if scenario.steps == "measured"}
    tokens = max(1, plan.config.batch.generate_len - 1)  # the prefill gives the first
    cells: list[Cell] = []
    for (batch, context), of in seconds.items():
        speedups = {0: 1.0}
        for gamma in _gammas(scenario):
            alpha = _alpha([each for each in measured if each.cell.context == context], gamma)
            speedups[gamma] = batch_speedup(gamma, alpha, 1, tokens, of[0], of[gamma])
        cells.append(Cell(batch, context, speedups))
    return schedule(cells, scenario.tolerance)


def _predicted_steps(
    plan: Plan, scenario: Verify, contexts: Sequence[int]
) -> dict[tuple[int, int], Mapping[int, float]]:
    """Return the predicted seconds of a round by gamma, and of a step for 0, at every batch and
    context.
    """
    setup = setup_of(plan, *measured_rates(plan))
    seconds: dict[tuple[int, int], Mapping[int, float]] = {}
    for context in contexts:
        for batch in batches_up_to(max(scenario.batch_sizes)):
            at = setup.at(batch=batch, context=context + plan.config.batch.generate_len // 2)
            rounds = {gamma: round_times(at, gamma).round_s for gamma in _gammas(scenario)}
            seconds[batch, context] = {0: at.target_time.total} | rounds
    return seconds


def _line(measured: MeasuredCell) -> dict[str, Any]:
    cell = measured.cell
    speedups = {f"speedup/gamma_{gamma}": speedup for gamma, speedup in cell.speedups.items()}
    return {
        "batch_size": cell.batch,
        "context_len": cell.context,
        "alpha": measured.alpha,
        "best_gamma": cell.best,
        **speedups,
    }


def _of(by: Schedule, cell: Cell, share: ShareOfBest) -> dict[str, Any]:
    """Return what a line says of the schedule; without a file, what it expected as well."""
    expected = [each.speedups for each in by.cells if each[:2] == cell[:2]]
    return {
        "gamma": by.gamma(cell.batch, cell.context),
        "share_of_best": share.of_best,
        "share_of_best_apart": share.apart,
        "share_of_best_apart_ci95": share.apart_ci95,
        **{
            f"predicted/speedup/gamma_{gamma}": value
            for speedups in expected
            for gamma, value in speedups.items()
        },
    }
