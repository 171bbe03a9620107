"""Simulate how often 95% intervals cover the truth, for this and for other methods.

    python benchmarks/intervals.py            # minutes, one thread; writes docs/results/intervals.csv and its page
    python benchmarks/intervals.py --quick    # a tenth of the studies; prints the shares

A study is a run whose truth is known: rows drawn from a population of documents, which differ in
how much of a draft they accept, decoded in repeats whose times are disturbed. All rows of a repeat
share its disturbances, which are skewed: a slow minute of the machine falls on both passes of a
repeat, and each pass has noise of its own.
"""  # noqa: E501

import argparse
from functools import cache
from itertools import product
from math import exp
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from page import RESULTS
from render import Row, table, write, write_csv

from magicdec.measure import intervals

Floats = NDArray[np.float64]
ROWS, REPEATS = (4, 8, 16, 24), (1, 3, 5)
STUDIES = 2000
NEW_TOKENS, STEP, ROUND = 96, 1.0, 1.6  # of a row; the times of a step and of a round
RESAMPLES = 499
MANY = 20_000  # rows and batches whose mean is the truth


class Population(NamedTuple):
    """Documents: their alphas are drawn from Beta distributions, with a share each."""

    gamma: int
    alphas: tuple[tuple[float, float, float], ...]  # share, mean, standard deviation
    noise: float  # standard deviation of the log of a pass's time

    def draw(self, random: np.random.Generator, *shape: int) -> Floats:
        """Return the alphas of so many documents."""
        which = random.choice(
            len(self.alphas), p=[share for share, _, _ in self.alphas], size=shape
        )
        _, mean, deviation = (np.array(values)[which] for values in zip(*self.alphas, strict=True))
        size = mean * (1 - mean) / deviation**2 - 1
        return random.beta(mean * size, (1 - mean) * size)


POPULATIONS = {
    "alike, quiet machine": Population(3, ((1.0, 0.75, 0.05),), 0.01),
    "some repeat themselves": Population(3, ((0.8, 0.65, 0.08), (0.2, 0.93, 0.03)), 0.03),
    "little accepted, busy machine": Population(2, ((1.0, 0.35, 0.12),), 0.06),
}


class Studies(NamedTuple):
    """S studies of N rows and K repeats: counts of rounds, and times per token."""

    rounds_SN: Floats
    accepted_SN: Floats
    plain_SKN: Floats
    fast_SKN: Floats


