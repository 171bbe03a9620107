"""The units of a run's folder: a file for each part of the work, written when that part ends. All
figures are computed from the units that are stored, so that a run that was interrupted goes on
with the next part.
"""

from typing import TYPE_CHECKING, Generic, TypeVar

from pydantic import TypeAdapter

from magicdec.tracking.unit_files import UNITS, next_name, read_all

if TYPE_CHECKING:  # what writes into the store is no part of measuring
    from magicdec.tracking.store import Run

U = TypeVar("U")


class UnitFolder(Generic[U]):
    """The units that a run's folder holds, in the order in which they were measured."""

    def __init__(self, run: "Run", schema: TypeAdapter[U]):
        """Read the folder."""
        self.run, self._schema = run, schema
        self.units = read_all(run.folder / UNITS, schema)

    def add(self, unit: U, name: int | str) -> None:
        """Write a unit to the next file whose name begins with `name`."""
        file = next_name(self.run.folder / UNITS, name)
        self.run.write(f"{UNITS}/{file}", self._schema.dump_python(unit))
        self.units.append(unit)
