"""The units of a run under load: all requests of a level of load, in one way of decoding."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from magicdec.measure.contexts import Speculated
from magicdec.measure.metrics import Rounds, num_accepted
from magicdec.peers.base import AcceptanceCounts
from magicdec.scenarios.unit_folder import UnitFolder
from magicdec.serving.load_generator import Load
from magicdec.serving.request import Request, Stats
from magicdec.units import WAYS

if TYPE_CHECKING:  # what writes into the store is no part of measuring
    from magicdec.tracking.store import Run


@dataclass(frozen=True)
class ServedRequest:
    """One request of a level: its tokens, times and counts."""

    stats: Stats
    tokens: list[int]
    counted_rounds: list[tuple[int, int, int]]  # proposed, accepted, rounds; of our engine
    counts: AcceptanceCounts | None = None  # as a server's answer tells them
    error: str | None = None  # why a server has not answered
    num_retries: int = 0

    @classmethod
    def of(cls, request: Request) -> "ServedRequest":
        """Return what is kept of a request to our engine."""
        rounds = [(*pair, number) for pair, number in request.rounds.items()]
        return cls(request.stats, request.tokens, rounds)

    @property
    def rounds(self) -> Rounds:
        """Return the rounds that count for acceptance, as our engine has counted them."""
        return Rounds({(proposed, accepted): n for proposed, accepted, n in self.counted_rounds})

    @property
    def speculated(self) -> Speculated:
        """Return the speculation of the request, as far as it is known."""
        if self.counts is not None:
            rounds, accepted = self.counts.rounds, self.counts.num_accepted
        else:
            rounds, accepted = self.rounds.total(), num_accepted(self.rounds)
        return Speculated(self.stats.prompt_tokens, rounds, accepted)


@dataclass(frozen=True)
class LevelUnit:
    """One level of load in one way of decoding."""

    load: Load
    way: str
    seconds: float  # until the last answer
    requests: list[ServedRequest]
    facts: Mapping[str, Any]  # metrics that are not of requests: memory, the name of a server
    # By a server's own counters meanwhile; None: it has none.
    reported: AcceptanceCounts | None = None
    client_late_ms: float | None = None  # of the client's own event loop; None: our engine

    @property
    def answered(self) -> list[ServedRequest]:
        """Return the requests that were answered."""
        return [request for request in self.requests if request.error is None]

    @property
    def tokens(self) -> list[list[int]]:
        """Return the new tokens of every request."""
        return [request.tokens for request in self.requests]


def answered_pairs(units: Mapping[str, LevelUnit]) -> list[tuple[ServedRequest, ServedRequest]]:
    """Return each request of a level in both ways, autoregressive first, unless it has failed in
    either.
    """
    plain, fast = [units[way].requests for way in WAYS]
    pairs = zip(plain, fast, strict=True)
    return [pair for pair in pairs if all(request.error is None for request in pair)]


LEVEL_UNIT = TypeAdapter(LevelUnit)


class LevelUnits(UnitFolder[LevelUnit]):
    """The units of a run under load, one after another."""

    def __init__(self, run: "Run"):
        """Read the run's folder."""
        super().__init__(run, LEVEL_UNIT)
        self._earlier = list(self.units)

    def take(self, load: Load, way: str) -> LevelUnit | None:
        """Return the measurement of a level that an earlier session has made; None if there is
        none.

        Each is returned once, because a search may measure a level that was measured before.
        """
        for number, unit in enumerate(self._earlier):
            if (unit.load, unit.way) == (load, way):
                return self._earlier.pop(number)
        return None
