"""Write a table of runs as one HTML page, which needs no network: its data, its script and Vega are
part of it.

The answer, the ranking and the texts are HTML when the page is written, by the Jinja template
assets/page.html. Charts are the descriptions of charts.py, which the page fills with the runs that
its filter lets through, by the menus of page_menus.py. Data is stored by column and compressed, so
that 10,000 runs make a page of a few megabytes.
"""

import base64
import gzip
import json
import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any

import vl_convert
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from magicdec.measure.trust import gpu_trouble, is_impossible, noise
from magicdec.report.charts import DESCRIPTIONS, PARTS, template
from magicdec.report.fastest import (
    BY,
    PER,
    PREDICTED,
    Answer,
    answer,
    is_synthetic,
    is_too_large,
)
from magicdec.report.figures import LOG_FROM, is_timed
from magicdec.report.page_menus import (
    ACCEPTANCE,
    TRADE,
    comparisons,
    first_choices,
    measures_of,
    menus_of,
    picks_of,
)
from magicdec.report.page_samples import samples_of
from magicdec.report.query import LABELS, informative, is_speedup, varying
from magicdec.report.rows import FACTS, keys_of, num_runs
from magicdec.shell import command_line
from magicdec.tracking.cells import cell
from magicdec.tracking.columns import Row, interval, is_setting
from magicdec.tracking.run_id import NOT_IN_ID
from magicdec.tracking.store import counted
from magicdec.units import is_number

LEFT_OUT = FACTS - {"id", "status", "kind", "reason"}
NOT_REPEATED = NOT_IN_ID - {"plugins"}  # no part of a copied command
DIGITS = 5  # significant ones: finer than any measurement
COLUMNS = (
    "speedup",
    "speedup_wall",
    "speedup_duration",
    PREDICTED,
    "predicted/gamma",
    "published/speedup",
    "formula/speedup",
    "acceptance_rate",
    "acceptance_length",
    "alpha",
    "speculative/tokens_per_second",
    "speculative/time_per_output_token_ms",
    "memory/peak_gib",
    "lossless/identical",
    "reason",
)
EXTRA = {
    **{key: f"speedup per {per}" for key, per in PER.items() if key != "speedup"},
    "speculative/tokens_per_second": "tokens/s",
    "speculative/time_per_output_token_ms": "TPOT, ms",
    "predicted/speedup_wall": "predicted wall",
    "predicted/gamma": "best gamma",
    "predicted/break_even_alpha": "pays from alpha",
}


