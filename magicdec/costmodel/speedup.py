"""MagicDec's arithmetic: what a round costs, how many tokens it yields, and what that makes of the
baseline.

A round proposes gamma tokens, verifies them in one pass over gamma + 1, and yields Omega tokens on
average. Times are in any one unit, the same throughout. The model is that of MagicDec (arXiv
2408.11049, section 3), which follows Leviathan et al. (arXiv 2211.17192). Pure functions of floats.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from magicdec.config.omega import alpha_from_acceptance_length, check_gamma, omega
from magicdec.errors import UserError

NEGLIGIBLE = 2.0**-54  # a probability that no longer changes one near 1 to which it is added


def round_time(gamma: int, draft: float, verify: float) -> float:
    """Return gamma T_D + T_V(gamma)."""
    check_gamma(gamma)
    return gamma * draft + verify


def speedup(gamma: int, alpha: float, target: float, draft: float, verify: float) -> float:
    """Return T_T over T_SD, a round's time over the tokens it yields: above 1 where speculation
    pays.
    """
    return target / (round_time(gamma, draft, verify) / omega(gamma, alpha))


def break_even_alpha(gamma: int, steps: float, proposes: float = 1.0) -> float | None:
    """Return the alpha at which a round that takes `steps` steps of the baseline is as fast, if a
    share `proposes` of rounds has proposals; None where none could pay.

    0 where it pays even if nothing is ever accepted (which no honest baseline allows).
    """
    if steps > 1 + proposes * gamma:
        return None
    length = 1 + (steps - 1) / proposes if proposes else 1.0
    return alpha_from_acceptance_length(length, gamma)


def round_tokens(gamma: int, alpha: float, proposes: float = 1.0) -> float:
    """Return the tokens that a round yields on average, where a share `proposes` of rounds has
    proposals, accepted with `alpha`, and the others yield the target's own token.
    """
    return 1 + proposes * (omega(gamma, alpha) - 1)


@lru_cache(maxsize=4096)  # plans ask again for each batch and budget
def row_rounds(gamma: int, alpha: float, num_tokens: int, proposes: float = 1.0) -> float:
    """Return the mean number of rounds until one row has `num_tokens`, of which the last round may
    yield more than are missing.
    """
    yields = _yields(gamma, alpha, proposes)
    # rounds[gamma + 1 + n] for n missing tokens; a round that yields more than that is the last.
    rounds = np.zeros(gamma + 1 + num_tokens + 1)
    for end in range(gamma + 2, rounds.size):
        rounds[end] = 1 + yields @ rounds[end - 1 : end - gamma - 2 : -1]
    return float(rounds[-1])


@lru_cache(maxsize=4096)
def batch_rounds(
    gamma: int, alpha: float, num_rows: int, num_tokens: int, proposes: float = 1.0
) -> float:
    """Return the mean number of rounds until each of `num_rows` equally accepted rows has
    `num_tokens`; a share `proposes` of their rounds has proposals.

    A batch waits for its unluckiest row: the expected maximum over rows of the rounds that one
    needs, exact, from the distribution of accepted tokens, cut where a row is done.
    """
    if num_rows < 1 or num_tokens < 1:
        raise UserError(
            f"a batch needs rows and tokens, not {num_rows} rows of {num_tokens} tokens"
        )
    finished_by_R = _finished_by(gamma, alpha, num_tokens, proposes) ** num_rows
    return 1.0 + float(np.sum(1.0 - finished_by_R))  # E[max] = sum over r >= 0 of P(max > r)


def batch_speedup(
    gamma: int,
    alpha: float,
    num_rows: int,
    num_tokens: int,
    target: float,
    one_round: float,
    proposes: float = 1.0,
) -> float:
    """Return the speedup of a whole batch of equally long rows by T_T and a round's time: see
    `batch_rounds`.
    """
    rounds = batch_rounds(gamma, alpha, num_rows, num_tokens, proposes)
    return num_tokens * target / (rounds * one_round)


def _yields(gamma: int, alpha: float, proposes: float) -> NDArray[np.float64]:
    """Return the probabilities that a round yields 1 .. gamma + 1 tokens."""
    stopped = [alpha**k * (1 - alpha) for k in range(gamma)]
    yields = proposes * np.array([*stopped, alpha**gamma])
    yields[0] += 1 - proposes
    return yields


def _finished_by(gamma: int, alpha: float, num_tokens: int, proposes: float) -> NDArray[np.float64]:
    """Return P(a row has its tokens after r rounds) for r = 1 .. num_tokens."""
    yields = _yields(gamma, alpha, proposes)
    left = np.zeros(num_tokens + 1)  # distribution of the tokens still missing
    left[num_tokens] = 1.0
    finished = np.empty(num_tokens)
    for r in range(num_tokens):
        missing = left[1:]
        if missing.sum() < NEGLIGIBLE:
            finished[r:] = left[0]
            break
        left = np.concatenate((left[:1], np.zeros(num_tokens)))
        for tokens, probability in enumerate(yields, start=1):
            left[0] += probability * missing[: min(tokens, num_tokens)].sum()
            left[1 : max(1, num_tokens - tokens + 1)] += probability * missing[tokens:]
        finished[r] = left[0]
    return finished
