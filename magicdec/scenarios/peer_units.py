"""The units of a run on another engine: a batch, decoded in one way once. All figures are computed
from the units that are stored.

Another engine may have to be loaded for each way, so that all repeats of one way are decoded before
the first one of the other. A file in the folder of the run's units is therefore of one way, written
when its batch ends.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from magicdec.peers.base import PeerGeneration
from magicdec.scenarios.unit_folder import UnitFolder

if TYPE_CHECKING:  # what writes into the store is no part of measuring
    from magicdec.tracking.store import Run

PeerRepeat = list[PeerGeneration]  # a generation per batch


@dataclass(frozen=True)
class PeerUnit:
    """One batch of prompts, decoded by another engine in one way."""

    batch: int
    way: str
    generation: PeerGeneration
    version: str  # of the engine
    peak_bytes: int  # its memory, up to the end of this batch


PEER_UNIT = TypeAdapter(PeerUnit)


class PeerUnits(UnitFolder[PeerUnit]):
    """The units of a run on another engine, by way and batch."""

    def __init__(self, run: "Run", num_batches: int):
        """Read the run's folder."""
        super().__init__(run, PEER_UNIT)
        self.num_batches = num_batches

    def missing(self, way: str, wanted: int) -> list[int]:
        """Return the batches that one way has still to decode for so many repeats, in their
        order.
        """
        stored = [len(self._of_batch(way, batch)) for batch in range(self.num_batches)]
        return [
            batch
            for repeat in range(wanted)
            for batch in range(self.num_batches)
            if repeat >= stored[batch]
        ]

    def repeats(self, way: str) -> list[PeerRepeat]:
        """Return the complete repeats of one way: each has a generation of every batch."""
        by_batch = [self._of_batch(way, batch) for batch in range(self.num_batches)]
        return [list(repeat) for repeat in zip(*by_batch, strict=False)]

    def _of_batch(self, way: str, batch: int) -> list[PeerGeneration]:
        return [unit.generation for unit in self.units if unit.way == way and unit.batch == batch]