def html_page(rows: Sequence[Row], title: str) -> str:
    """Return the page of some runs."""
    assets = files("magicdec.report") / "assets"
    texts = {path.name: path.read_text(encoding="utf-8") for path in assets.iterdir()}
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["cell"] = cell
    data = _data(rows)
    runs = counted(num_runs(rows), "run")
    packed = base64.b64encode(
        gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0)
    ).decode()
    answered = answer(rows)
    facts = {
        "title": title,
        "runs": runs,
        "made": f"{runs}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }
    facts |= {
        "style": texts["page.css"],
        "script": texts["page.js"],
        "licences": texts["licences.txt"],
    }
    return environment.from_string(texts["page.html"]).render(
        **facts | (_answered(answered) if answered else {"found": None}),
        menus=data["menus"],
        picks=data["picks"],
        packed=packed,
        warned=_warned(rows),
        interval=interval,
        figure=_figure,
        judged=lambda row: {"marks": ""} | _judged(row),
        command=command,
    )


def _data(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what the script reads: the columns, the menus with their first choices, the
    descriptions of charts, and Vega as vl-convert carries it.
    """
    rows = [_rounded(row | _judged(row)) for row in rows]
    settings, keys = informative(rows), keys_of(rows)
    numeric = {key for key in keys if any(is_number(row.get(key)) for row in rows)}
    columns = _columns(rows, keys)
    measures = measures_of(keys, numeric)
    compared = comparisons(numeric)
    samples = samples_of(rows)
    picks = picks_of(rows, settings)
    menus = menus_of(rows, settings, measures, picks)
    menus |= {"compared": list(compared), "run": list(samples)}
    table = dict.fromkeys(["id", "status", "speedup", *settings[:8], *COLUMNS])
    return {
        "number": len(rows),
        "settings": settings,
        "columns": columns,
        "measures": measures,
        "compared": compared,
        "menus": menus,
        "first": first_choices(rows, menus, picks),
        "picks": list(picks),
        "samples": samples,
        "table": [key for key in table if key in columns],
        "speedups": [key for key in columns if is_speedup(key)],
        "labels": {key: label for key, label in LABELS.items() if key in columns},
        "trade": TRADE,
        "acceptance": ACCEPTANCE,
        "timed": [key for key in numeric if is_timed(key)],
        "log": LOG_FROM,
        "templates": {name: template(name, on_page=True) for name in DESCRIPTIONS},
        "vega": vega(),
    }


def _columns(rows: Sequence[Row], keys: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of the keys that the page can show: settings only where they differ."""
    differing = varying(rows)
    shown = [
        key for key in keys if key not in LEFT_OUT and (key in differing or not is_setting(key))
    ]
    columns = {key: [row.get(key) for row in rows] for key in shown}
    return columns | {"": ["all"] * len(rows), "command": [command(row) for row in rows]}


@cache
def vega() -> str:
    """Return the library that draws the charts, as JavaScript. Bundling it takes a second."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def _judged(row: Row) -> Row:
    """Return what is drawn or marked of a run and no metric of its own: the parts of its round, and
    its marks.
    """
    marks = {
        "synthetic": is_synthetic(row),
        "noisy": bool(noise(row)),
        "GPU troubled": bool(gpu_trouble(row)),
        "does not fit": is_too_large(row),
        "impossible times": is_impossible(row),
    }
    judged: Row = {"noisy": True} if marks["noisy"] else {}
    if any(marks.values()):
        judged["marks"] = ", ".join(name for name, holds in marks.items() if holds)
    for kind, source in (("measured", "time"), ("predicted", "predicted")):
        names = [f"{source}/{name}_ms" for name in ("round", "verify", "overhead", "target_decode")]
        names += ["acceptance_length" if kind == "measured" else PREDICTED]
        times = [row[name] for name in names if is_number(row.get(name))]
        if len(times) == len(names):
            whole, verify, rest, decode, gain = times
            parts = (
                whole - verify - rest,
                verify,
                max(0.0, rest),
                gain * (decode if kind == "measured" else whole),
            )
            judged[f"round/{kind}"] = dict(zip((*PARTS, "tokens"), parts, strict=True))
    return judged


def _answered(answered: Answer) -> dict[str, Any]:
    """Return the first thing to read: what is best, how sure that is, by which measure, and what
    was held constant.
    """
    where = answered.where(answered.top)
    figure = escape(answered.top.figure())
    sentence = escape(f"{where}: " if where else "") + escape(answered.winner(answered.top))
    extra = {
        key: label
        for key, label in EXTRA.items()
        if any(key in place.best for place in answered.places)
    }
    if answered.key != PREDICTED:
        extra = {key: label for key, label in extra.items() if not key.startswith("predicted/")}
    return {
        "found": answered,
        "measure": BY[answered.key],
        "extra": extra,
        "sentence": sentence.replace(figure, Markup("<b>") + figure + Markup("</b>")),
        "best": "best predicted speedup" if answered.key == PREDICTED else "best speedup",
    }


def _warned(rows: Sequence[Row]) -> dict[str, int]:
    """Return the numbers of runs that are not what they should be."""
    kinds = {
        "failed": [row for row in rows if row.get("status") == "failed"],
        "noisy": [row for row in rows if noise(row)],
        "with synthetic acceptance": [row for row in rows if is_synthetic(row)],
        "on a GPU that was throttled or shared": [row for row in rows if gpu_trouble(row)],
        "not identical to autoregressive": [
            row for row in rows if row.get("lossless/identical") is False
        ],
        "predicted not to fit in memory": [row for row in rows if is_too_large(row)],
    }
    return {what: num_runs(of) for what, of in kinds.items() if of}


def _figure(row: Row, key: str) -> str:
    """Return a figure as a cell: a speedup in its own form."""
    value = row.get(key)
    return f"{value:.2f}x" if is_speedup(key) and is_number(value) else cell(value)


def command(row: Row) -> str:
    """Return the command line that repeats this run."""
    overrides = json.loads(row.get("overrides", "[]"))
    words = [text for text in overrides if re.split("[.=/]", text)[0] not in NOT_REPEATED]
    return command_line(["magicdec", *words])


def _rounded(row: Row) -> Row:
    """Return a row whose floats have DIGITS, without NaN and infinity, which JSON cannot hold."""
    return {
        key: float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
        for key, value in row.items()
        if not isinstance(value, float) or math.isfinite(value)
    }
