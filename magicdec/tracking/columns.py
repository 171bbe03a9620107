"""A stored run as one row of a table: dotted configuration keys (cache.budget), and the metrics."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from magicdec.tracking.cells import is_number
from magicdec.tracking.run_id import NOT_IN_ID

Row = dict[str, Any]
INTERVAL, ENDS = "_ci95", ("/low", "/high")  # a figure's 95% interval: two columns of a table
UNGROUPED = ("attention",)  # keys of config.yaml that are in no group
NOT_METRICS = ("attempt", "pid")  # numbers that tell one run from another


def flatten(run: Mapping[str, Any]) -> Row:
    """Return a stored run as one row: nothing is nested, and null values are left out."""
    result = {key: value for key, value in run.items() if key != "config"}
    row = dict(leaves(run.get("config") or {})) | dict(leaves(result))
    if row.get("data.name") in ("prompts", "jsonl") and isinstance(
        mean := row.get("data/context_len_mean"), float
    ):
        # For a user's own prompts the setting is only a bound.
        row["batch.context_len"] = round(mean)
    return row


def interval(row: Row, key: str) -> tuple[float, float] | None:
    """Return the 95% interval of a figure, if it has one."""
    low, high = [row.get(f"{key}{INTERVAL}{end}") for end in ENDS]
    return (low, high) if is_number(low) and is_number(high) else None


def is_setting(key: str) -> bool:
    """Return True for a configuration key, which has dots or is in UNGROUPED; metrics have
    slashes.
    """
    return key in UNGROUPED or (
        "." in key and "/" not in key and key.partition(".")[0] not in NOT_IN_ID
    )


def leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the numbers, texts and lists of nested mappings with their dotted keys; an interval as
    two numbers.
    """
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from leaves(item, f"{prefix}{key}.")
        elif (
            key.endswith(INTERVAL)
            and isinstance(item, list)
            and [*map(is_number, item)] == [True, True]
        ):
            yield from zip((f"{prefix}{key}{end}" for end in ENDS), item, strict=True)
        elif isinstance(item, list | tuple):
            yield f"{prefix}{key}", json.dumps(item, separators=(",", ":"))
        elif item is not None:
            yield f"{prefix}{key}", item
