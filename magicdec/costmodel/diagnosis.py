"""Say why speculation pays or does not: steps of any engine next to their limits, and one reason.

One fit explains all steps (step_fit.py). What does not belong into a round has another shape:

- verification off the fast path: T_V grows with context times gamma, as if the KV cache were read
  once per query row;
- scheduling: rounds are longer than decode steps by a time that depends on nothing, or by an
  overhead that was timed;
- drafting: a round with the draft takes longer than one without by more than gamma T_D should;
- acceptance: fewer tokens a round than were expected, or than speculation needs.

Times are in seconds. Where they come from does not matter here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import fmean, median
from typing import NamedTuple

from magicdec.costmodel.step_fit import CellSteps, EngineFit, fit_engine
from magicdec.errors import UserError

PAYS = "pays"
ACCEPTANCE = "acceptance"
VERIFICATION = "verification"
DRAFTING = "drafting"
SCHEDULING = "scheduling"
UNKNOWN = "unknown"
MIN_VERIFIED_CELLS = 8  # cells with T_V from which a fit can tell verification from scheduling
# By so much the bytes of decode steps must differ for a fit to tell them from an overhead.
MIN_BYTES_RATIO = 1.2
# What can be wrong, in the order in which equal gains are named.
CAUSES = (VERIFICATION, DRAFTING, SCHEDULING, ACCEPTANCE)


@dataclass(frozen=True)
class Thresholds:
    """Losses from which a cause is named, as shares of a round (of the tokens, for acceptance).

    Fixed on one half of the cases of docs/results/diagnosis.md, and judged on the other.
    """

    verification: float = 0.14
    drafting: float = 0.12
    scheduling: float = 0.09
    acceptance: float = 0.20
    unknown: float = 0.05  # of the predicted speedup
    # A loss must also be so many times as large as what the fits leave unexplained.
    residuals: float = 2.0


@dataclass(frozen=True)
class Loss:
    """The loss by one cause, at the cell where it is largest."""

    cause: str
    cell: CellSteps
    seconds: float  # of the round
    share: float  # of the round, or of the tokens
    speedup: float  # without it
    gain_rps: float  # requests per second that the cell would serve more


@dataclass(frozen=True)
class Diagnosis:
    """The reason in a word and in a sentence, and the figures behind it."""

    cause: str
    sentence: str
    losses: tuple[Loss, ...]  # the largest gain first; those below their thresholds, too
    named: tuple[str, ...]  # all causes above their thresholds, `cause` first
    missing: float  # of the predicted speedup, as a share of it
    paying: tuple[CellSteps, ...]
    cells: tuple[CellSteps, ...]
    engine: EngineFit


def diagnose(
    cells: Sequence[CellSteps], tokens: float, thresholds: Thresholds | None = None
) -> Diagnosis:
    """Return why speculation pays or does not in these cells. `tokens` are the new tokens of a
    request.

    Raise UserError without any cell.
    """
    if not cells:
        raise UserError("there is nothing to diagnose: no round of speculation was timed")
    limit = thresholds or Thresholds()
    engine = fit_engine(cells)
    losses = sorted(_losses(cells, tokens, engine), key=lambda loss: -loss.gain_rps)
    noise = limit.residuals * engine.residual
    named = tuple(
        loss.cause
        for loss in losses
        if loss.share >= max(getattr(limit, loss.cause), noise) and _is_fitted(loss.cause, cells)
    )
    paying = tuple(cell for cell in cells if cell.speedup > 1)
    ratios = [cell.speedup / engine.expected_speedup(cell) for cell in cells]
    missing = 1 - exp(fmean(map(log, ratios)))
    cause, sentence = _judged(cells, losses, named, engine, missing, limit.unknown)
    return Diagnosis(cause, sentence, tuple(losses), named, missing, paying, tuple(cells), engine)


def _is_fitted(cause: str, cells: Sequence[CellSteps]) -> bool:
    """Return whether the cells can tell a cause that follows from a fit."""
    if cause == DRAFTING:
        return _differ(cells) or not any(
            cell.draft_limit and any(cell.draft_limit) for cell in cells
        )
    return cause != VERIFICATION or _can_tell_growth(cells)


def _can_tell_growth(cells: Sequence[CellSteps]) -> bool:
    """Return whether there are enough verifications to tell what grows from what does not by a
    fit, which a few always satisfy.
    """
    return sum(cell.verify_s is not None for cell in cells) >= MIN_VERIFIED_CELLS


def _differ(cells: Sequence[CellSteps]) -> bool:
    """Return whether decode steps differ enough to tell what of them is overhead, and so what a
    step of a smaller model should take: a fit splits steps that are alike in any way.
    """
    num_bytes = [cell.target_limit.bytes_s for cell in cells]
    return max(num_bytes) > MIN_BYTES_RATIO * min(num_bytes)


def _losses(cells: Sequence[CellSteps], tokens: float, engine: EngineFit) -> list[Loss]:
    """Return what each cause costs at the cell that it costs most, in requests per second."""
    late = _late_drafts(cells, engine)

    def verification(cell: CellSteps) -> float:
        return 0.0 if cell.verify_s is None else cell.gamma * engine.rereads_s(cell)

    fitted_wait_s = engine.wait_s if _can_tell_growth(cells) else 0.0

    def scheduling(cell: CellSteps) -> float:
        return max(0.0, fitted_wait_s + cell.wait_s + cell.overhead_s)

    def drafting(cell: CellSteps) -> float:
        should = engine.expected_draft_s(cell)
        return 0.0 if should is None else cell.gamma * (late.seconds + late.ratio * should)

    def acceptance(cell: CellSteps) -> float:
        """Return the seconds that tokens which were expected would have saved."""
        if not cell.expected_length:
            return 0.0
        group = (cell.context, cell.gamma)
        length = fmean(like.length for like in cells if (like.context, like.gamma) == group)
        return max(0.0, 1 - length / cell.expected_length) * (cell.round_s + cell.wait_s)

    lost: dict[str, Callable[[CellSteps], float]] = {
        VERIFICATION: verification,
        DRAFTING: drafting,
        SCHEDULING: scheduling,
        ACCEPTANCE: acceptance,
    }

    def worst(cause: str) -> Loss:
        losses = [_loss(cause, cell, lost[cause](cell), tokens) for cell in cells]
        return max(losses, key=lambda loss: loss.share)

    return [worst(cause) for cause in CAUSES]


def _loss(cause: str, cell: CellSteps, seconds: float, tokens: float) -> Loss:
    whole = cell.round_s + cell.wait_s
    share = min(seconds / whole, 0.95)
    faster = cell.speedup / (1 - share)
    more = cell.requests_per_second(tokens, faster) - cell.requests_per_second(tokens)
    return Loss(cause, cell, seconds, share, faster, more)


class _Late(NamedTuple):
    """The time of draft steps beyond their limit."""

    seconds: float = 0.0  # of a draft that is no model
    ratio: float = 0.0  # of one that is, over what it should take


def _late_drafts(cells: Sequence[CellSteps], engine: EngineFit) -> _Late:
    """Return what draft steps take beyond what they should, in the median cell."""
    seconds = list[float]()
    ratios = list[float]()
    for cell in cells:
        should, time = engine.expected_draft_s(cell), cell.draft_s
        if time is None or should is None:
            continue
        if should:
            ratios.append(time / should - 1)
        else:
            seconds.append(time)
    return _Late(
        max(0.0, median(seconds)) if seconds else 0.0,
        max(0.0, median(ratios)) if ratios else 0.0,
    )


def _judged(
    cells: Sequence[CellSteps],
    losses: Sequence[Loss],
    named: Sequence[str],
    engine: EngineFit,
    missing: float,
    unknown: float,
) -> tuple[str, str]:
    """Return the cause and the sentence."""
    best = max(cells, key=lambda cell: cell.speedup)
    paying = sum(cell.speedup > 1 for cell in cells)
    where = f"it pays in {paying} of {len(cells)} cells, {best.speedup:.2f}x at best ({best.label})"
    if named:
        loss = next(loss for loss in losses if loss.cause == named[0])
        return loss.cause, f"{_named(loss, engine)}; {where}"
    if missing >= unknown:
        said = f"pays {missing:.0%} less than predicted, reason unknown"
        return UNKNOWN, f"{said}{_remedy(cells)}; {where}"
    if paying:
        return PAYS, where.removeprefix("it ")
    needed = best.length / best.speedup
    said = f"a round yields {best.length:.2f} tokens and needs {needed:.2f} at {best.label}"
    return ACCEPTANCE, f"acceptance too low for this gamma and context: {said}; {where}"


def _remedy(cells: Sequence[CellSteps]) -> str:
    """Return what would tell an unknown cause, in brackets; "" where there is nothing."""
    if all(cell.verify_s is None for cell in cells):
        return " (T_V and T_D cannot be told apart)"
    differ = _differ(cells)
    if len(cells) >= MIN_VERIFIED_CELLS:
        return "" if differ else " (more different batches and contexts can tell it)"
    of_what = "" if differ else ", of more different batches and contexts"
    return f" (at least {MIN_VERIFIED_CELLS} cells can tell it{of_what})"


def _named(loss: Loss, engine: EngineFit) -> str:
    """Return the sentence of a cause: what is wrong, a number, and what it costs."""
    cell = loss.cell
    cost = f"without it, {cell.speedup:.2f}x would be {loss.speedup:.2f}x there"
    if loss.cause == VERIFICATION:
        verify = (cell.verify_s or 0.0) / cell.verify_limit.seconds
        target = cell.target_s / cell.target_limit.seconds
        return (
            f"verification off the fast path: T_V is {verify:.1f} times its limit at {cell.label},"
            f" a decode step {target:.1f} times its own, and {loss.share:.0%} of the round grows"
            f" with context times gamma; {cost}"
        )
    if loss.cause == DRAFTING:
        should = engine.expected_draft_s(cell) or 0.0
        drafts = f"a draft step takes {1e3 * (cell.draft_s or 0.0):.1f} ms at {cell.label}"
        return f"drafting too slow: {drafts} and should take {1e3 * should:.1f} ms; {cost}"
    if loss.cause == SCHEDULING:
        what = (
            f"each round waits {1e3 * loss.seconds:.1f} ms, {loss.share:.0%} of it at {cell.label}"
        )
        return f"scheduling: {what}, whatever its size; {cost}"
    tokens = f"{cell.length:.2f} tokens of the {cell.expected_length:.2f} that were expected"
    what = f"a round yields {tokens} at {cell.label}"
    return f"acceptance too low for this gamma and context: {what}; {cost}"
