"""The rounds of a server at a steady state, from outside: while every request of a burst decodes.

A burst is a number of requests that are sent at once. Its window begins when the last of them has
its first token, and ends when the first of them has its last: the ramp, all prefills and the last
requests are outside. A round is a step of the server: a decode step, or a round of speculation. All
requests take part in each, so that its time is the same for all of them.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import exp
from statistics import fmean, median
from typing import NamedTuple, cast

from magicdec.measure.intervals import MIN_REPEATS, Estimate
from magicdec.peers.answer import EndpointRequest
from magicdec.peers.base import AcceptanceCounts, sum_of_counts
from magicdec.peers.endpoint import Endpoint
from magicdec.peers.lateness import Lateness
from magicdec.serving.load_generator import Load, RequestSpec, under_load
from magicdec.serving.request import Params

MIN_ROUNDS = 8  # of each request, within the window
LONGER = 4  # factor by which a second try's answers are longer
BLOCKS = 8  # parts of the window, whose times make the interval
ROUNDS_OF_BLOCK = 4  # at least, of each request
# Rounds to a chunk: with fewer, a round has several chunks; with so many more, a chunk has several
# rounds.
ABOUT_ALL = 0.9
NONE = AcceptanceCounts()


class Burst(NamedTuple):
    """The step times and counts of one burst of requests."""

    first_ms: float  # to the first token, the fastest
    # Of a round: the mean over each part of the window. A client that is late for one chunk has the
    # next one sooner, so that a single wait says little.
    blocks_ms: tuple[float, ...]
    decoded: float  # tokens of a request in the middle of the window
    length: float  # tokens of a round
    gamma: float | None  # proposed tokens of a round; None: the server does not count them
    # By which the client was late on average, where that makes the times wrong.
    late_ms: float | None = None

    @property
    def step_ms(self) -> float:
        """Return the milliseconds of a round: the median over the parts of the window."""
        return median(self.blocks_ms)

    @property
    def step_ms_ci95(self) -> list[float] | None:
        """Return the 95% interval of `step_ms`; None for too few parts of the window."""
        if len(self.blocks_ms) < MIN_REPEATS:
            return None
        return [exp(end) for end in Estimate.of_median(self.blocks_ms).ends]


async def steady(
    endpoint: Endpoint, prompts: Sequence[Sequence[int]], params: Params
) -> Burst | None:
    """Send a burst with these prompts, once more with longer answers if need be. Return None if the
    requests do not decode together for long enough.

    Raise EndpointFailed if a request fails.
    """
    endpoint.prepare(prompts)
    for max_tokens in (params.max_tokens, LONGER * params.max_tokens):
        jobs = [
            RequestSpec(list(prompt), Params(max_tokens, params.sampling)) for prompt in prompts
        ]
        level = Load("concurrency", len(jobs))
        before = await endpoint.counters()
        async with Lateness() as lateness:
            answers, _ = await under_load(endpoint, jobs, level, 0)
        requests = cast(list[EndpointRequest], answers)
        for request in requests:
            if request.error is not None:
                raise endpoint.failure(request.error)
        counts = counts_of(requests, await endpoint.counters() - before)
        if burst := burst_of(requests, counts):
            return burst._replace(late_ms=lateness.ms if lateness.is_too_late(answers) else None)
    return None


def counts_of(requests: Sequence[EndpointRequest], of_server: AcceptanceCounts) -> AcceptanceCounts:
    """Return the counts of speculation of answered requests: by their answers, or by the server's
    own counters meanwhile.
    """
    counts = sum_of_counts(request.counts for request in requests)
    if requests and counts is not None:
        return counts
    return of_server.completed(sum(request.num_tokens - 1 for request in requests))


def burst_of(requests: Sequence[EndpointRequest], counts: AcceptanceCounts = NONE) -> Burst | None:
    """Return the figures of answered requests that were sent at once; None if too few rounds have
    all of them.

    `counts` are those of speculation over all requests: without any, a round has a token.
    """
    begin = max(request.chunk_times[0] for request in requests)
    end = min(request.chunk_times[-1] for request in requests)
    after_first = sum(request.num_tokens - 1 for request in requests)
    waits = sum(len(request.chunk_times) - 1 for request in requests)
    num_rounds = max(1, after_first - counts.num_accepted)  # a round yields one token more
    length = max(1.0, after_first / num_rounds)
    per_wait = num_rounds / max(1, waits)
    rows = list[list[float]]()
    decoded = list[float]()
    for request in requests:
        ends = request.chunk_times
        if per_wait < ABOUT_ALL:
            ends = _ends_of_rounds(ends, _num_rounds(request, length))
        step = per_wait if per_wait > 1 / ABOUT_ALL else 1.0  # rounds from one end to the next
        inside = [number for number, time in enumerate(ends) if begin <= time <= end]
        if (len(inside) - 1) * step < MIN_ROUNDS:
            return None
        rows.append([1e3 * ends[number] / step for number in inside])
        decoded.append(length * step * (inside[0] + inside[-1]) / 2)
    number = max(1, min(BLOCKS, *((len(row) - 1) // ROUNDS_OF_BLOCK for row in rows)))
    blocks = [fmean(block) for block in zip(*(_means(row, number) for row in rows), strict=True)]
    first_s = min(request.chunk_times[0] - request.arrived for request in requests)
    gamma = counts.proposed / num_rounds if counts.proposed else None
    return Burst(1e3 * first_s, tuple(blocks), median(decoded), length, gamma)


def _means(ends_ms: Sequence[float], number: int) -> list[float]:
    """Return the mean time of a round in each of so many equal parts of a window."""
    cuts = [round(part * (len(ends_ms) - 1) / number) for part in range(number + 1)]
    return [(ends_ms[after] - ends_ms[cut]) / (after - cut) for cut, after in pairwise(cuts)]


def _num_rounds(request: EndpointRequest, length: float) -> int:
    """Return the rounds after a request's first token: by its own counts, or as many as others
    need.
    """
    tokens = request.num_tokens - 1
    return tokens - request.counts.num_accepted if request.counts else round(tokens / length)


def _ends_of_rounds(chunk_times: Sequence[float], num_rounds: int) -> list[float]:
    """Return when rounds ended, where a server sends each token in a chunk of its own: the longest
    waits for a chunk are those for a round.
    """
    waits = [after - before for before, after in pairwise(chunk_times)]
    longest = sorted(range(len(waits)), key=waits.__getitem__)[-max(1, num_rounds) :]
    return [chunk_times[0], *(chunk_times[place + 1] for place in sorted(longest))]
