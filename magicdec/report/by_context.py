"""Acceptance by context: a row for each bucket of contexts of a run under load."""

import re
from collections.abc import Iterable, Iterator

from magicdec.report.query import HELD, NEVER_MIXED
from magicdec.tracking.columns import Row, is_setting

CONTEXT = "context"  # what `magicdec figure --x` calls it
# Besides settings: whether a run is done, and with which runs it may be drawn.
KEPT = frozenset({"status", *NEVER_MIXED, *HELD})
OF_BUCKET = re.compile(r"context/(\d+)/(.+)")  # as magicdec/measure/contexts.py names its metrics


def rows_by_context(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield a row for each bucket of contexts of each run.

    It has the run's settings, what may not mix with others, `context` (tokens of the shortest
    prompts), and the bucket's own metrics, such as acceptance_length. A run without buckets yields
    nothing.
    """
    for row in rows:
        buckets: dict[int, Row] = {}
        for key, value in row.items():
            if match := OF_BUCKET.fullmatch(key):
                buckets.setdefault(int(match[1]), {})[match[2]] = value
        settings = {key: value for key, value in row.items() if is_setting(key) or key in KEPT}
        for tokens in sorted(buckets):
            yield settings | {CONTEXT: tokens} | buckets[tokens]
