"""Units, the two ways of decoding, and how the main figure is written."""

WAYS = ("autoregressive", "speculative")  # as metrics begin
# Another way in which a server is profiled: with a draft that costs nothing, so that a round is its
# verification.
FREE = "free"
LOADS = ("concurrency", "rate", "replay")  # the kinds of a level of load
GIB = 1 << 30  # bytes


def both_speedups(row: float, batch: float | None, of_row: str = "", of_batch: str = "") -> str:
    """Return both speedups in a phrase: a row's, and that of the batch, which waits for its slowest
    row, each followed by its interval.
    """
    return f"{row:.2f}x{of_row} per row" + (
        f" and {batch:.2f}x{of_batch} per batch" if batch else ""
    )


def in_minutes(seconds: float | None) -> str:
    """Return a duration as people say it: 40 s, 12 min; nothing for one that is not known."""
    if seconds is None:
        return ""
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
