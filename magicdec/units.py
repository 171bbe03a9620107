"""Units, and how the main figure is written."""

GIB = 1 << 30  # bytes


def both_speedups(row: float, batch: float | None) -> str:
    """Return both speedups in a phrase: a row's, and that of the batch, which waits for its slowest row."""
    return f"{row:.2f}x per row" + (f" and {batch:.2f}x per batch" if batch else "")
