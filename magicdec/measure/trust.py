"""Signs that a run's times cannot be trusted: two measurements that differ, and a slow machine.

Torch-free, because reports ask it of many runs.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from magicdec.units import is_number

# From which spread over repeats, and share of a run with a slowed GPU, there is a warning.
NOISY, THROTTLED = 0.1, 0.05
IMPOSSIBLE = 0.05  # share by which the parts of a round take longer than the round
# A run's times next to another measurement of them (magicdec/measure/metrics.py and `slowness`):
# the factor from which there is a warning, and its words. Predictions may be wrong themselves.
CROSS_CHECKS = {
    "agreement/target_decode": (
        1.5,
        "an autoregressive step took {:.2g} times as long as in the profile",
    ),
    "agreement/round": (1.5, "a round took {:.2g} times as long as in the profile"),
    "agreement/earlier": (
        1.5,
        "an autoregressive step took {:.2g} times as long as in the fastest earlier attempt",
    ),
    "agreement/prediction": (2.0, "an autoregressive step took {:.2g} times as long as predicted"),
}
BASELINE = "autoregressive/time_per_output_token_ms"
DISTURBED = "disturbed"  # of a result: what has disturbed the repeats that count, in words
TOOK = "other programs took {} of the processors"


def disturbance(by_repeat: Sequence[Sequence[str | None]]) -> str | None:
    """Return what has disturbed a run, in words: of each repeat, what has disturbed its batches.
    None if nothing has.
    """
    reasons = [reason for batches in by_repeat for reason in batches if reason]
    if not reasons:
        return None
    number = sum(any(batches) for batches in by_repeat)
    what = _in_short(reasons)
    if len(by_repeat) == 1:
        return what
    if number == len(by_repeat):
        return f"{what} in all {number} repeats"
    return f"{what} in {number} of {len(by_repeat)} repeats"


def _in_short(reasons: Sequence[str]) -> str:
    """Return one text for several reasons, with the range of the shares that other programs
    took.
    """
    shares = [re.fullmatch(TOOK.format(r"(\d+)%"), reason) for reason in reasons]
    percents = sorted({int(share[1]) for share in shares if share})
    others = dict.fromkeys(
        reason for reason, share in zip(reasons, shares, strict=True) if share is None
    )
    if not percents:
        return ", ".join(others)
    least, most = percents[0], percents[-1]
    taken = f"{most}%" if least == most else f"{least}% to {most}%"
    return ", ".join([TOOK.format(taken), *others])


def noise(result: Mapping[str, Any]) -> list[str]:
    """Return why a run's times cannot be trusted, in words; [] if nothing that it has measured says
    so.
    """
    numbers = {key: value for key, value in result.items() if isinstance(value, int | float)}
    reasons = [result[DISTURBED]] if isinstance(result.get(DISTURBED), str) else []
    spread = numbers.get("speedup_spread", 0.0)
    if spread > NOISY:
        reasons.append(f"the speedup spreads over {spread:.0%} between repeats")
    for key, (factor, words) in CROSS_CHECKS.items():
        if not 1 / factor <= numbers.get(key, 1.0) <= factor:
            reasons.append(words.format(numbers[key]))
    return reasons


def remedy(result: Mapping[str, Any]) -> str:
    """Return what to do about a noisy run, in words."""
    if DISTURBED in result:
        return "stop the other programs, then measure it again"
    return "measure it again"


def slowness(result: Mapping[str, Any], earlier: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return `agreement/earlier` and `agreement/prediction`: how many times as long an
    autoregressive step took as in the fastest earlier attempt and as predicted, at least 1. Nothing
    within a run shows that all of it was slow.
    """
    before = [attempt.get(BASELINE) for attempt in earlier if attempt.get("status") == "done"]
    others = {
        "earlier": (result.get(BASELINE), before),
        "prediction": (
            result.get("time/target_decode_ms"),
            [result.get("predicted/target_decode_ms")],
        ),
    }
    factors = {}
    for name, (time, expected) in others.items():
        references = [
            float(reference) for reference in expected if is_number(reference) and reference > 0
        ]
        if is_number(time) and references:
            factors[f"agreement/{name}"] = max(1.0, time / min(references))
    return factors


def gpu_trouble(result: Mapping[str, Any]) -> list[str]:
    """Return what has disturbed the GPU during a run, in words (magicdec/measure/system.py); [] if
    nothing is known.
    """
    numbers = {key: value for key, value in result.items() if isinstance(value, int | float)}
    shares = {why: numbers.get(f"gpu/throttled/{why}", 0.0) for why in ("thermal", "power")}
    reasons = [
        f"throttled ({why}) for {share:.0%} of the time"
        for why, share in shares.items()
        if share > THROTTLED
    ]
    others = numbers.get("gpu/shared", 0)
    if others:
        reasons.append(f"shared with {others} other process{'es' if others > 1 else ''}")
    return reasons


def is_impossible(result: Mapping[str, Any]) -> bool:
    """Return whether the parts of a round were measured to take longer than the round that they
    make up.
    """
    overhead = result.get("time/overhead_ms")
    whole = result.get("time/round_ms")
    return (
        isinstance(overhead, int | float)
        and isinstance(whole, int | float)
        and overhead < -IMPOSSIBLE * whole
    )
