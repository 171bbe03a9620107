"""From a generation's counters and times to the metrics of a run (names as in result.json and W&B).

B rows, R rounds, G = gamma.
"""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

import torch

from magicdec.costmodel.speedup import alpha_of_rounds
from magicdec.decoding.decoder import Generation
from magicdec.decoding.state import INACTIVE

Metrics = dict[str, float | int | str | bool | None]


class RowTimes(NamedTuple):
    """When a row of a batch got its tokens, in seconds."""

    first: float  # until its first token
    decode: float  # from then until its last one
    decoded: int  # tokens that came in that time


def row_times(generation: Generation, prefill_seconds: float) -> list[RowTimes]:
    """A row each, timed to its own last token, whatever the others still had to do."""
    first = prefill_seconds + generation.draft_prefill_seconds
    return [
        RowTimes(first, generation.round_seconds[last] if last >= 0 else 0.0, len(tokens) - 1)
        for last, tokens in zip(_last_round(generation), generation.tokens, strict=True)
    ]


def time_per_output_token_ms(rows: Sequence[RowTimes]) -> float:
    """Mean over the rows; one that stopped at its first token has no such time, and NaN is what is left of none."""
    times = [row.decode / row.decoded for row in rows if row.decoded]
    return 1e3 * fmean(times) if times else math.nan


def speed_metrics(batches: Sequence[Sequence[RowTimes]]) -> dict[str, float]:
    """Throughput and latencies over the batches of one pass, without a prefix.

    tokens_per_second counts the tokens after each row's first over the decode time alone, which lasts until a batch's
    last row is done; wall_s includes the prefill. Where every row stopped at its first token there is no decoding to
    time, and the figures that need it are NaN.
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


def acceptance_metrics(generations: list[Generation]) -> Metrics:
    """Acceptance over whole rounds. A round cut at the limit counts as it was verified, before the cut: leaving it out
    would leave out the rounds that accept most. What lies behind an end of sequence is no text: a round cut there says
    nothing of its draft. Neither does a round without proposals, where an adaptive gamma has given up.

    acceptance_rate/position_<i> is unconditional: how often proposal i was accepted, whatever became of those before.
    """
    accepted = torch.cat([g.accepted_RB[_whole(g)] for g in generations]).double()
    proposed = torch.cat([_gammas(g)[_whole(g)] for g in generations])
    metrics: Metrics = {"acceptance_rounds": accepted.numel()}
    if not accepted.numel():
        return metrics
    length = float(accepted.mean()) + 1
    metrics |= {
        "acceptance_rate": float(accepted.sum() / proposed.sum()),
        "acceptance_length": length,
        "alpha": alpha_of_rounds(length, Counter(proposed.tolist())),
    }
    for i in range(int(proposed.max())):
        metrics[f"acceptance_rate/position_{i}"] = float((accepted > i)[proposed > i].double().mean())
    return metrics


def usual_gamma(generations: list[Generation]) -> int:
    """The gamma of most speculative rounds; 0 where there are none."""
    rounds = Counter(gamma for g in generations for gamma in g.gammas if gamma)
    return max(rounds, key=rounds.__getitem__, default=0)


def round_history(generation: Generation) -> list[dict[str, float | int]]:
    """A row per round: rows still decoding, their mean accepted proposals, and the time the round took."""
    history, before = [], 0.0
    for index, end in enumerate(generation.round_seconds):
        accepted = generation.accepted_RB[index]
        active = accepted[accepted != INACTIVE].double()
        if active.numel():
            row = {"round": index, "rows": active.numel(), "gamma": generation.gammas[index]}
            history.append(row | {"accepted": float(active.mean()), "seconds": end - before})
        before = end
    return history


def spread(values: list[float]) -> float:
    """Largest less smallest, over the median: 0.1 means 10 percent."""
    middle = median(values)
    return (max(values) - min(values)) / middle if middle else 0.0


def _whole(generation: Generation) -> torch.Tensor:
    """Rounds (R, B) that proposed something and that no end of sequence has cut."""
    accepted, committed = generation.accepted_RB, generation.committed_RB
    reached_limit_B = 1 + committed.sum(0) == generation.generate_len
    uncut = (committed == accepted + 1) | reached_limit_B
    return (accepted != INACTIVE) & (_gammas(generation) > 0) & uncut


def _gammas(generation: Generation) -> torch.Tensor:
    """Tokens that every round (R, B) proposed to every row."""
    return torch.tensor(generation.gammas)[:, None].expand_as(generation.accepted_RB)


def _last_round(generation: Generation) -> list[int]:
    """Index of the round in which each row took its last token; -1 where the prefill's token was its last."""
    took = generation.committed_RB > 0
    order = torch.arange(took.shape[0])[:, None].expand_as(took)
    return torch.where(took, order, -1).amax(0).tolist() if took.numel() else [-1] * len(generation.tokens)
