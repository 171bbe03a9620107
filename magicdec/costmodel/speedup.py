"""MagicDec's arithmetic: what a round costs, how many tokens it yields, and what that makes of the
baseline.

A round proposes gamma tokens, verifies them in one pass over gamma + 1, and yields Omega tokens on
average. Times are in any one unit, the same throughout. The model is that of MagicDec (arXiv
2408.11049, section 3), which follows Leviathan et al. (arXiv 2211.17192). Pure functions of floats.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from magicdec.errors import UserError

BISECTIONS = 60  # of [0, 1]: more than a float64 can tell apart


def omega(gamma: int, alpha: float) -> float:
    """Return the tokens a round yields on average: 1 + alpha + ... + alpha^gamma, which is gamma +
    1 at alpha = 1.

    `alpha` is the probability that a proposal is accepted, given that all before it in its round
    were.
    """
    _check_gamma(gamma)
    if not 0.0 <= alpha <= 1.0:
        raise UserError(f"alpha={alpha} must lie between 0 and 1")
    total = 0.0
    for _ in range(gamma + 1):  # Horner: exact at alpha = 1, where the closed form divides 0 by 0
        total = total * alpha + 1.0
    return total


def alpha_from_acceptance_length(length: float, gamma: int) -> float:
    """Return the alpha in [0, 1] whose Omega is `length` tokens per round: the inverse of `omega`,
    by bisection.

    A measured length may be a rounding error outside [1, gamma + 1]; it is clamped. With gamma = 0
    nothing is proposed, so every alpha fits and 0 is returned.
    """
    return alpha_of_rounds(length, {gamma: 1})


def alpha_of_rounds(length: float, rounds: Mapping[int, int]) -> float:
    """Return alpha where gamma varied: `length` is the mean over all rounds, `rounds` their number
    by gamma.
    """
    for gamma in rounds:
        _check_gamma(gamma)
    if not np.isfinite(length):
        raise UserError(f"acceptance_length={length} is not a number")

    def expected(alpha: float) -> float:
        return sum(n * omega(gamma, alpha) for gamma, n in rounds.items()) / sum(rounds.values())

    if length <= 1.0 or expected(1.0) == 1.0:
        return 0.0
    if length >= expected(1.0):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle) < length else (low, middle)
    return (low + high) / 2


def round_time(gamma: int, draft: float, verify: float) -> float:
    """Return gamma T_D + T_V(gamma)."""
    _check_gamma(gamma)
    return gamma * draft + verify


def speedup(gamma: int, alpha: float, target: float, draft: float, verify: float) -> float:
    """Return T_T over T_SD, a round's time over the tokens it yields: above 1 where speculation
    pays.
    """
    return target / (round_time(gamma, draft, verify) / omega(gamma, alpha))


def break_even_alpha(gamma: int, steps: float) -> float | None:
    """Return the alpha at which a round that takes `steps` steps of the baseline is as fast; None
    where none could pay.

    0 where it pays even if nothing is ever accepted (which no honest baseline allows).
    """
    return None if steps > gamma + 1 else alpha_from_acceptance_length(steps, gamma)


def batch_rounds(gamma: int, alpha: float, num_rows: int, num_tokens: int) -> float:
    """Return the mean number of rounds until each of `num_rows` equally accepted rows has
    `num_tokens`.

    A batch waits for its unluckiest row: the expected maximum over rows of the rounds that one
    needs, exact, from the distribution of accepted tokens, cut where a row is done.
    """
    if num_rows < 1 or num_tokens < 1:
        raise UserError(
            f"a batch needs rows and tokens, not {num_rows} rows of {num_tokens} tokens"
        )
    finished_by_R = _finished_by(gamma, alpha, num_tokens) ** num_rows
    return 1.0 + float(np.sum(1.0 - finished_by_R))  # E[max] = sum over r >= 0 of P(max > r)


def batch_speedup(
    gamma: int, alpha: float, num_rows: int, num_tokens: int, target: float, one_round: float
) -> float:
    """Return the speedup of a whole batch of equally long rows by T_T and a round's time: see
    `batch_rounds`.
    """
    return num_tokens * target / (batch_rounds(gamma, alpha, num_rows, num_tokens) * one_round)


def _finished_by(gamma: int, alpha: float, num_tokens: int) -> NDArray[np.float64]:
    """Return P(a row has its tokens after r rounds) for r = 1 .. num_tokens."""
    # Of 1 .. gamma + 1 tokens.
    yields = np.array([alpha**k * (1 - alpha) for k in range(gamma)] + [alpha**gamma])
    left = np.zeros(num_tokens + 1)  # distribution of the tokens still missing
    left[num_tokens] = 1.0
    finished = np.empty(num_tokens)
    for r in range(num_tokens):
        missing = left[1:]
        left = np.concatenate((left[:1], np.zeros(num_tokens)))
        for tokens, probability in enumerate(yields, start=1):
            left[0] += probability * missing[: min(tokens, num_tokens)].sum()
            left[1 : max(1, num_tokens - tokens + 1)] += probability * missing[tokens:]
        finished[r] = left[0]
    return finished


def _check_gamma(gamma: int) -> None:
    if gamma < 0:
        raise UserError(f"gamma={gamma} must be at least 0")
