"""Write a table of runs as one HTML page, which needs no network: data, scripts and the chart library are part of it.

Data is stored by column, a constant once and words by number, so that 10,000 runs make a page of a few megabytes.
"""

import json
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

from magicdec.tracking.files import SAMPLE, read_lines
from magicdec.tracking.reader import IMPOSSIBLE, gpu_trouble, noise
from magicdec.tracking.report.rows import FACTS, Row, is_setting, keys_of, telling, varying
from magicdec.tracking.store import NOT_IN_ID

LEFT_OUT = FACTS - {"id", "status", "kind", "reason"}
NOT_REPEATED = NOT_IN_ID - {"plugins"}  # no part of a copied command
# The parts of the page: a place in page.html, and the files that fill it.
PARTS = {
    "STYLE": ("page.css",),
    "LICENCES": ("vendor/d3.LICENSE", "vendor/plot.LICENSE"),
    "D3": ("vendor/d3.min.js",),
    "PLOT": ("vendor/plot.umd.min.js",),
    "SCRIPT": ("charts.js", "page.js"),
}
MAX_SAMPLES, MAX_ROUNDS = 200, 60  # runs whose generated text is part of the page; rounds of each
DIGITS = 5  # significant ones: finer than any measurement


def html_page(rows: Sequence[Row], title: str) -> str:
    """Return the page of some runs."""
    settings, differing = telling(rows), varying(rows)
    keys = [key for key in keys_of(rows) if key not in LEFT_OUT]
    columns = {key: _column([row.get(key) for row in rows]) for key in keys if key in differing or not is_setting(key)}
    for name, trouble in (("noise", noise), ("gpu_trouble", gpu_trouble)):
        columns[name] = _column([", ".join(trouble(row)) or None for row in rows])
    columns["command"] = _column([command(row) for row in rows])
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    data = {"title": title, "made": now, "number": len(rows), "settings": settings, "columns": columns}
    data |= {"impossible": IMPOSSIBLE, "samples": dict(islice(_samples(rows), MAX_SAMPLES))}
    assets = files("magicdec.tracking.report") / "assets"
    texts = {name: (assets / name).read_text(encoding="utf-8") for names in PARTS.values() for name in names}
    parts = {"TITLE": escape(title)} | {part: "\n".join(texts[name] for name in names) for part, names in PARTS.items()}
    parts["DATA"] = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    page = (assets / "page.html").read_text(encoding="utf-8")
    return re.sub(r"/\*([A-Z0-9]+)\*/", lambda found: parts[found[1]], page)


def _samples(rows: Sequence[Row]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the id of each run with the first of its samples, the newest run first."""
    folders = {row["id"]: row["folder"] for row in reversed(rows) if "folder" in row}
    for run, folder in folders.items():
        for sample in read_lines(Path(folder, "samples.jsonl"), SAMPLE)[:1]:
            rounds = sample.get("rounds", [])
            yield run, {**sample, "rounds": rounds[:MAX_ROUNDS], "left_out": max(0, len(rounds) - MAX_ROUNDS)}


def command(row: Row) -> str:
    """Return the command line that repeats this run."""
    overrides = json.loads(row.get("overrides", "[]"))
    return shlex.join(["magicdec", *(text for text in overrides if re.split("[.=/]", text)[0] not in NOT_REPEATED)])


def _column(values: list[Any]) -> dict[str, Any]:
    """Return a column as a constant, as words by their number, or as its values."""
    values = [_rounded(value) if isinstance(value, float) else value for value in values]
    distinct = dict.fromkeys((type(value), value) for value in values)
    if len(distinct) == 1:
        return {"constant": values[0]}
    if all(value is None or isinstance(value, str) for value in values) and len(distinct) < len(values) / 2:
        words = {word: number for number, (_, word) in enumerate(distinct)}
        return {"words": list(words), "indices": [words[value] for value in values]}
    return {"values": values}


def _rounded(value: float) -> float | None:
    """Return a number with DIGITS, or None for NaN and infinity, which JSON cannot hold."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
