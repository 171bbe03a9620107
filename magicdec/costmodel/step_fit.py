"""Steps of an engine next to their limits, and the fit that explains all of them.

A pass takes an overhead, and as many times its limits by bytes and by FLOPs as the engine is slow:
one fit over all decode steps and verifications, at all batches, contexts and gammas. It also finds
how often a verification reads the KV cache, and what a round waits.

Times are in seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from magicdec.costmodel.bounded_fit import fit_bounded

# The most that each part of a pass may be: an engine that needs longer for its FLOPs does not lack
# them.
SLOWEST = 4.0
UPPER_BOUNDS = (inf, inf, SLOWEST, inf, inf)


class Limit(NamedTuple):
    """The shortest time of a pass: what its bytes take at the full bandwidth, and its FLOPs at the
    full rate.
    """

    bytes_s: float
    flops_s: float

    @property
    def seconds(self) -> float:
        """Return the longer of the two."""
        return max(self)


@dataclass(frozen=True)
class CellSteps:
    """The steps of a batch at a context with a gamma, their limits by bytes and FLOPs, and the
    acceptance.
    """

    batch: int
    context: int
    gamma: int
    target_s: float  # T_T
    round_s: float  # of a whole round with the draft
    length: float  # tokens of a round, bonus token included
    target_limit: Limit
    verify_limit: Limit
    entries: Limit  # the attention of one query row of each sequence: reading the KV cache once
    verify_s: float | None = None  # T_V; None: it cannot be told apart from drafting
    # Of one draft step; of none where it is no model. None: nothing is known of the draft.
    draft_limit: Limit | None = None
    draft_depth: float = 1.0  # its layers over the target's
    expected_length: float | None = None  # as measured elsewhere, or published
    wait_s: float = 0.0  # that a round waits under load: for prefills, or for room in the KV cache
    # Of the round, beyond its proposal and its verification. From outside it cannot be told apart.
    overhead_s: float = 0.0

    @property
    def speedup(self) -> float:
        """Return the time of a token without speculation over that with it."""
        return self.length * self.target_s / (self.round_s + self.wait_s)

    @property
    def draft_s(self) -> float | None:
        """Return T_D, with its share of a selection that a round makes; None where it cannot be
        told apart.
        """
        if self.verify_s is None:
            return None
        return (self.round_s - self.verify_s - self.overhead_s) / self.gamma

    def requests_per_second(self, tokens: float, speedup: float | None = None) -> float:
        """Return the requests of `tokens` new tokens that a full batch completes in a second."""
        faster = self.speedup if speedup is None else speedup
        return self.batch * faster / (self.target_s * tokens)

    @property
    def label(self) -> str:
        """Return the cell in words."""
        return f"{self.batch} x {self.context:,} with gamma {self.gamma}"


@dataclass(frozen=True)
class EngineFit:
    """The findings about an engine from the times of its passes."""

    overhead_s: float  # of a pass
    of_bytes: float  # its time over the limit by bytes
    of_flops: float  # its time over the limit by FLOPs
    wait_s: float  # of a round, beyond a verification
    reads: float  # times that a verification reads the KV cache for each proposal, beyond once
    residual: float  # of the fit: root mean square, as a share of the times

    def rereads_s(self, cell: CellSteps) -> float:
        """Return what reading the KV cache again takes for each proposal. It is 0 where the FLOPs
        of a slow kernel may take as long.
        """
        again = self.reads * cell.entries.bytes_s
        flops = cell.entries.flops_s
        return again if again + self.of_flops * flops > SLOWEST * flops else 0.0

    def expected_s(self, limit: Limit, depth: float = 1.0) -> float:
        """Return how long a pass should take that has this limit, and a share of the layers."""
        passes = self.of_bytes * limit.bytes_s + self.of_flops * limit.flops_s
        return depth * self.overhead_s + passes

    def expected_draft_s(self, cell: CellSteps) -> float | None:
        """Return how long a draft step should take; None where nothing is known of the draft."""
        limit = cell.draft_limit
        if limit is None:
            return None
        return self.expected_s(limit, cell.draft_depth) if limit.seconds else 0.0

    def expected_speedup(self, cell: CellSteps) -> float:
        """Return the speedup with steps as long as they should be, and the acceptance that was
        expected.
        """
        should = self.expected_draft_s(cell)
        draft = (cell.draft_s or 0.0) if should is None else should
        whole = self.expected_s(cell.verify_limit) + cell.gamma * draft
        length = cell.expected_length or cell.length
        return length * self.expected_s(cell.target_limit) / whole


def fit_engine(cells: Sequence[CellSteps]) -> EngineFit:
    """Return what decode steps and verifications show, fitted to both at once."""
    steps = list({(cell.batch, cell.context): cell for cell in cells}.values())
    verified = [cell for cell in cells if cell.verify_s is not None]
    limits = [cell.target_limit for cell in steps] + [cell.verify_limit for cell in verified]
    times = [cell.target_s for cell in steps] + [cell.verify_s or 0.0 for cell in verified]
    none = [0.0] * len(steps)
    columns = {
        "overhead_s": [1.0] * len(times),
        "of_bytes": [limit.bytes_s for limit in limits],
        "of_flops": [limit.flops_s for limit in limits],
        "wait_s": none + [1.0] * len(verified),
        "reads": none + [cell.gamma * cell.entries.bytes_s for cell in verified],
    }
    fitted, residual = fit_bounded(np.array([*columns.values()]).T, np.array(times), UPPER_BOUNDS)
    overhead_s, of_bytes, of_flops, wait_s, reads = fitted
    return EngineFit(overhead_s, of_bytes, of_flops, wait_s, reads, residual)
