"""Adaptive gamma: how many tokens to propose, decided while a batch is decoded (draft.gamma=auto).

A round of each gamma is timed beforehand, on the batch itself, with all of its rows; how often
proposals are accepted is estimated from the rounds so far. Together they give the time per token of
each gamma, to hold against an autoregressive step's.

- Timed rounds go on from the end of the prompts, so that their contexts are at most `generate_len`
  tokens longer.
- Times are not taken again when rows finish: what is chosen for the rows that are left is best for
  the whole batch.

B rows.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from magicdec.decoding.state import INACTIVE, State
from magicdec.decoding.timers import Stopwatch
from magicdec.engine.graphs import Cycle

# Of each gamma and kind; the fastest counts, because disturbances make a round slower, never
# faster.
TIMED_ROUNDS = 3
# What is believed before the first round, and how many proposals that is worth.
PRIOR_ALPHA, PRIOR_JUDGED = 0.7, 4.0
# The weight, in rows, of the prior that a proposal is accepted as often as the one before it.
PRIOR_ROWS = 16.0
DECAY = 0.95  # of what has been seen, in every round: text changes
MARGIN = 0.03  # by which another gamma must be better to be switched to
EVIDENCE = 16.0  # proposals that must have been judged before speculation is given up


class YieldEstimate:
    """An estimate of how many tokens a round of each gamma yields, from the rounds so far.

    The share of rows whose first i proposals are accepted is counted for each i. Powers of one
    alpha would be too high for large i where rows differ: most of what is judged late in a round
    comes from rows that accept much.
    """

    def __init__(self, decay: float = DECAY):
        """Begin with the prior; `decay` is what a round leaves of what has been seen before."""
        # Proposals whose predecessors in a round were accepted.
        self.judged = PRIOR_JUDGED
        self._decay = decay
        # Rows, by i.
        self._tried = defaultdict[int, float](float)
        self._held = defaultdict[int, float](float)

    def learn(self, gamma: int, accepted: Sequence[int]) -> None:
        """Count a round: the accepted proposals of every row that took part."""
        self.judged = self._decay * self.judged + sum(min(count + 1, gamma) for count in accepted)
        for i in range(1, gamma + 1):
            self._tried[i] = self._decay * self._tried[i] + len(accepted)
            self._held[i] = self._decay * self._held[i] + sum(count >= i for count in accepted)

    def tokens(self, gamma: int) -> float:
        """Return the tokens that a row gets of a round, bonus included. What was not tried goes on
        as before it.
        """
        total, before, ratio = 1.0, 1.0, PRIOR_ALPHA
        for i in range(1, gamma + 1):
            prior = PRIOR_ROWS * before * ratio
            held = min(before, (self._held[i] + prior) / (self._tried[i] + PRIOR_ROWS))
            ratio = held / before if before else 0.0
            total += held
            before = held
        return total

    def seconds_per_token(self, seconds: Mapping[int, float]) -> dict[int, float]:
        """Return the seconds per token of rounds that take so long, by gamma."""
        return {gamma: duration / self.tokens(gamma) for gamma, duration in seconds.items()}


def better(costs: Mapping[int, float], gamma: int) -> int:
    """Return the gamma of the least cost, or `gamma` itself if that is hardly more."""
    best = min(costs, key=costs.__getitem__)
    return best if gamma not in costs or costs[best] < (1 - MARGIN) * costs[gamma] else gamma


class AdaptiveCycle(Cycle):
    """Rounds of the gamma that is best so far, or autoregressive steps if none pays.

    `cycles[gamma]` runs rounds of that gamma, `cycles[0]` autoregressive steps. The draft learns
    nothing of these: once speculation is given up it stays so until `restart`. The host never waits
    for a round to learn how it went.
    """

    def __init__(self, cycles: Mapping[int, Cycle], state: State):
        """Time rounds of every gamma, which disturbs the state: the caller restarts it.

        `timing_seconds` is what that takes, and a part of the speculative time to first token.
        """
        self._cycles, self._state = cycles, state
        # Kernels are compiled, libraries loaded: a warm-up, as of all that is timed.
        for cycle in cycles.values():
            cycle.timed(state)
        with Stopwatch(state.tokens_BS.device) as watch:
            self._seconds = self._timed_rounds()
        self.timing_seconds = watch.seconds
        self.restart()

    @override
    def restart(self) -> None:
        """Begin with the prior again."""
        super().restart()
        self._pending: list[tuple[int, Tensor, torch.cuda.Event | None]] = []
        self._estimate = YieldEstimate()
        costs = self._estimate.seconds_per_token(self._seconds)
        self._gamma = min((gamma for gamma in costs if gamma), key=costs.__getitem__)

    @override
    def __call__(self) -> None:
        if self._gamma:
            self._learn()
            self._choose()
        self._cycles[self._gamma]()
        self.gammas.append(self._gamma)
        if self._gamma:
            self._post()

    def _choose(self) -> None:
        costs = self._estimate.seconds_per_token(self._seconds)
        if self._estimate.judged < EVIDENCE:
            costs.pop(0)
        if (best := better(costs, self._gamma)) != self._gamma:
            self._gamma = best
            self._cycles[best].restart()

    def _timed_rounds(self) -> dict[int, float]:
        """Return the seconds of a round of all rows, by gamma: the mean over the rounds of a
        cycle, of the fastest of each kind.

        The gammas take turns, so that a slow spell hits all.
        """
        turns = [
            {gamma: cycle.timed(self._state) for gamma, cycle in self._cycles.items()}
            for _ in range(TIMED_ROUNDS)
        ]
        return {
            gamma: cycle.mean(map(min, zip(*(turn[gamma] for turn in turns), strict=True)))
            for gamma, cycle in self._cycles.items()
        }

    def _post(self) -> None:
        """Request the counters of the round just queued."""
        accepted_B = self._state.accepted_RB[len(self.gammas) - 1]
        event = None
        if accepted_B.is_cuda:
            copy_B = torch.empty(accepted_B.shape, dtype=accepted_B.dtype, pin_memory=True)
            accepted_B = copy_B.copy_(accepted_B, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._pending.append((self._gamma, accepted_B, event))

    def _learn(self) -> None:
        """Update the estimate with the rounds whose counters have arrived."""
        while self._pending and ((event := self._pending[0][2]) is None or event.query()):
            gamma, accepted_B, _ = self._pending.pop(0)
            self._estimate.learn(
                gamma, [count for count in accepted_B.tolist() if count != INACTIVE]
            )
