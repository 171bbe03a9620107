"""Write a table of runs as one HTML page, which needs no network: its data, its script and Vega are
part of it.

The answer, the ranking and the texts are HTML when the page is written, by the Jinja template
assets/page.html. Charts are the descriptions of charts.py, which the page fills with the runs that
its filter lets through. Data is stored by column and compressed, so that 10,000 runs make a page of
a few megabytes.
"""

import base64
import gzip
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any
from unicodedata import category

import vl_convert
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from magicdec.measure.trust import gpu_trouble, is_impossible, noise
from magicdec.report.charts import DESCRIPTIONS, PARTS, UNITS, template
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
from magicdec.report.query import LOAD_KEYS, NEVER_MIXED, informative, rank, varying
from magicdec.report.rows import FACTS, keys_of, num_runs
from magicdec.shell import command_line
from magicdec.tracking.cells import cell
from magicdec.tracking.columns import Row, interval, is_setting
from magicdec.tracking.run_files import SAMPLE, read_lines
from magicdec.tracking.run_id import NOT_IN_ID
from magicdec.tracking.store import counted
from magicdec.units import WAYS, is_number

LEFT_OUT = FACTS - {"id", "status", "kind", "reason"}
NOT_REPEATED = NOT_IN_ID - {"plugins"}  # no part of a copied command
MAX_SAMPLES, MAX_ROUNDS = 200, 60  # runs whose generated text is part of the page; rounds of each
MAX_PICKS, MAX_VALUES = 9, 40  # settings with a menu of their values; values of such a setting
DIGITS = 5  # significant ones: finer than any measurement
# What a chart shows, by its name in the menu: kinds that are drawn together, and their metrics.
MEASURES: dict[str, dict[str, str]] = {
    "speedup": {
        "measured": "speedup",
        "measured, per batch": "speedup_wall",
        "measured, per level": "speedup_duration",
    }
    | {"predicted": PREDICTED, "published": "published/speedup"},
    "best gamma": {"predicted": "predicted/gamma"},
    "formula speedup": {"from step times and acceptance": "formula/speedup", "measured": "speedup"},
    **{
        name: {way: f"{way}/{name}" for way in reversed(WAYS)}
        for name in (
            *(
                "tokens_per_second",
                "time_per_output_token_ms",
                "time_to_first_token_ms",
                "request_latency_ms",
            ),
            "goodput_rps",
        )
    },
    **{
        name: {"measured": name}
        for name in ("acceptance_rate", "acceptance_length", "alpha", "memory/peak_gib")
    },
}
ACCEPTANCE = ("acceptance_rate", "acceptance_length", "alpha")  # of which a drawn one says nothing
TRADE = [
    [way, f"{way}/time_per_output_token_ms", f"{way}/tokens_per_second"] for way in reversed(WAYS)
]
# Predictions, as the name of a series, the measurement and the prediction.
OWN, MODEL = "the run's own step times and acceptance", "cost model"
STEPS = {"T_T": "target_decode", "T_D": "draft", "T_V": "verify", "round time": "round"}
COMPARED = {
    "speedup": [
        [OWN, "speedup", "formula/speedup"],
        [MODEL, "speedup", PREDICTED],
        [
            f"{MODEL} at the paper's gamma and acceptance",
            "published/speedup",
            "published/predicted_speedup",
        ],
    ],
    "speedup per batch": [
        [OWN, "speedup_wall", "formula/speedup_wall"],
        [MODEL, "speedup_wall", "predicted/speedup_wall"],
    ],
    **{
        f"{name}, ms": [[MODEL, f"time/{step}_ms", f"predicted/{step}_ms"]]
        for name, step in STEPS.items()
    },
}
COLUMNS = (
    *(
        "speedup",
        "speedup_wall",
        "speedup_duration",
        PREDICTED,
        "predicted/gamma",
        "published/speedup",
    ),
    *(
        "formula/speedup",
        "acceptance_rate",
        "acceptance_length",
        "alpha",
        "speculative/tokens_per_second",
    ),
    *("speculative/time_per_output_token_ms", "memory/peak_gib", "lossless/identical", "reason"),
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
    data, runs = _data(rows), counted(num_runs(rows), "run")
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
        judged=lambda row: {"marks": ""} | _judged(row),
        command=command,
    )


