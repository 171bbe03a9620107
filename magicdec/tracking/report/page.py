"""One self-contained HTML page: the runs as data, and a few hundred lines of our own that draw them, without a network.

Columns travel as columns, constants once and words by number, so that 10,000 runs make a page of a few megabytes.
"""

import json
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from typing import Any

from magicdec.tracking.reader import NOISY, gpu_trouble
from magicdec.tracking.report.rows import FACTS, Row, is_setting, keys_of, telling, varying

NOT_TOLD = FACTS - {"id", "status", "kind", "reason"}
NOT_REPEATED = ("runs_dir=", "resume=", "sweep.", "wandb.", "hydra")  # what a copied command does without
DIGITS = 5  # significant ones: finer than any measurement


def render(rows: Sequence[Row], title: str) -> str:
    """The page as text."""
    settings, differing = telling(rows), varying(rows)
    keys = [key for key in keys_of(rows) if key not in NOT_TOLD and not key.startswith("rerun.")]
    told = {key: _column([row.get(key) for row in rows]) for key in keys if key in differing or not is_setting(key)}
    told["gpu_trouble"] = _column([", ".join(gpu_trouble(row)) or None for row in rows])
    told["command"] = _column([command(row, differing) for row in rows])
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    data = {"title": title, "made": now, "number": len(rows), "settings": settings, "noisy": NOISY, "columns": told}
    assets = files("magicdec.tracking.report") / "assets"
    page = (assets / "page.html").read_text(encoding="utf-8")
    script = "\n".join((assets / name).read_text(encoding="utf-8") for name in ("plots.js", "page.js"))
    parts = {
        "TITLE": escape(title),
        "STYLE": (assets / "page.css").read_text(encoding="utf-8"),
        "DATA": json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c"),
        "SCRIPT": script,
    }
    for name, text in parts.items():  # the data comes late: what it holds is not replaced again, but for the script
        page = page.replace(f"/*{name}*/", text, 1)
    return page


def command(row: Row, settings: Sequence[str]) -> str:
    """The command line that makes this run again: its own overrides, or else what sets it apart."""
    stored = row.get("overrides")
    if stored is not None:
        parts = [part for part in json.loads(stored) if not part.startswith(NOT_REPEATED)]
    else:
        groups = {"target": "target.name", "draft": "draft.name", "cache": "cache.policy", "data": "data.name"}
        parts = [f"{group}={row[key]}" for group, key in groups.items() if key in row]
        told = {*groups.values(), *(key for key in settings if key.startswith("load."))}  # a run has all its levels
        parts += [f"{key}={row[key]}" for key in settings if key in row and key not in told]
    return shlex.join(["python", "launch.py", *parts])


def _column(values: list[Any]) -> dict[str, Any]:
    """A constant, words by their number, or the values as they are."""
    distinct = dict.fromkeys((type(value), value) for value in values)
    if len(distinct) == 1:
        return {"constant": values[0]}
    if all(value is None or isinstance(value, str) for value in values) and len(distinct) < len(values) / 2:
        words = {word: number for number, (_, word) in enumerate(distinct)}
        return {"words": list(words), "indices": [words[value] for value in values]}
    return {"values": [float(f"{v:.{DIGITS}g}") if isinstance(v, float) else v for v in values]}
