"""The page that benchmarks/gpu.py writes: docs/results/gpu.md."""

from collections.abc import Callable

from gpu_store import Record

from magicdec.tracking.cells import markdown_table

TITLES = {
    "doctor": "The machine",
    "correct": "Correctness, on a reduced matrix",
    "ceilings": "Ceilings of this card",
    "cells": "Rows that fit",
    "profile": "A round, kernel by kernel, next to [its prediction](../predictions/gpu.md)",
    "prefill": "Prefill of Llama-3.1-8B, random weights",
    "steps": "Steps of Llama-3.1-8B, random weights; moving what they must at the copy bandwidth, as part of the time",
    "rounds": "Speedup at a SYNTHETIC acceptance, the formula's value from the steps, and the predicted one",
    "sampling": "Rounds that sample",
    "ranks": "All GPUs together",
    "attention": "Attention of one layer; reading K and V once at the copy bandwidth, as a part of its time",
    "pair": "The bundled pair, real acceptance",
    "peers": "Peers: the bundled target autoregressively, ms per token",
    "tests": "All tests that need a GPU",
}


def page(points: Callable[[str], dict[str, Record]]) -> str:
    """Return the page as Markdown, with a section for each part, measured or not yet."""
    facts = points("machine")
    lines = [f"# On {facts['device']}", "", f"`python benchmarks/gpu.py`, PyTorch {facts['torch']}.", ""]
    lines += ["A REHEARSAL: these figures mean nothing.", ""] if facts.get("rehearsal") else []
    lines += ["`predicted_...` is the cost model's or, in the profile, that of docs/predictions/gpu.md.", ""]
    for part, title in TITLES.items():
        known = points(part)
        lines += [f"## {title}", "", _table(known) if known else "Not yet measured.\n"]
    return "\n".join(lines)


def _table(points: dict[str, Record]) -> str:
    names = dict.fromkeys(name for point in points.values() for name in point if name not in ("commit", "text"))
    columns = [*names, "commit"]
    rows = [[key, *(_cell(point.get(column)) for column in columns)] for key, point in points.items()]
    texts = [f"\n{point['text']}" for point in points.values() if "text" in point]
    return markdown_table(["", *columns], rows) + "".join(texts)


def _cell(value: object) -> object:
    return value.replace("|", "\\|") if isinstance(value, str) else value
