"""The page that benchmarks/gpu.py writes: docs/results/<card>.md."""

from collections.abc import Callable
from typing import Any

from magicdec.tracking.cells import cell, markdown_table

Record = dict[str, Any]
TITLES = {
    "a": "Correctness",
    "b": "Ceilings of this card",
    "c": "Attention of one layer; reading K and V once at the copy bandwidth, as a part of its time",
    "d": "Steps of Llama-3.1-8B, random weights; moving what they must at the copy bandwidth, as a part of their time",
    "e": "Speedup at a SYNTHETIC acceptance, and the formula's value from the steps",
    "f": "The bundled pair, real acceptance",
    "g": "Peers: the bundled target autoregressively, ms per token",
}


def page(points: Callable[[str], dict[str, Record]]) -> str:
    """Return the page as Markdown, with a section for each part, measured or not yet."""
    facts = points("machine")
    lines = [f"# On {facts['device']}", "", f"`python benchmarks/gpu.py`, PyTorch {facts['torch']}.", ""]
    lines += ["A REHEARSAL: these figures mean nothing.", ""] if facts.get("rehearsal") else []
    for part, title in TITLES.items():
        lines += [f"## {title}", ""]
        known = points(part)
        lines += [_table(known) if known else "Not yet measured.\n"]
    return "\n".join(lines)


def _table(points: dict[str, Record]) -> str:
    columns = list(dict.fromkeys(name for point in points.values() for name in point if name != "commit"))
    columns.append("commit")
    return markdown_table(["", *columns], [[key, *map(point.get, columns)] for key, point in points.items()])


def short(record: Record) -> str:
    """Return a point in one line."""
    return ", ".join(f"{name} {cell(value)}" for name, value in record.items())
