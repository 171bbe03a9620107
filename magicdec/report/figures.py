"""Figures of stored runs as files: metrics over a setting, for a paper (`magicdec figure`) and of a
sweep.
"""

import re
import textwrap
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from magicdec.errors import UserError
from magicdec.measure.trust import noise
from magicdec.report.charts import filled, template
from magicdec.report.export import write
from magicdec.report.picture import picture
from magicdec.report.query import constants, informative, rank
from magicdec.tracking.cells import cell
from magicdec.tracking.columns import Row, interval
from magicdec.units import is_number

BATCH, CONTEXT = "batch.size", "batch.context_len"
LOG_FROM = 8  # values over this ratio get a logarithmic axis
CAPTION_WIDTH = 100  # characters
NOT_TIMED = ("predicted/", "published/", "acceptance", "alpha", "memory/", "data/", "lossless/")
# A metric, or the ratio of two.
Measure = str | tuple[str, str]
SPEEDUPS = {
    "measured": "speedup",
    "predicted": "predicted/speedup",
    "published": "published/speedup",
}
STEPS = {"T_D / T_T": "draft", "T_V / T_T": "verify"}
# The figures of a sweep: the label of y, the only x that makes sense (None: what is swept), and
# what is drawn.
FIGURES: dict[str, tuple[str, str | None, Mapping[str, Measure]]] = {
    "speedup": ("speedup", None, SPEEDUPS),
    "ratios": (
        "time of a step, in target steps",
        None,
        {name: (f"time/{step}_ms", "time/target_decode_ms") for name, step in STEPS.items()}
        | {
            f"{name}, predicted": (f"predicted/{step}_ms", "predicted/target_decode_ms")
            for name, step in STEPS.items()
        },
    ),
    "intensity": (
        "FLOPs per byte",
        CONTEXT,
        {
            "arithmetic intensity": "predicted/arithmetic_intensity",
            "of the machine": "predicted/ridge",
        },
    ),
}


def points(
    rows: Sequence[Row], x: str, series: str | None, measures: Mapping[str, Measure]
) -> list[dict[str, Any]]:
    """Return a point per run and measure: its value with the 95% interval, if there is one, and
    whether it is noisy.

    Without `series` the measures are the series.
    """
    points = []
    for row in rows:
        for kind, key in measures.items():
            value = _value(row, key)
            if value is None or row.get(x) is None:
                continue
            name = kind if series is None else _name(row.get(series))
            low, high = (interval(row, key) if isinstance(key, str) else None) or (value, value)
            point = {
                "x": row[x],
                "series": name,
                "kind": kind,
                "y": value,
                "low": low,
                "high": high,
            }
            ratio = {"rule": 1} if "speedup" in key else {}
            points.append(point | ratio | {"noisy": is_timed(key) and bool(noise(row))})
    return points


def is_timed(key: Measure) -> bool:
    """Return whether a metric was timed, so that a disturbed run has a wrong value."""
    return not (isinstance(key, str) and key.startswith(NOT_TIMED))


def figure(
    rows: Sequence[Row], x: str, series: str | None, measures: Mapping[str, Measure], title: str
) -> dict[str, Any] | None:
    """Return the chart of some runs with what was held constant below it; None if they have no
    values for it.
    """
    keys = measures.values()
    rows = [
        row
        for row in rows
        if row.get(x) is not None and any(_value(row, key) is not None for key in keys)
    ]
    drawn = sorted(
        points(rows, x, series, measures),
        key=lambda point: [rank(point["x"]), rank(point["series"])],
    )
    if not drawn:
        return None
    places = list(dict.fromkeys(point["x"] for point in drawn))
    by = "number" if all(is_number(point["series"]) for point in drawn) else "word"
    kinds = list(dict.fromkeys(point["kind"] for point in drawn))
    titles = {
        "x": x,
        "y": title,
        "series": series or "",
        "values": places,
        "caption": _caption(rows, drawn, (x, series)),
    }
    titles["kinds"] = kinds if series and len(kinds) > 1 else []
    return filled(template(f"line {_kind(places)} {by}"), titles, drawn)


def draw(spec: Mapping[str, Any], path: Path, command: str) -> None:
    """Write a figure in the format of the path's suffix, with the command that draws it in its
    metadata.
    """
    kind = path.suffix.removeprefix(".")
    write(path, DESCRIBED[kind](picture(spec, kind), command))


def _num_values(rows: Sequence[Row], key: str) -> int:
    """Return how many different values a setting has."""
    return len({row.get(key) for row in rows} - {None})


