"""Acceptance as others have published it: of a head, of the modules that a model ships with or of a
draft that fills blocks, by task and by gamma. It is never mixed with what runs here have measured.
"""

import csv
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

from pydantic import TypeAdapter

from magicdec.config.omega import alpha_from_acceptance_length
from magicdec.costmodel.acceptance import AlphaEstimate
from magicdec.errors import UserError

TABLE = Path(__file__).parent / "published" / "head_lengths.csv"


class PublishedLength(NamedTuple):
    """One published acceptance length."""

    name: str
    draft: str  # its kind: one of ours, or a relative of these, such as dspark
    target: str
    head: str
    task: str
    gamma: int
    length: float  # tokens per round, bonus included
    source: str
    licence: str
    date: str

    @property
    def alpha(self) -> float:
        """Return the alpha whose rounds of this gamma are as long."""
        return alpha_from_acceptance_length(self.length, self.gamma)


def published_alpha(name: str) -> AlphaEstimate:
    """Return the median alpha of a published head, and in words its spread over tasks and gammas,
    its sources with their licences and dates. `name` is a head, or HEAD/TASK. Raise UserError if
    there is none.
    """
    head, _, task = name.partition("/")
    lengths = [row for row in _table() if row.name == head and task in ("", row.task)]
    if not lengths:
        raise UserError(_unknown(name, head))
    alphas = [row.alpha for row in lengths]
    tasks = sorted({row.task for row in lengths})
    spread = f"{min(alphas):.2f} to {max(alphas):.2f} over {len(alphas)} lengths"
    origins = dict.fromkeys(f"{row.source}, {row.licence}, {row.date}" for row in lengths)
    where = f"published of {lengths[0].head} on {', '.join(tasks)}, not run here"
    source = f"{where}: {spread}; {'; '.join(origins)}"
    return AlphaEstimate(median(alphas), source)


def _unknown(name: str, head: str) -> str:
    """Return what is wrong with a name, and what is there instead."""
    tasks = sorted({row.task for row in _table() if row.name == head})
    if tasks:
        return f"draft.acceptance={name}: {head} has the tasks {', '.join(tasks)}"
    heads = sorted({row.name for row in _table()})
    near = get_close_matches(head, heads, n=1)
    meant = f"; did you mean {near[0]}?" if near else f"; one of: {', '.join(heads)}"
    return f"draft.acceptance={name} is not published{meant}"


@cache
def _table() -> tuple[PublishedLength, ...]:
    row = TypeAdapter(PublishedLength)
    with TABLE.open(newline="") as lines:
        return tuple(row.validate_python(line) for line in csv.DictReader(lines))
