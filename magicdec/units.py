"""Units, the two ways of decoding, what counts as a number, and how the main figure and lists are
written.
"""

from collections.abc import Sequence
from math import inf
from typing import Any, TypeGuard

WAYS = ("autoregressive", "speculative")  # as metrics begin
# Another way in which a server is profiled: with a draft that costs nothing, so that a round is its
# verification.
FREE = "free"
LOADS = ("concurrency", "rate", "replay")  # the kinds of a level of load
GIB = 1 << 30  # bytes


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return True for a finite number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < inf


def both_speedups(row: float, batch: float | None, of_row: str = "", of_batch: str = "") -> str:
    """Return both speedups in a phrase: a row's, and that of the batch, which waits for its slowest
    row, each followed by its interval.
    """
    return f"{row:.2f}x{of_row} per row" + (
        f" and {batch:.2f}x{of_batch} per batch" if batch else ""
    )


def enumerated(words: Sequence[str], conjunction: str) -> str:
    """Return words as a sentence lists them: "a, b and c", with "and" as the conjunction."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {conjunction} {words[-1]}"


def in_minutes(seconds: float | None) -> str:
    """Return a duration as people say it: 40 s, 12 min; nothing for one that is not known."""
    if seconds is None:
        return ""
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
