"""Schedules: the gamma that an engine should use, by batch and context.

Engines take such a schedule as a table of ranges and look it up in every step. A batch that
oscillates around a border then switches gamma all the time, so borders must be few and harmless: a
range is as wide as it can be while its gamma stays within a tolerance of the best gamma of each of
its cells.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeVar

from magicdec.costmodel.acceptance import Curves
from magicdec.costmodel.prediction import predict_generation
from magicdec.costmodel.round import Setup
from magicdec.errors import UserError

ALL_UP_TO = 16  # batches: each is a cell of its own
STEP = 1.1  # between the batches of larger cells
T = TypeVar("T")


class Cell(NamedTuple):
    """A batch and a context, and the predicted speedup of each gamma; 0 stands for no
    speculation.
    """

    batch: int
    context: int
    speedups: Mapping[int, float]

    @property
    def best(self) -> int:
        """Return the fastest gamma."""
        return max(self.speedups, key=lambda gamma: self.speedups[gamma])

    def share(self, gamma: int) -> float:
        """Return the throughput with this gamma, as a share of that with the best."""
        return self.speedups[gamma] / self.speedups[self.best]


class Entry(NamedTuple):
    """A range of batches and of contexts, both inclusive, and its gamma."""

    batch: tuple[int, int]
    context: tuple[int, int]
    gamma: int


@dataclass(frozen=True)
class Schedule:
    """A table of gammas by batch and context: every range of contexts has the same ranges of
    batches.
    """

    cells: tuple[Cell, ...]
    entries: tuple[Entry, ...]  # by context, then by batch

    @property
    def max_gamma(self) -> int:
        """Return the largest gamma."""
        return max(entry.gamma for entry in self.entries)

    @property
    def max_batch(self) -> int:
        """Return the largest batch."""
        return max(entry.batch[1] for entry in self.entries)

    @property
    def by_context(self) -> bool:
        """Return whether gamma depends on the context."""
        return len({entry.context for entry in self.entries}) > 1

    @property
    def worst(self) -> Cell:
        """Return the cell that loses most against its best gamma."""
        return min(self.cells, key=self.share)

    def gamma(self, batch: int, context: int) -> int:
        """Return the gamma of a batch and a context; those beyond the table count as its last."""
        contexts = sorted({entry.context for entry in self.entries})
        column = contexts[_index([low for low, _ in contexts], context)]
        row = [entry for entry in self.entries if entry.context == column]
        return row[_index([entry.batch[0] for entry in row], batch)].gamma

    def share(self, cell: Cell) -> float:
        """Return the throughput of a cell with the schedule's gamma, as a share of that with its
        best.
        """
        return cell.share(self.gamma(cell.batch, cell.context))


def predicted_cells(
    prompts: Setup,
    max_batch: int,
    contexts: Iterable[int],
    gammas: Sequence[int],
    alpha: float | None,
    curves: Curves,
    generate_len: int,
    least_gamma: int = 0,
) -> Iterator[Cell]:
    """Predict every batch up to `max_batch` at every context of prompts, as far as it fits into
    memory.

    A schedule may choose among `gammas` and, with a `least_gamma` of 0, not to speculate. `alpha`
    is given, or known at that context (Curves). Raise UserError where it is neither, or where
    nothing fits.
    """
    for context in sorted(contexts):
        for batch in batches_up_to(max_batch):
            at = prompts.at(batch=batch, context=context)
            prediction = predict_generation(at, gammas, alpha, curves, generate_len)
            if prediction.estimate is None:
                raise UserError(
                    f"scenario.alpha=null: no acceptance is known for {prompts.draft_title} at a"
                    f" context of {context} tokens; give one"
                )
            if prediction.fits:
                speedups = {at.gamma: at.speedup or 0.0 for at in prediction.by_gamma}
                yield Cell(batch, context, ({} if least_gamma else {0: 1.0}) | speedups)
            elif batch == 1:
                raise UserError(
                    f"not even one row of {context} tokens fits into the memory of a GPU"
                )


def batches_up_to(largest: int) -> list[int]:
    """Return the batches to predict: each of the small ones, then in steps of a tenth. The largest
    is one of them.
    """
    batches = list(range(1, min(largest, ALL_UP_TO) + 1))
    while batches[-1] < largest:
        batches.append(min(int(batches[-1] * STEP), largest))
    return batches


class _Batch(NamedTuple):
    """A batch in all its cells, and the share of the best that its gamma must reach in each of
    them.
    """

    cells: Sequence[Cell]
    bound: float = 0.0

    @property
    def number(self) -> int:
        return self.cells[0].batch


def schedule(
    cells: Iterable[Cell], tolerance: float, by_batch: bool = True, by_context: bool = True
) -> Schedule:
    """Return the schedule with the fewest ranges whose gamma is within `tolerance` of the best in
    each cell.

    Without `by_context` one gamma serves all contexts of a batch, without `by_batch` all batches.
    Where no gamma is within the tolerance in all cells of a batch, its worst cell is as good as one
    gamma can make it.
    """
    cells = tuple(cells)
    contexts = sorted({cell.context for cell in cells})
    allowed = 1.0 - tolerance

    def batches(among: Sequence[int]) -> list[_Batch]:
        """Return the batches at these contexts. Each has a bound of its own: what one gamma can
        reach in its cells.
        """
        by_number: dict[int, list[Cell]] = {}
        for cell in cells:
            if cell.context in among:
                by_number.setdefault(cell.batch, []).append(cell)
        rows = [by_number[number] for number in sorted(by_number)]
        return [_Batch(row, min(allowed, _reachable(row)) if by_batch else 0.0) for row in rows]

    def share_batches(among: Sequence[int]) -> bool:
        """Return whether one gamma per batch is good enough at all of these contexts."""
        return all(_reachable(batch.cells) >= allowed for batch in batches(among))

    groups = _ranges(contexts, share_batches) if by_context else [contexts]
    tables = [batches(group) for group in groups]
    starts = {wide[0].number for table in tables for wide in _ranges(table, _share_gamma)}
    bounds = [*sorted(starts), max(cell.batch for cell in cells) + 1]
    ends = [*(after[0] - 1 for after in groups[1:]), contexts[-1]]
    entries: list[Entry] = []
    for table, first, last in zip(
        tables, [1, *(after[0] for after in groups[1:])], ends, strict=True
    ):
        for low, after in pairwise(bounds):
            within = [batch for batch in table if low <= batch.number < after]
            # Batches that do not fit into memory at a long context continue what precedes them.
            gamma = _compromise(within)[0] if within else entries[-1].gamma
            entries.append(Entry((low, after - 1), (first, last), gamma))
    return Schedule(cells, tuple(_joined(entries)))


def _compromise(batches: Sequence[_Batch]) -> tuple[int, float]:
    """Return the gamma whose worst cell is furthest above its batch's bound, the smallest of
    several, and how far.
    """
    worst = {
        gamma: min(cell.share(gamma) - batch.bound for batch in batches for cell in batch.cells)
        for gamma in sorted(batches[0].cells[0].speedups)
    }
    gamma = max(worst, key=lambda gamma: worst[gamma])
    return gamma, worst[gamma]


def _reachable(cells: Sequence[Cell]) -> float:
    """Return the share of the best that one gamma can reach in every cell."""
    return _compromise([_Batch(cells)])[1]


def _share_gamma(batches: Sequence[_Batch]) -> bool:
    """Return whether one gamma reaches the bound of each batch."""
    return _compromise(batches)[1] >= 0


def _ranges(items: Sequence[T], is_one: Callable[[Sequence[T]], bool]) -> list[list[T]]:
    """Split items into the fewest runs that are one range each; a single item always is."""
    ranges: list[list[T]] = []
    for item in items:
        if ranges and is_one([*ranges[-1], item]):
            ranges[-1].append(item)
        else:
            ranges.append([item])
    return ranges


def _gammas(band: Iterable[Entry]) -> list[tuple[tuple[int, int], int]]:
    """Return the gamma of each range of contexts."""
    return [(entry.context, entry.gamma) for entry in band]


def _joined(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Join neighbouring ranges of batches where their gammas are the same at every context."""
    by_batch: dict[tuple[int, int], list[Entry]] = {}
    for entry in entries:
        by_batch.setdefault(entry.batch, []).append(entry)
    bands: list[list[Entry]] = []
    for band in by_batch.values():
        if bands and _gammas(bands[-1]) == _gammas(band):
            first = bands[-1][0].batch[0]
            last = band[0].batch[1]
            bands[-1] = [entry._replace(batch=(first, last)) for entry in band]
        else:
            bands.append(band)
    yield from sorted(
        (entry for band in bands for entry in band), key=lambda entry: (entry.context, entry.batch)
    )


def _index(starts: Sequence[int], value: int) -> int:
    """Return which range holds a value, given where the ranges start."""
    return max(0, bisect_right(starts, value) - 1)