def simulate(
    population: Population, random: np.random.Generator, studies: int, rows: int, repeats: int
) -> Studies:
    """Return studies of documents of their own."""
    alpha_SN1 = population.draw(random, studies, rows)[..., None]
    steps = NEW_TOKENS - 1  # the prefill gives the first token
    luck_SNR = random.random((studies, rows, steps))
    accepted_SNR = np.minimum(np.log(luck_SNR) // np.log(alpha_SN1), population.gamma)
    rounds_SN = 1 + np.sum(np.cumsum(accepted_SNR + 1, axis=2) < steps, axis=2)
    accepted_SN = np.where(np.arange(steps) < rounds_SN[..., None], accepted_SNR, 0).sum(2)
    slow_SK = 1 + random.exponential(0.3, (studies, repeats)) * (
        random.random((studies, repeats)) < 0.3
    )
    noise_2SK = (random.gamma(3, 3**-0.5, (studies, repeats)) for _ in range(2))
    plain_SK, fast_SK = (slow_SK * np.exp(population.noise * noise_SK) for noise_SK in noise_2SK)
    plain_SKN = np.repeat(STEP * plain_SK[..., None], rows, axis=2)
    return Studies(
        rounds_SN, accepted_SN, plain_SKN, ROUND / steps * fast_SK[..., None] * rounds_SN[:, None]
    )


Ends = tuple[float, float]


def jackknife(rounds_N: Floats, accepted_N: Floats, gamma: int) -> Ends:
    """Return the package's interval of the acceptance length."""
    found = intervals.share(accepted_N, rounds_N * gamma)
    assert found is not None
    low, high = (1 + gamma * intervals.from_logit(end) for end in found.ends)
    return low, high


def bootstrap_t(rounds_N: Floats, accepted_N: Floats, gamma: int) -> Ends:
    """Return the interval by bootstrap-t: errors of resamples over their own standard errors."""

    def fitted(rounds: Floats, accepted: Floats) -> tuple[Floats, Floats]:
        ratio = accepted.sum(-1) / rounds.sum(-1)
        return ratio, np.sqrt(((accepted - ratio[..., None] * rounds) ** 2).sum(-1)) / rounds.sum(
            -1
        )

    drawn = resampled(len(rounds_N))
    whole, error = fitted(rounds_N, accepted_N)
    ratios, errors = fitted(rounds_N[drawn], accepted_N[drawn])
    low, high = percentiles((ratios - whole) / np.maximum(errors, 1e-9))
    return float(1 + whole - high * error), float(1 + whole - low * error)


def percentile(rounds_N: Floats, accepted_N: Floats, gamma: int) -> Ends:
    """Return the interval by the percentile bootstrap."""
    drawn = resampled(len(rounds_N))
    return percentiles(1 + accepted_N[drawn].sum(1) / rounds_N[drawn].sum(1))


def percentile_of_both(plain_KN: Floats, fast_KN: Floats) -> Ends:
    """Return the interval of the speedup by the percentile bootstrap: rows and repeats are drawn
    independently.
    """
    repeats, rows = plain_KN.shape
    drawn = resampled(repeats)[:, :, None], resampled(rows)[:, None, :]
    return percentiles(np.median(plain_KN[drawn].sum(2) / fast_KN[drawn].sum(2), axis=1))


def back(found: intervals.Estimate | None, **changes: Floats) -> Ends:
    """Return the ends of the interval of a figure whose log was estimated."""
    assert found is not None
    low, high = map(exp, found._replace(**changes).ends)
    return low, high


@cache
def resampled(count: int) -> NDArray[np.int64]:
    """Return which of `count` things each resample draws."""
    return np.random.default_rng(count).integers(count, size=(RESAMPLES, count))


def percentiles(values: Floats) -> Ends:
    """Return the interval that holds LEVEL of the values."""
    low, high = np.percentile(values, [50 * (1 - intervals.LEVEL), 50 * (1 + intervals.LEVEL)])
    return float(low), float(high)


# The methods by figure. The package's own come first, and are compared with t-intervals over the
# repeats' logs alone.
ACCEPTANCE = {
    "jackknife t": jackknife,
    "bootstrap t": bootstrap_t,
    "percentile bootstrap": percentile,
}
SPEEDUP = {
    "rows and repeats t": lambda plain_KN, fast_KN: back(
        intervals.ratio_of_rows(plain_KN, fast_KN)
    ),
    "repeats t": lambda plain_KN, fast_KN: back(
        intervals.ratio_of_rows(plain_KN, fast_KN), rows_N=intervals.NONE
    ),
    "percentile bootstrap": percentile_of_both,
}
WALL = {
    "repeats t": lambda plain_KN, fast_KN: back(
        intervals.ratio_of_repeats(plain_KN.max(1), fast_KN.max(1))
    ),
    "percentile bootstrap": lambda plain_KN, fast_KN: percentiles(
        np.median((plain_KN.max(1) / fast_KN.max(1))[resampled(len(plain_KN))], axis=1)
    ),
}
FIGURES = ("acceptance", "speedup", "speedup_wall", "false alarms")


def coverage(
    population: Population, studies: int, rows: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Return the share of studies whose interval covers the truth, by figure and method."""
    random = np.random.default_rng([rows, repeats])
    length, rounds = truth(population)
    found = simulate(population, random, studies, rows, repeats)
    counts = [
        (*one, population.gamma) for one in zip(found.rounds_SN, found.accepted_SN, strict=True)
    ]
    shares = {
        "acceptance": {
            name: covered(length, [of(*one) for one in counts]) for name, of in ACCEPTANCE.items()
        }
    }
    if repeats < intervals.MIN_REPEATS:
        return shares
    times = list(zip(found.plain_SKN, found.fast_SKN, strict=True))
    per_round = STEP * (NEW_TOKENS - 1) / ROUND
    walls = per_round / found.rounds_SN.max(1)  # of the rows that were drawn
    shares["speedup"] = {
        name: covered(per_round / rounds, [of(*one) for one in times])
        for name, of in SPEEDUP.items()
    }
    shares["speedup_wall"] = {
        name: covered(walls, [of(*one) for one in times]) for name, of in WALL.items()
    }
    return shares


@cache
def truth(population: Population) -> tuple[float, float]:
    """Return the acceptance length and the rounds of a row, over many rows."""
    found = simulate(population, np.random.default_rng(0), MANY, 8, 1)
    return 1 + float(found.accepted_SN.sum() / found.rounds_SN.sum()), float(found.rounds_SN.mean())


def covered(true: float | Floats, found: list[Ends]) -> float:
    """Return the share of intervals that hold the true value."""
    low, high = np.array(found).T
    return float(np.mean((low <= true) & (true <= high)))


def alarms(population: Population, studies: int, rows: int, repeats: int) -> dict[str, float]:
    """Return the share of comparisons of two equal settings that call their speedups different."""
    random = np.random.default_rng([rows, repeats, 1])
    a, b = (simulate(population, random, studies, rows, repeats) for _ in range(2))
    again = b._replace(fast_SKN=b.fast_SKN / b.rounds_SN[:, None] * a.rounds_SN[:, None])
    shares = {}
    for name, other in (("the same prompts", again), ("other prompts", b)):
        wrong = 0
        for times in zip(a.plain_SKN, a.fast_SKN, other.plain_SKN, other.fast_SKN, strict=True):
            first, second = intervals.ratio_of_rows(*times[:2]), intervals.ratio_of_rows(*times[2:])
            assert first
            assert second
            change = intervals.difference(first, second, is_paired=other is again)
            wrong += abs(change.value) > change.half_width()
        shares[name] = wrong / studies
    return shares


def rows_of(studies: int) -> list[Row]:
    """Simulate everything, and return the shares by figure and method: those of one method follow
    each other.
    """
    found: dict[tuple[str, str], list[Row]] = {}
    for (name, population), rows, repeats in product(POPULATIONS.items(), ROWS, REPEATS):
        shares = coverage(population, studies, rows, repeats)
        if repeats > 1:
            del shares["acceptance"]  # repeats decode the same tokens
            shares["false alarms"] = alarms(population, studies, rows, repeats)
        for figure, methods in shares.items():
            for method, share in methods.items():
                row = {
                    "figure": figure,
                    "method": method,
                    "documents": name,
                    "rows": rows,
                    "repeats": repeats,
                }
                found.setdefault((figure, method), []).append(
                    row | {"studies": studies, "share": share}
                )
    return [
        row for key in sorted(found, key=lambda key: FIGURES.index(key[0])) for row in found[key]
    ]


def main() -> None:
    """Write the shares and the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the studies; print the shares"
    )
    if parser.parse_args().quick:
        columns = ("figure", "method", "documents", "rows", "repeats", "share:.1%")
        print(table(rows_of(STUDIES // 10), *columns))
    else:
        write_csv(RESULTS / "intervals.csv", rows_of(STUDIES))
        write("studies")


if __name__ == "__main__":
    main()
