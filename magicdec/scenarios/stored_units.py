"""The units of a run: a batch, decoded both ways once. All figures are computed from the units that
are stored.

A run's folder has a file for each unit, written when the unit ends. Units are added by the next
repeat, by a sweep that asks for more repeats, and by a run that was interrupted and is resumed.
None is ever changed or deleted.

B rows, R rounds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter

from magicdec.engine.decoder import Generation
from magicdec.engine.output_audit import Audit
from magicdec.measure import metrics
from magicdec.measure.metrics import RowTimes, Times
from magicdec.tracking import unit_files
from magicdec.units import WAYS

if TYPE_CHECKING:  # what writes into the store is no part of measuring
    from magicdec.tracking.store import Run

AUDITS = "audits"  # a folder in a run's folder
COUNTERS = ("accepted", "committed")  # of a generation, by round and row


@dataclass(frozen=True)
class Unit:
    """One batch of prompts, decoded autoregressively and, with a draft, speculatively."""

    batch: int
    prefill_s: float
    ways: dict[str, Generation]
    # What else the machine was doing; judged without a look at the times.
    disturbed: str | None = None
    left_out: str | None = None  # why the unit is not comparable with the first one of its batch

    @property
    def speculative(self) -> Generation | None:
        """Return the generation of the draft, if there is one."""
        return self.ways.get("speculative")

    @property
    def gamma(self) -> int:
        """Return the gamma of most rounds; 0 where nothing was proposed."""
        return metrics.usual_gamma([self.speculative]) if self.speculative else 0

    def compared_with(self, first: "Unit") -> "Unit":
        """Return this unit, left out if its tokens or its gamma are not those of the batch's first
        unit.
        """
        for way, generation in self.ways.items():
            if generation.tokens != first.ways[way].tokens:
                return replace(
                    self, left_out=f"{way} decoding wrote other tokens than in the first repeat"
                )
        mine, other = self.gamma, first.gamma
        if mine != other:
            return replace(
                self, left_out=f"most rounds proposed {mine} tokens, in the first repeat {other}"
            )
        return self

    def times(self) -> dict[str, list[RowTimes]]:
        """Return the times of every row, by way."""
        return {way: metrics.row_times(g, self.prefill_s) for way, g in self.ways.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the contents of the unit's file."""
        facts = {"batch": self.batch, "prefill_s": self.prefill_s}
        marks = {"disturbed": self.disturbed, "left_out": self.left_out}
        return {**facts, **marks, "ways": {way: _to_json(g) for way, g in self.ways.items()}}

    @classmethod
    def from_json(cls, stored: unit_files.StoredUnit) -> "Unit":
        """Return the unit that a file holds."""
        ways = {way: _from_json(stored["ways"][way]) for way in WAYS if way in stored["ways"]}
        return cls(
            stored["batch"], stored["prefill_s"], ways, stored["disturbed"], stored["left_out"]
        )


def _to_json(generation: Generation) -> dict[str, Any]:
    counters = {name: getattr(generation, f"{name}_RB").tolist() for name in COUNTERS}
    others = {key: value for key, value in vars(generation).items() if not key.endswith("_RB")}
    return others | counters


def _from_json(stored: unit_files.StoredDecoding) -> Generation:
    content: dict[str, Any] = dict(stored)
    shape = (-1, len(stored["tokens"]))
    for name in COUNTERS:
        content[f"{name}_RB"] = torch.tensor(content.pop(name), dtype=torch.int32).reshape(shape)
    return Generation(**content)


