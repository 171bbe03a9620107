"""Draw a chart that is described in Vega-Lite, or refuse to. Whatever draws such a chart calls
`picture`.

vl-convert raises nothing when a chart fails: it prints the error of its JavaScript and returns a
blank picture.
"""

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import vl_convert

from magicdec.errors import UserError
from magicdec.units import is_number

FORMATS = ("pdf", "png", "svg")
# Keys of a description that hold values of any text, and no placeholders.
DATA = ("data", "datasets")
COMPLAINT = re.compile(r"^(?:WARN|ERROR) (.+)", re.MULTILINE)  # as vl-convert prints one
JOINED = ("line", "area")  # kinds of marks that join items: a single item is not visible


def picture(spec: Mapping[str, Any], kind: str, scale: float = 2.0) -> bytes:
    """Return a chart as a file of one of FORMATS. A PNG has `scale` pixels per point.

    Raise UserError for a placeholder without a value, for anything that vl-convert prints, and for
    a chart without marks.
    """
    if unfilled := sorted(set(placeholders(spec))):
        raise UserError(f"a chart cannot be drawn: nothing was given for {', '.join(unfilled)}")
    with _complaints() as complaints:
        vega = vl_convert.vegalite_to_vega(dict(spec), show_warnings=True)
        scene = vl_convert.vega_to_scenegraph(vega)
        content = _converted(vega, kind, scale)
    if complaints:
        raise UserError(f"a chart cannot be drawn: {complaints[0]}")
    if not any(_marks(scene["scenegraph"])):
        raise UserError("a chart cannot be drawn: none of its values has a place on its axes")
    return content


def placeholders(spec: Any) -> Iterator[str]:
    """Yield the texts of a description that are still placeholders, such as $x."""
    if isinstance(spec, str) and spec.startswith("$"):
        yield spec
    elif isinstance(spec, list):
        for item in spec:
            yield from placeholders(item)
    elif isinstance(spec, Mapping):
        for key, item in spec.items():
            if key not in DATA:
                yield from placeholders(item)


def _converted(vega: dict[str, Any], kind: str, scale: float) -> bytes:
    if kind == "png":
        return vl_convert.vega_to_png(vega, scale=scale)
    return vl_convert.vega_to_pdf(vega) if kind == "pdf" else vl_convert.vega_to_svg(vega).encode()


@contextmanager
def _complaints() -> Iterator[list[str]]:
    """Collect the warnings and errors that vl-convert prints. It writes to the process's stderr,
    not to sys.stderr.
    """
    complaints: list[str] = []
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield complaints
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            said.seek(0)
            text = said.read().decode(errors="replace")
            complaints += COMPLAINT.findall(text)
            if text and not complaints:  # another thread's
                sys.stderr.write(text)


def _marks(scene: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the visible items that stand for values; those of axes and legends do not."""
    for mark in _descendants(scene):
        if mark.get("role") == "mark" and "marktype" in mark:
            items = [item for item in mark["items"] if _is_visible(item)]
            if len(items) > (mark["marktype"] in JOINED):
                yield from items


def _descendants(group: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield group
    for item in group.get("items", ()):
        yield from _descendants(item)


def _is_visible(item: Mapping[str, Any]) -> bool:
    is_placed = all(is_number(item.get(axis, 0)) for axis in ("x", "y"))
    return is_placed and item.get("opacity", 1) > 0 and item.get("defined", True)
