"""The lines of a profile from outside: the times of a round's parts at each point of its grid."""

from collections.abc import Iterator, Mapping
from math import hypot
from typing import Any, NamedTuple

from magicdec.peers.steady import Burst
from magicdec.units import FREE, WAYS

AUTOREGRESSIVE, SPECULATIVE = WAYS
MIN_PROPOSED_SHARE = 0.8  # of gamma: with fewer proposals, a round is not its verification


class MeasuredPoint(NamedTuple):
    """A point of the grid: a way and a gamma at a batch and a context."""

    way: str
    gamma: int
    batch: int
    context: int


def lines(bursts: Mapping[MeasuredPoint, Burst]) -> Iterator[dict[str, Any]]:
    """Yield a line for each point of the grid that was measured, times in milliseconds as in
    scenario=profile of our own engine.
    """
    cells = sorted({(point.batch, point.context) for point in bursts})
    for batch, context in cells:
        line: dict[str, Any] = {"batch_size": batch, "context_len": context}
        if plain := bursts.get(MeasuredPoint(AUTOREGRESSIVE, 0, batch, context)):
            line |= _timed("target_decode", plain) | {"decoded": plain.decoded}
        gammas = sorted({p.gamma for p in bursts if p[2:] == (batch, context) and p.gamma})
        if not gammas:
            yield line
        for gamma in gammas:
            free = bursts.get(MeasuredPoint(FREE, gamma, batch, context))
            draft = bursts.get(MeasuredPoint(SPECULATIVE, gamma, batch, context))
            yield line | {"gamma": gamma} | _speculation(gamma, free, draft)


def _speculation(gamma: int, free: Burst | None, draft: Burst | None) -> dict[str, Any]:
    """Return the times of a round's parts, as far as they can be told apart, and its acceptance."""
    line: dict[str, Any] = {}
    if free:
        # A server that counts no proposals may have made none: then a round is a decode step.
        line["free/proposed"] = proposed = free.gamma or 0.0
        free = free if proposed >= MIN_PROPOSED_SHARE * gamma else None
    if free:
        line |= _timed("verify", free)
    if draft:
        line |= _timed("round", draft) | {"acceptance_length": draft.length}
        line |= {"proposed": draft.gamma} if draft.gamma is not None else {}
    if free and draft:
        line["time/draft_ms"] = time = (draft.step_ms - free.step_ms) / gamma
        if free.step_ms_ci95 and draft.step_ms_ci95:
            halves = [(high - low) / 2 for low, high in (free.step_ms_ci95, draft.step_ms_ci95)]
            half = hypot(*halves) / gamma
            line["time/draft_ms_ci95"] = [time - half, time + half]
    return line


def _timed(name: str, burst: Burst) -> dict[str, Any]:
    return {f"time/{name}_ms": burst.step_ms, f"time/{name}_ms_ci95": burst.step_ms_ci95}
