"""The results that a scenario hands to the tracking: plain data, no tensors."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Outcome:
    """Results of one run."""

    metrics: dict[str, Any]
    generations: list[dict] = field(default_factory=list)  # token ids, a dict per row
    history: list[dict] = field(default_factory=list)  # a dict per round
    samples: list[dict] = field(default_factory=list)  # text of a few rows, for people
    system: list[dict] = field(default_factory=list)  # the machine's load, a dict every few seconds
    # What the terminal shows in place of the usual table: anything that rich prints.
    view: Any = None
