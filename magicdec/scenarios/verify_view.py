"""Show how a schedule compares with every fixed gamma."""

from collections.abc import Sequence
from statistics import fmean, median

from rich.console import Group

from magicdec.costmodel.schedules import Cell, Schedule
from magicdec.measure.intervals import ShareOfBest
from magicdec.tracking.cells import new_table


def view(
    by: Schedule,
    cells: Sequence[Cell],
    shares: Sequence[ShareOfBest],
    of_batch: Sequence[ShareOfBest],
) -> Group:
    """Return a table of the measured speedups of all cells, one of the schedule's share of the best
    gamma, and what both mean. `of_batch` are the shares of a schedule by batch alone.
    """
    gammas = list(cells[0].speedups)
    title = "measured speedup per row, by gamma; 0: no speculation"
    measured = new_table("batch", "context", *map(str, gammas), title=title, num_words=0)
    reached = new_table(
        "batch",
        "context",
        "gamma",
        "of the best",
        "chosen apart",
        title="the schedule",
        num_words=0,
    )
    for cell, share in zip(cells, shares, strict=True):
        key = (f"{cell.batch}", f"{cell.context:,}")
        measured.add_row(
            *key, *(f"{cell.speedups[g]:.2f}" + ("*" if g == cell.best else "") for g in gammas)
        )
        gamma = by.gamma(cell.batch, cell.context)
        reached.add_row(*key, f"{gamma}", f"{share.of_best:.1%}", _words(share))
    return Group(measured, "", reached, *_sentences(shares), _regret(shares, of_batch))


def _regret(shares: Sequence[ShareOfBest], of_batch: Sequence[ShareOfBest]) -> str:
    """Return what a schedule loses that depends on the batch alone."""
    words = []
    for name, some in (("batch alone", of_batch), ("batch and context", shares)):
        lost = [1 - share.of_best for share in some]
        worst, mean = max(lost), fmean(lost)
        words.append(f"by {name} {worst:.1%} at worst and {mean:.1%} on average")
    return f"regret against the best gamma of each cell: {'; '.join(words)}"


def _words(share: ShareOfBest) -> str:
    low_high = " [{:.1%}, {:.1%}]".format(*share.apart_ci95) if share.apart_ci95 else ""
    return "-" if share.apart is None else f"{share.apart:.1%}{low_high}"


def shares_apart(shares: Sequence[ShareOfBest]) -> list[float]:
    """Return the shares of the best gamma that was chosen apart, where there are any."""
    return [share.apart for share in shares if share.apart is not None]


def _sentences(shares: Sequence[ShareOfBest]) -> list[str]:
    of_best = [share.of_best for share in shares]
    apart = shares_apart(shares)
    reached = f"{min(of_best):.1%} of it at worst and {median(of_best):.1%} in the median cell"
    said = [f"* the best; the schedule reaches {reached}"]
    if apart:
        said.append(
            f"chosen apart: against the best gamma of the other turns; {min(apart):.1%} at worst"
            f" and {median(apart):.1%} in the median cell. Noise makes the first share too low and"
            " this one too high"
        )
    return said