def draw_sweep(rows: Sequence[Row], folder: Path, command: str) -> list[Path]:
    """Draw a sweep over the one or two settings that it varies, and return the paths of the files.

    Raise UserError if there are no values.
    """
    written = []
    swept = [key for key in informative(rows) if _num_values(rows, key) > 1]
    for name, (title, only, measures) in FIGURES.items():
        x = only or _axis(rows, swept)
        series = next((key for key in swept if key != x), None)
        if only not in (None, *swept):
            continue
        if spec := figure(rows, x, series, measures, title):
            written.append(folder / f"{name}.png")
            draw(spec, written[-1], command)
    if not written:
        raise UserError("no figures: these runs hold no speedups and no step times")
    return written


def _axis(rows: Sequence[Row], swept: Collection[str]) -> str:
    """Return the setting for the x axis: the batch where it is swept, else that with most numbers,
    else any.
    """
    numbers = {key: len({row[key] for row in rows if is_number(row.get(key))}) for key in swept}
    return BATCH if BATCH in swept or not swept else max(swept, key=lambda key: numbers[key])


def _value(row: Row, key: Measure) -> float | None:
    """Return a metric, or the ratio of two; None if the run has no such numbers."""
    if isinstance(key, str):
        return row[key] if is_number(row.get(key)) else None
    numerator, denominator = key
    over = row.get(numerator)
    under = row.get(denominator)
    return over / under if is_number(over) and is_number(under) and under else None


def _name(value: Any) -> Any:
    """Return the value of a setting as the name of a series: a number stays one."""
    return value if is_number(value) else cell(value) or "none"


def _kind(values: Collection[Any]) -> str:
    if not all(is_number(value) for value in values):
        return "word"
    return "log" if min(values) > 0 and max(values) >= LOG_FROM * min(values) else "number"


def _caption(
    rows: Sequence[Row], drawn: Sequence[Mapping[str, Any]], axes: Collection[str | None]
) -> list[str]:
    """Return what was held constant, what else differs, and what bars and marks mean."""
    held = ", ".join(
        f"{key} {cell(value)}" for key, value in constants(rows).items() if key not in axes
    )
    others = [key for key in informative(rows) if key not in axes]
    lines = [f"Held constant: {held}."] if held else []
    lines += [f"Medians over runs that also differ in {', '.join(others)}."] if others else []
    runs = Counter((point["x"], point["series"], point["kind"]) for point in drawn)
    alone = [point for point in drawn if runs[point["x"], point["series"], point["kind"]] == 1]
    notes = ["Bars: 95% intervals."] if any(point["high"] > point["low"] for point in alone) else []
    notes += ["!: a noisy measurement."] if any(point["noisy"] for point in drawn) else []
    return [
        part
        for line in [*lines, " ".join(notes)]
        if line
        for part in textwrap.wrap(line, CAPTION_WIDTH)
    ]


def _svg_with(content: bytes, text: str) -> bytes:
    """Return an SVG file with a description in its first element."""
    described = f"<metadata>{escape(text)}</metadata>".encode()
    return re.sub(rb"<svg[^>]*>", lambda tag: tag[0] + described, content, count=1)


def _png_with(content: bytes, text: str) -> bytes:
    """Return a PNG file with a text chunk after its header."""
    chunk = b"iTXtDescription\0\0\0\0\0" + text.encode()
    whole = (len(chunk) - 4).to_bytes(4) + chunk + zlib.crc32(chunk).to_bytes(4)
    end = 8 + 25  # of the signature and the header
    return content[:end] + whole + content[end:]


def _pdf_with(content: bytes, text: str) -> bytes:
    """Return a PDF file with a description, appended as an incremental update. Keep a file of an
    unknown form.
    """
    trailer = re.search(
        rb"/Size (\d+)\s+/Root (\d+ \d+ R).*startxref\s+(\d+)\s+%%EOF\s*$", content, re.DOTALL
    )
    if not trailer:
        return content
    number = int(trailer[1])
    before = int(trailer[3])
    root = trailer[2].decode()
    words = f"\ufeff{text}".encode("utf-16-be").hex()
    start = len(content) + 1
    entry = f"{number} 0 obj\n<< /Subject <{words}> >>\nendobj\n"
    table = f"xref\n{number} 1\n{start:010d} 00000 n\r\n"
    end = f"trailer\n<< /Size {number + 1} /Root {root} /Info {number} 0 R /Prev {before} >>\n"
    return content + f"\n{entry}{table}{end}startxref\n{start + len(entry)}\n%%EOF\n".encode()


DESCRIBED = {"pdf": _pdf_with, "png": _png_with, "svg": _svg_with}
