"""Acceptance by context: the tokens of a round in requests whose prompts are about as long."""

from collections.abc import Sequence
from math import exp
from typing import NamedTuple

from magicdec.measure.intervals import log_ratio
from magicdec.measure.metrics import Metrics


class Speculated(NamedTuple):
    """The speculation of one request."""

    context_len: int  # tokens of its prompt
    rounds: int
    accepted: int  # tokens, over all rounds

    @property
    def length(self) -> float | None:
        """Return the tokens of a round, bonus token included; None without any round."""
        return 1 + self.accepted / self.rounds if self.rounds else None


def bucket_of(context_len: int) -> int:
    """Return the shortest context of a bucket: a power of two, as in 1,024 for 1,024 to 2,047."""
    return 1 << (context_len.bit_length() - 1)


def context_acceptance(requests: Sequence[Speculated]) -> Metrics:
    """Return `context/<tokens>/*` for each bucket of contexts: requests, rounds, and the acceptance
    length with its 95% interval over requests.

    `context/error_of_shortest` is what the length of the shortest contexts, taken for that of the
    longest ones, is too high by: such as one that was published for short prompts.
    """
    buckets: dict[int, list[Speculated]] = {}
    for request in requests:
        if request.rounds:
            buckets.setdefault(bucket_of(request.context_len), []).append(request)
    metrics: Metrics = {}
    lengths = []
    for bucket in sorted(buckets):
        members = buckets[bucket]
        rounds = [member.rounds for member in members]
        tokens = [member.rounds + member.accepted for member in members]
        lengths.append(sum(tokens) / sum(rounds))
        estimate = log_ratio(tokens, rounds)
        metrics |= {
            f"context/{bucket}/requests": len(members),
            f"context/{bucket}/acceptance_rounds": sum(rounds),
            f"context/{bucket}/acceptance_length": lengths[-1],
        }
        if estimate is not None:
            ends = [exp(end) for end in estimate.ends]
            metrics[f"context/{bucket}/acceptance_length_ci95"] = ends
    if len(lengths) > 1:
        metrics["context/error_of_shortest"] = lengths[0] / lengths[-1] - 1
    return metrics
