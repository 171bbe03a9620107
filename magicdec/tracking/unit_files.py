"""The files of units, which the figures of a run are computed from, and a row's tokens by round."""

import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from magicdec.errors import printable

log = logging.getLogger(__name__)

UNITS = "units"  # the folder of a run's units
T = TypeVar("T")
StoredCount = Annotated[int, Field(strict=True, ge=0, lt=2**63)]

typed = with_config(ConfigDict(strict=True, extra="ignore"))


@typed
class Round(TypedDict):
    """A round of a sample, as `by_round` makes it."""

    proposed: StoredCount
    accepted: list[str]
    bonus: str | None


@typed
class StoredDecoding(TypedDict):
    """A batch as it was decoded in one way: its tokens, its rounds and their times."""

    tokens: list[list[int]]  # by row
    accepted: list[list[int]]  # by round and row; -1 where the row had finished
    committed: list[list[int]]  # by round and row
    round_seconds: list[float]  # the end of each round
    setup_seconds: float
    gammas: list[StoredCount]
    generate_len: StoredCount


@typed
class StoredUnit(TypedDict):
    """A unit of our engine: a batch, decoded both ways once."""

    batch: StoredCount
    prefill_s: float
    disturbed: str | None
    left_out: str | None
    ways: dict[str, StoredDecoding]


UNIT = TypeAdapter(StoredUnit)


def by_round(tokens: Sequence[str], rounds: Iterable[Sequence[int]]) -> list[Round]:
    """Return the tokens of a row by round; `rounds` are pairs of proposed and accepted tokens.

    `accepted` holds the accepted proposals of a round and `bonus` the target's own token that ends
    it, or None if the token limit or an end of sequence has cut the round. The first entry is the
    token of the prefill.
    """
    listed: list[Round] = [{"proposed": 0, "accepted": [], "bonus": tokens[0]}]
    start = 1
    for proposed, accepted in rounds:
        part = tokens[start : start + accepted + 1]
        bonus = part[accepted] if len(part) > accepted else None
        listed.append({"proposed": proposed, "accepted": list(part[:accepted]), "bonus": bonus})
        start += len(part)
    return listed


def warn(line: str) -> None:
    """Log what is left out of a store."""
    log.warning("%s", printable(line))


def read_all(folder: Path, schema: TypeAdapter[T]) -> list[T]:
    """Return what the files of a folder hold, by the numbers in their names; [] if there is no such
    folder. Leave out files that are torn or break the schema, and log them.
    """
    contents = []
    for path in sorted(
        folder.glob("*.json"), key=lambda path: [int(n) for n in re.findall(r"\d+", path.stem)]
    ):
        try:
            contents.append(schema.validate_json(path.read_bytes()))
        except (OSError, ValueError) as error:
            warn(f"{path}: {reason(error)}; it is left out")
    return contents


def next_name(folder: Path, group: int | str) -> str:
    """Return the name of the next file of a batch, or of another group, with a number that no file
    of the group has, damaged ones included.
    """
    names = [path.stem for path in folder.glob(f"{group}-*.json")]
    numbers = [int(name.partition("-")[2]) for name in names]
    return f"{group}-{1 + max(numbers, default=-1)}.json"


def reason(error: Exception) -> str:
    """Return what is wrong with a file, in one line."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
    return " ".join(str(getattr(error, "strerror", None) or error).split())