@dataclass(frozen=True)
class Units:
    """All units of a run, by batch and in the order in which they were measured."""

    by_batch: tuple[tuple[Unit, ...], ...]

    @classmethod
    def of(cls, units: Iterable[Unit], num_batches: int) -> "Units":
        """Sort units by their batch."""
        units = list(units)
        batches = range(num_batches)
        return cls(tuple(tuple(unit for unit in units if unit.batch == batch) for batch in batches))

    def of_batch(self, batch: int) -> list[Unit]:
        """Return the comparable units of a batch."""
        return [unit for unit in self.by_batch[batch] if unit.left_out is None]

    @property
    def num_repeats(self) -> int:
        """Return how many comparable units every batch has."""
        return min(len(self.of_batch(batch)) for batch in range(len(self.by_batch)))

    @property
    def left_out(self) -> list[str]:
        """Return why units are not comparable, a line for each."""
        return [
            unit.left_out for batch in self.by_batch for unit in batch if unit.left_out is not None
        ]

    def with_one(self, unit: Unit) -> "Units":
        """Return these units and one more."""
        batches = [
            (*units, unit) if batch == unit.batch else units
            for batch, units in enumerate(self.by_batch)
        ]
        return Units(tuple(batches))

    def repeats(self, wanted: int) -> "Repeats":
        """Return the repeats that the figures are computed from: those that nothing has disturbed.

        Where fewer than `wanted` are undisturbed, all of them count: a repeat is not left out for
        the sake of a narrower interval. What a repeat is judged by is the machine's other work,
        never its own times.
        """
        calm = Repeats.of(
            [[u for u in self.of_batch(b) if not u.disturbed] for b in range(len(self.by_batch))]
        )
        everything = Repeats.of([self.of_batch(batch) for batch in range(len(self.by_batch))])
        return calm if len(calm.repeats) >= wanted else everything


@dataclass(frozen=True)
class Repeats:
    """Repeats of a run: each has a unit of every batch."""

    repeats: tuple[tuple[Unit, ...], ...]

    @classmethod
    def of(cls, by_batch: Sequence[Sequence[Unit]]) -> "Repeats":
        """Pair the units of the batches: the first of each make the first repeat."""
        return cls(tuple(zip(*by_batch, strict=False)))

    @property
    def times(self) -> list[Times]:
        """Return the times of every repeat: by way, the rows of each batch."""
        repeats = [[unit.times() for unit in repeat] for repeat in self.repeats]
        return [{way: [unit[way] for unit in repeat] for way in repeat[0]} for repeat in repeats]

    @property
    def disturbed(self) -> list[list[str | None]]:
        """Return what has disturbed every repeat, by batch."""
        return [[unit.disturbed for unit in repeat] for repeat in self.repeats]

    @property
    def speculative(self) -> list[list[Generation]]:
        """Return the speculative generations of every repeat, one of each batch."""
        generations = [[unit.speculative for unit in repeat] for repeat in self.repeats]
        return [[g for g in repeat if g is not None] for repeat in generations]

    def generations(self, way: str) -> list[Generation]:
        """Return the generations of all repeats and batches in one way; [] for a way that is not
        measured.
        """
        return [unit.ways[way] for repeat in self.repeats for unit in repeat if way in unit.ways]

    def tokens(self, way: str) -> list[list[int]]:
        """Return the new tokens of all rows: all repeats have the same."""
        return (
            [row for unit in self.repeats[0] for row in unit.ways[way].tokens]
            if way in self.ways
            else []
        )

    @property
    def ways(self) -> tuple[str, ...]:
        """Return the ways in which the batches were decoded."""
        return tuple(self.repeats[0][0].ways)


AUDIT = TypeAdapter(dict[int, Audit])


@dataclass
class Stored:
    """The units and audits that a run's folder holds."""

    run: "Run"
    units: Units
    audits: dict[int, Audit]  # by batch

    @classmethod
    def read(cls, run: "Run", num_batches: int) -> "Stored":
        """Read a run's folder."""
        units = [
            Unit.from_json(stored)
            for stored in unit_files.read_all(run.folder / unit_files.UNITS, unit_files.UNIT)
        ]
        audits: dict[int, Audit] = {}
        for stored in unit_files.read_all(run.folder / AUDITS, AUDIT):
            audits |= stored
        return cls(run, Units.of(units, num_batches), audits)

    def add(self, unit: Unit) -> Unit:
        """Write a unit to disk. Return it as it counts: left out if it is not comparable with the
        first one.
        """
        batch = self.units.by_batch[unit.batch]
        if batch:
            unit = unit.compared_with(batch[0])
        name = unit_files.next_name(self.run.folder / unit_files.UNITS, unit.batch)
        self.run.write(f"{unit_files.UNITS}/{name}", unit.to_json())
        self.units = self.units.with_one(unit)
        return unit

    def add_audit(self, batch: int, verdict: Audit) -> None:
        """Write the audit of a batch to disk."""
        self.run.write(f"{AUDITS}/{batch}.json", AUDIT.dump_python({batch: verdict}))
        self.audits[batch] = verdict

    @property
    def verdict(self) -> Audit | None:
        """Return the audits of all batches together; None if there is none."""
        verdicts = [self.audits[batch] for batch in sorted(self.audits)]
        return sum(verdicts[1:], verdicts[0]) if verdicts else None
