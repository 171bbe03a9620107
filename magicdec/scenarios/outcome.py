"""What a scenario hands to the tracking: plain data, no tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it imports PyTorch, which a prediction does not wait for
    from magicdec.measure.metrics import Metrics


@contextmanager
def kept(history: list[dict]) -> Iterator[None]:
    """Let whatever ends the work within carry the rows so far, as `history`: hours may be in them."""
    try:
        yield
    except BaseException as error:
        error.history = history  # type: ignore[attr-defined]
        raise


@dataclass
class Outcome:
    """Results of one run."""

    metrics: "Metrics"
    generations: list[dict] = field(default_factory=list)  # token ids, a dict per row
    history: list[dict] = field(default_factory=list)  # a dict per round
    samples: list[dict] = field(default_factory=list)  # text of a few rows, for people
    system: list[dict] = field(default_factory=list)  # what the machine did meanwhile, a dict every few seconds
    view: Any = None  # what the terminal shows in place of the usual table: anything that rich prints
