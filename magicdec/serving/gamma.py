"""Adaptive gamma while serving (draft.gamma=auto): how many tokens the next round proposes.

How long a round takes depends on how many requests run, and how often proposals are accepted on
their texts. Both are learned from the rounds themselves.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median

from magicdec.engine.adaptive import YieldEstimate, better

DECAY = 0.99  # of what has been seen, in every round: a round may have a single row
KEPT = 5  # times of a gamma, of which the median counts: prompts grow, and neighbours disturb
# Times of each gamma before others are compared with it: the first round compiles, or captures.
FIRST = 2
# Rounds from one trial of another gamma to the next: while some are untried, and later.
EARLY, LATE = 8, 64
# Times the best cost: a gamma that is expected to cost more is tried at every eighth late trial
# only.
WORTH = 1.5


class Chooser:
    """The choice of each round's gamma by its time per token; 0 where speculation does not pay."""

    def __init__(self, gammas: Sequence[int]):
        """Choose among these, which may include 0."""
        self.gammas = list(gammas)
        self._gamma = max(gammas)
        self._estimate = YieldEstimate(DECAY)
        self._rounds = 0
        # By the size of the batch in powers of two, and by gamma.
        self._times = defaultdict[int, dict[int, deque[float]]](
            lambda: {gamma: deque(maxlen=KEPT) for gamma in self.gammas}
        )
        self._last = dict.fromkeys(self.gammas, 0)  # round in which each ran

    def choose(self, rows: int) -> int:
        """Return the gamma of the next round, of so many rows."""
        gamma = self._chosen(self._times[rows.bit_length()], self._seconds(rows.bit_length()))
        self._rounds += 1
        self._last[gamma] = self._rounds
        return gamma

    def learn(self, gamma: int, seconds: float, accepted: Sequence[int]) -> None:
        """Learn from a round: its time, and the accepted proposals of every row that took part."""
        self._times[len(accepted).bit_length()][gamma].append(seconds)
        if gamma:
            self._estimate.learn(gamma, accepted)

    def _chosen(self, times: dict[int, deque[float]], seconds: dict[int, float]) -> int:
        if untimed := [gamma for gamma in self.gammas if gamma not in seconds]:
            return untimed[0]
        costs = self._estimate.seconds_per_token(seconds)
        self._gamma = better(costs, self._gamma)
        worth = [gamma for gamma in costs if costs[gamma] < WORTH * costs[self._gamma]]
        early = [
            gamma for gamma in costs if len(times[gamma]) < FIRST and (gamma in worth or not gamma)
        ]
        if early and self._rounds % EARLY == 0:
            return 0 if 0 in early else min(early, key=costs.__getitem__)
        if self._rounds % LATE == 0:
            return min(
                self.gammas if self._rounds % (8 * LATE) == 0 else worth, key=self._last.__getitem__
            )
        return self._gamma

    def _seconds(self, size: int) -> dict[int, float]:
        """Return the seconds of a round of each gamma at a size: as timed there or, for gammas that
        were not, at the nearest other size, scaled by those that were timed at both.
        """
        ours = _medians(self._times[size])
        for other in sorted(self._times, key=lambda other: abs(other - size))[1:]:
            theirs = _medians(self._times[other])
            ratios = [ours[gamma] / theirs[gamma] for gamma in ours.keys() & theirs.keys()]
            ours = {
                gamma: time * (median(ratios) if ratios else 1.0) for gamma, time in theirs.items()
            } | ours
        return ours


def _medians(times: dict[int, deque[float]]) -> dict[int, float]:
    """Return the median time of each gamma; of few, the shortest one."""
    return {
        gamma: median(some) if len(some) == KEPT else min(some)
        for gamma, some in times.items()
        if some
    }
