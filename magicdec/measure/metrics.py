"""Compute the metrics of a run from a generation's counters and times (names as in result.json and
W&B).

B rows, R rounds, G = gamma.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from magicdec.config.omega import alpha_of_rounds
from magicdec.decoding.state import INACTIVE
from magicdec.engine.decoder import Generation
from magicdec.measure.intervals import acceptance_intervals, speedup_intervals
from magicdec.units import WAYS

Metrics = dict[str, Any]  # numbers, words, true and false, None; [low, high] of an interval
Rounds = Counter[tuple[int, int]]  # the number of rounds by their proposed and accepted tokens


class RowTimes(NamedTuple):
    """The times at which a row of a batch got its tokens, in seconds."""

    first: float  # until its first token
    decode: float  # from then until its last one
    decoded: int  # tokens that came in that time


Times = Mapping[str, Sequence[Sequence[RowTimes]]]  # of one repeat: by way, the rows of each batch


def row_times(generation: Generation, prefill_seconds: float) -> list[RowTimes]:
    """Return the times of each row, to its own last token. What speculation sets up delays the
    first token.
    """
    first = prefill_seconds + generation.setup_seconds
    ends_RB = np.array(generation.round_seconds)[:, None] * (generation.committed_RB.numpy() > 0)
    decode_B = ends_RB.max(axis=0, initial=0.0).tolist()  # 0: the only token came from the prefill
    return [
        RowTimes(first, end, len(row) - 1)
        for end, row in zip(decode_B, generation.tokens, strict=True)
    ]


def time_per_output_token_ms(rows: Sequence[RowTimes]) -> float:
    """Return the mean over the rows that have decoded a token, or NaN if there are none."""
    times = [row.decode / row.decoded for row in rows if row.decoded]
    return 1e3 * fmean(times) if times else math.nan


def speed_metrics(batches: Sequence[Sequence[RowTimes]]) -> dict[str, float]:
    """Return throughput and latencies over the batches of one pass, without a prefix.

    tokens_per_second counts the tokens after each row's first over the decode time alone, which
    lasts until a batch's last row is done; wall_s includes the prefill. If every row stopped at its
    first token, nothing was decoded, and the metrics that need a decode time are NaN.
    """
    rows = [row for batch in batches for row in batch]
    decode = sum(max(row.decode for row in batch) for batch in batches)
    return {
        "tokens_per_second": sum(row.decoded for row in rows) / decode if decode else math.nan,
        "time_per_output_token_ms": time_per_output_token_ms(rows),
        "time_to_first_token_ms": 1e3 * fmean(row.first for row in rows),
        "decode_s": decode,
        "wall_s": sum(max(row.first for row in batch) for batch in batches) + decode,
    }


def acceptance_metrics(generations: Iterable[Generation]) -> Metrics:
    """Return the acceptance metrics of all rounds of several generations."""
    return acceptance(sum(map(rounds_of, generations), Rounds()))


def num_proposed(rounds: Rounds) -> int:
    """Return the proposed tokens of all rounds."""
    return sum(proposed * number for (proposed, _), number in rounds.items())


def num_accepted(rounds: Rounds) -> int:
    """Return the accepted tokens of all rounds."""
    return sum(accepted * number for (_, accepted), number in rounds.items())


def acceptance(rounds: Rounds) -> Metrics:
    """Return the acceptance metrics of rounds that `is_whole` admits; acceptance_rounds alone if
    there are none.

    acceptance_rate/position_<i> is unconditional: how often proposal i was accepted, whether or not
    those before were.
    """
    num_rounds = rounds.total()
    by_gamma = Counter[int]()
    proposed_at = Counter[int]()  # by position, as are those accepted
    accepted_at = Counter[int]()
    for (proposed, accepted), number in rounds.items():
        by_gamma[proposed] += number
        proposed_at.update(dict.fromkeys(range(proposed), number))
        accepted_at.update(dict.fromkeys(range(accepted), number))
    if not num_rounds:
        return {"acceptance_rounds": 0}
    length = 1 + accepted_at.total() / num_rounds
    return {
        "acceptance_rounds": num_rounds,
        "acceptance_rate": accepted_at.total() / proposed_at.total(),
        "acceptance_length": length,
        "alpha": alpha_of_rounds(length, by_gamma),
        **{
            f"acceptance_rate/position_{i}": accepted_at[i] / proposed_at[i]
            for i in range(max(by_gamma))
        },
    }


def interval_metrics(rounds: Sequence[Rounds], times: Sequence[Times]) -> Metrics:
    """Return the 95% intervals of acceptance and of both speedups, under the names of the figures
    and `_ci95`.

    `rounds` are those of each prompt.
    """
    rows = np.array([[list(chain(*repeat[way])) for repeat in times] for way in WAYS])
    _, decode, tokens = np.moveaxis(rows, -1, 0)  # way, repeat, row; see RowTimes
    decoded = tokens.all((0, 1))
    per_token = decode[..., decoded] / tokens[..., decoded]
    walls = [[speed_metrics(repeat[way])["decode_s"] for repeat in times] for way in WAYS]
    return {**acceptance_intervals(rounds), **speedup_intervals(*per_token, *walls)}


def is_whole(proposed: int, accepted: int, committed: int, at_limit: bool) -> bool:
    """Return whether a row's round counts for acceptance.

    A round that the token limit cuts counts as it was verified: leaving it out would leave out the
    rounds that accept most. A round that an end of sequence cuts does not count, because what
    follows that is not text. Neither does a round without proposals.
    """
    return proposed > 0 and (committed == accepted + 1 or at_limit)


def rounds_of(generation: Generation) -> Rounds:
    """Return the rounds of a generation that count for acceptance."""
    return sum(rounds_of_rows(generation), Rounds())


def rounds_of_rows(generation: Generation) -> list[Rounds]:
    """Return the rounds of each row that count for acceptance."""
    counted = []
    rows = zip(generation.accepted_RB.T.tolist(), generation.committed_RB.T.tolist(), strict=True)
    for accepted, committed in rows:
        at_limit = 1 + sum(committed) == generation.generate_len
        counted.append(Rounds())
        for proposed, taken, kept in zip(generation.gammas, accepted, committed, strict=True):
            if taken != INACTIVE and is_whole(proposed, taken, kept, at_limit):
                counted[-1][proposed, taken] += 1
    return counted


def rounds_of_prompts(repeats: Iterable[Iterable[Generation]]) -> list[Rounds]:
    """Return the rounds of each prompt that count for acceptance; a repeat has a generation of
    every batch.
    """
    rows = (
        [row for generation in repeat for row in rounds_of_rows(generation)] for repeat in repeats
    )
    return [sum(of_prompt, Rounds()) for of_prompt in zip(*rows, strict=True)]


def rounds_by_row(generation: Generation) -> list[list[tuple[int, int]]]:
    """Return the rounds of each row in their order, as proposed and accepted tokens."""
    return [
        [(gamma, n) for gamma, n in zip(generation.gammas, accepted, strict=True) if n != INACTIVE]
        for accepted in generation.accepted_RB.T.tolist()
    ]


def by_category(categories: Sequence[str], measure: Callable[[list[int]], Metrics]) -> Metrics:
    """Return `category/<name>/*`: what `measure` finds of each category's rows, given their
    places.
    """
    groups: dict[str, list[int]] = {}
    for place, name in enumerate(categories):
        groups.setdefault(name, []).append(place)
    return {
        f"category/{name}/{key}": value
        for name in sorted(groups)
        for key, value in measure(groups[name]).items()
    }


def category_acceptance(categories: Sequence[str], rounds: Sequence[Rounds]) -> Metrics:
    """Return the acceptance rate and length of each category, from the rounds of each row."""

    def measure(rows: list[int]) -> Metrics:
        return short_acceptance(acceptance(sum((rounds[row] for row in rows), Rounds())))

    return by_category(categories, measure)


def short_acceptance(figures: Metrics) -> Metrics:
    """Return the acceptance rate and length among acceptance metrics."""
    return {key: figures[key] for key in ("acceptance_rate", "acceptance_length") if key in figures}


def usual_gamma(generations: list[Generation]) -> int:
    """Return the gamma of most speculative rounds, or 0 if there are none."""
    rounds = Counter(gamma for g in generations for gamma in g.gammas if gamma)
    return max(rounds, key=rounds.__getitem__, default=0)


def round_history(generation: Generation) -> list[dict[str, float | int]]:
    """Return a row per round: rows still decoding, their mean accepted proposals, and the time the
    round took.
    """
    history, before = [], 0.0
    for index, end in enumerate(generation.round_seconds):
        accepted = generation.accepted_RB[index]
        active = accepted[accepted != INACTIVE].double()
        if active.numel():
            row = {"round": index, "rows": active.numel(), "gamma": generation.gammas[index]}
            history.append(row | {"accepted": float(active.mean()), "seconds": end - before})
        before = end
    return history


def agreement(
    measured: Mapping[str, Any],
    autoregressive: Iterable[Generation],
    speculative: Iterable[Generation],
    growth: float,
) -> Metrics:
    """Return `agreement/*`: the factor by which a time is outside the range that the profile
    allows; 1.0 within it.

    Decoding passes and profile time the same steps, so that a disturbed run is found without
    repeats. The profile is of all rows at the end of the prompts. So only rounds that all rows take
    part in are compared, and only those of the profiled gamma; over a pass, a step may get longer
    by up to `growth`, as its context does.
    """
    factors: Metrics = {}
    steps = {"target_decode": (autoregressive, 0), "round": (speculative, measured.get("gamma"))}
    for name, (generations, gamma) in steps.items():
        seconds = [_seconds_of_all_rows(generation, gamma) for generation in generations]
        means = [fmean(of_pass) for of_pass in seconds if of_pass]
        if means:
            time = 1e3 * median(means)
            least = measured[f"time/{name}_ms"]
            factors[f"agreement/{name}"] = time / min(max(time, least), least * growth)
    return factors


def _seconds_of_all_rows(generation: Generation, gamma: int | None) -> list[float]:
    """Return the seconds of the rounds of one gamma that all rows took part in."""
    num_rows = generation.accepted_RB.shape[1]
    rounds = round_history(generation)
    return [row["seconds"] for row in rounds if row["rows"] == num_rows and row["gamma"] == gamma]


def mean_round_s(generation: Generation) -> float:
    """Return the mean seconds of a row's rounds, which its time per token consists of.

    A round counts once for each row that took part: the rounds of the rows that are left in the end
    are short, and few of all rows' rounds.
    """
    rounds = round_history(generation)
    return fmean((row["seconds"] for row in rounds), weights=[row["rows"] for row in rounds])


def spread(values: list[float]) -> float:
    """Return the range of the values over their median: 0.1 means 10 percent."""
    middle = median(values)
    return (max(values) - min(values)) / middle if middle else 0.0
