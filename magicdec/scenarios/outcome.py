"""The results that a scenario hands to the tracking: plain data, no tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it imports PyTorch, for which a prediction must not wait
    from magicdec.measure.metrics import Metrics


class Unfinished(BaseException):
    """The error that has ended a scenario, with the rows of its history so far: they may have taken hours."""

    def __init__(self, error: BaseException, history: list[dict]):
        super().__init__(error, history)
        self.error, self.history = error, history

    def __str__(self) -> str:
        return f"{len(self.history)} rows were measured before"


@contextmanager
def keeping(history: list[dict]) -> Iterator[None]:
    """Raise Unfinished, with `history`, from any error."""
    try:
        yield
    except BaseException as error:
        raise Unfinished(error, history) from error


@dataclass
class Outcome:
    """Results of one run."""

    metrics: "Metrics"
    generations: list[dict] = field(default_factory=list)  # token ids, a dict per row
    history: list[dict] = field(default_factory=list)  # a dict per round
    samples: list[dict] = field(default_factory=list)  # text of a few rows, for people
    system: list[dict] = field(default_factory=list)  # what the machine did meanwhile, a dict every few seconds
    view: Any = None  # what the terminal shows in place of the usual table: anything that rich prints