def _data(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what the script reads: the columns, the menus with their first choices, the
    descriptions of charts, and Vega as vl-convert carries it.
    """
    rows = [row | _judged(row) for row in rows]
    settings, differing = informative(rows), varying(rows)
    keys = keys_of(rows)
    shown = [
        key for key in keys if key not in LEFT_OUT and (key in differing or not is_setting(key))
    ]
    columns = {key: [_rounded(row.get(key)) for row in rows] for key in shown}
    columns |= {"": ["all"] * len(rows), "command": [command(row) for row in rows]}
    numeric = {key for key in keys if any(is_number(row.get(key)) for row in rows)}
    measures = {
        name: {kind: key for kind, key in kinds.items() if key in numeric}
        for name, kinds in MEASURES.items()
    }
    for name in ACCEPTANCE[:2]:
        of_categories = [
            key for key in keys if key.startswith("category/") and key.endswith(f"/{name}")
        ]
        measures[f"{name} by category"] = {
            key[len("category/") : -len(name) - 1]: key for key in of_categories
        }
    measures = {name: kinds for name, kinds in measures.items() if kinds}
    compared = {name: _compared(name, numeric) for name in COMPARED if _compared(name, numeric)[1]}
    samples = dict(islice(_samples(rows), MAX_SAMPLES))
    picks = _picks(rows, settings)
    menus = _menus(
        [key for key in settings if len({row.get(key) for row in rows}) <= MAX_VALUES], measures
    )
    menus |= {"compared": list(compared), "run": list(samples)}
    first = _first(rows, menus, picks)
    for key in picks:
        menus[f"pick:{key}"] = [
            "",
            *map(str, sorted({row[key] for row in rows if key in row}, key=rank)),
        ]
    table = [
        key
        for key in dict.fromkeys(["id", "status", "speedup", *settings[:8], *COLUMNS])
        if key in columns
    ]
    data = {
        "number": len(rows),
        "settings": settings,
        "columns": columns,
        "measures": measures,
        "compared": compared,
    }
    data |= {
        "menus": menus,
        "first": first,
        "picks": list(picks),
        "samples": samples,
        "table": table,
        "trade": TRADE,
    }
    data |= {
        "acceptance": ACCEPTANCE,
        "timed": [key for key in numeric if is_timed(key)],
        "log": LOG_FROM,
    }
    data |= {"templates": {name: template(name, on_page=True) for name in DESCRIPTIONS}}
    return data | {"vega": vega()}


@cache
def vega() -> str:
    """Return the library that draws the charts, as JavaScript. Bundling it takes a second."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def _compared(name: str, numeric: Collection[str]) -> tuple[str, list[list[str]]]:
    """Return the title of what predictions are compared with, and the series that there are values
    for.
    """
    sources = [source for source in COMPARED[name] if {*source[1:]} <= set(numeric)]
    kinds = {
        "published" if measured.startswith("published/") else "measured"
        for _, measured, _ in sources
    }
    return f"{' or '.join(sorted(kinds))} {name}", sources


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


def _picks(rows: Sequence[Row], settings: Sequence[str]) -> dict[str, str]:
    """Return the settings that have a menu of values, with the first choice: what must not mix is
    apart.
    """
    picks = {}
    for key in dict.fromkeys([*NEVER_MIXED[::-1], *settings, "device"]):
        values = Counter(str(row[key]) for row in rows if key in row)
        if 1 < len(values) <= MAX_VALUES:
            usual = next(
                (value for value in ("measured", "compare") if value in values),
                values.most_common(1)[0][0],
            )
            picks[key] = usual if key in NEVER_MIXED else ""
    return dict(islice(picks.items(), MAX_PICKS))


def _menus(axes: Sequence[str], measures: Sequence[str] | dict[str, Any]) -> dict[str, list[str]]:
    """Return the menus of the charts: what each shows, over which setting, with a colour for each
    value of which.
    """
    loads = [key for key in LOAD_KEYS if key in axes]
    values = {"1": [*measures], "2": [name for name in ACCEPTANCE if name in measures]}
    values["3"] = (
        [name for name in measures if name in MEASURES and WAYS[0] in MEASURES[name]]
        if loads
        else []
    )
    menus: dict[str, list[str]] = {"as": ["lines", "heat map"], "unit": list(UNITS)}
    menus["statistic"] = ["median", "max", "min"]
    for number, names in values.items():
        menus |= {f"value{number}": names, f"x{number}": loads if number == "3" else [*axes]}
        menus |= {f"series{number}": ["", *axes]}
    return menus | {"colour": ["", *axes], "bars": ["", *axes]}


def _first(
    rows: Sequence[Row], menus: dict[str, list[str]], picks: dict[str, str]
) -> dict[str, str]:
    """Return the first choice of each menu: settings in which the runs that are shown first
    differ.
    """
    shown = [
        row
        for row in rows
        if all(not value or str(row.get(key, value)) == value for key, value in picks.items())
    ]
    differ = [key for key in menus["x1"] if len({row.get(key) for row in shown}) > 1]
    numbers = [key for key in differ if all(is_number(row.get(key)) for row in shown)]

    def among(*names: str, but: str = "") -> str:
        return next((key for key in (*names, *differ) if key in differ and key != but), "")

    x1 = among("batch.size", "draft.gamma", "cache.budget", *numbers)
    x2 = among("cache.budget", "draft.gamma", *numbers)
    first = {key: names[0] if names else "" for key, names in menus.items()} | {
        "where": "",
        "sort": "-speedup",
    }
    first |= {
        "x1": x1,
        "series1": among("batch.context_len", "cache.policy", "cache.budget", but=x1),
        "bars": x1,
    }
    first |= {"x2": x2, "series2": among("cache.policy", "draft.name", "draft.gamma", but=x2)}
    first |= {"colour": among("cache.policy", "draft.name")}
    return first | {f"pick:{key}": value for key, value in picks.items()}


def _answered(answered: Answer) -> dict[str, Any]:
    """Return the first thing to read: what is best, how sure that is, by which measure, and what
    was held constant.
    """
    where, figure = answered.where(answered.top), escape(answered.top.figure())
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


def _samples(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Yield the id of each run with the first of its samples as HTML, the newest run first."""
    folders = {row["id"]: row["folder"] for row in reversed(rows) if "folder" in row}
    for run, folder in folders.items():
        for sample in read_lines(Path(folder, "samples.jsonl"), SAMPLE)[:1]:
            yield run, _text(sample)


def _text(sample: Any) -> str:
    """Return a row's text: the end of its prompt, and its continuation with the accepted proposals
    marked.
    """

    def span(kind: str, text: str | None) -> str:
        return f'<span class="{kind}">{escape(_visible(text or ""))}</span>'

    rounds = sample.get("rounds", [])
    parts = [
        span("accepted", "".join(entry["accepted"])) + span("bonus", entry["bonus"])
        for entry in rounds[:MAX_ROUNDS]
    ]
    written = "".join(parts) or span(
        "bonus", sample.get("speculative") or sample.get("autoregressive")
    )
    more = (
        f"\n... and {counted(len(rounds) - MAX_ROUNDS, 'round')}: magicdec show"
        if len(rounds) > MAX_ROUNDS
        else ""
    )
    return span("prompt", sample.get("prompt_end")) + written + more


def _visible(text: str) -> str:
    """Return a text whose control and other invisible characters are escaped: they could hide or
    reorder something.
    """
    hidden = {
        character
        for character in text
        if category(character).startswith("C") and character not in "\n\t"
    }
    return text.translate({ord(character): f"\\u{{{ord(character):x}}}" for character in hidden})


def command(row: Row) -> str:
    """Return the command line that repeats this run."""
    overrides = json.loads(row.get("overrides", "[]"))
    words = [text for text in overrides if re.split("[.=/]", text)[0] not in NOT_REPEATED]
    return command_line(["magicdec", *words])


def _rounded(value: Any) -> Any:
    """Return a number with DIGITS, or None for NaN and infinity, which JSON cannot hold; all else
    as it is.
    """
    if not isinstance(value, float):
        return value
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
