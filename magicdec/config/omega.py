"""Omega: the tokens that a round yields on average, by gamma and alpha, and its inverse (Leviathan
et al. 2023, arXiv 2211.17192).
"""

from collections.abc import Mapping
from math import isfinite

from magicdec.errors import UserError

BISECTIONS = 60  # of [0, 1]: more than a float64 can tell apart
ROUNDING = 1e-12  # of a mean, at most and in proportion


def omega(gamma: int, alpha: float) -> float:
    """Return the tokens a round yields on average: 1 + alpha + ... + alpha^gamma, which is gamma +
    1 at alpha = 1.

    `alpha` is the probability that a proposal is accepted, given that all before it in its round
    were.
    """
    check_gamma(gamma)
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
        check_gamma(gamma)
    if not isfinite(length):
        raise UserError(f"acceptance_length={length} is not a number")

    def expected(alpha: float) -> float:
        tokens = sum(number * omega(gamma, alpha) for gamma, number in rounds.items())
        return tokens / sum(rounds.values())

    if length <= 1.0 or expected(1.0) == 1.0:
        return 0.0
    if length >= expected(1.0) * (1 - ROUNDING):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle) < length else (low, middle)
    return (low + high) / 2


def check_gamma(gamma: int) -> None:
    """Raise UserError for a negative gamma."""
    if gamma < 0:
        raise UserError(f"gamma={gamma} must be at least 0")
