"""Render the pages of docs/results and docs/predictions, and their charts, from the CSV files next
to them.

    python benchmarks/render.py                   # all pages; needs altair
    python benchmarks/render.py cpu smollm2       # these
    python benchmarks/render.py cpu --runs runs   # measured again: first writes cpu.csv from the runs of its sweep

A page is a Jinja template in benchmarks/pages/: prose, with tables and charts of the rows of CSV
files. tables.yaml says which runs a CSV file is made from; a few programs that measure write
theirs. Comments on a result are written into the template.
"""  # noqa: E501

import argparse
import csv
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from tables import tables

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = Path(__file__).parent / "pages"
Row = dict[str, Any]


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as CSV, with the columns of all of them, and floats rounded."""
    columns = dict.fromkeys(name for row in rows for name in row)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(rounded, rows))


def rounded(row: Row) -> Row:
    """Return a row whose floats have six significant digits."""
    return {
        key: float(f"{value:.6g}") if isinstance(value, float) else value
        for key, value in row.items()
    }


def read_csv(path: Path) -> list[Row]:
    """Return the rows of a CSV file; [] if there is none. Empty cells are None."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{key: _value(text) for key, text in row.items()} for row in csv.DictReader(file)]


def _value(text: str) -> Any:
    if text in ("", "True", "False"):
        return {"": None, "True": True, "False": False}[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def training(folder: str) -> list[Row]:
    """Return the acceptance of a trained head on held-out text, for each time that it was measured
    and kind of text.
    """
    curve = json.loads((ROOT / folder / "training.json").read_text())["held_out"]
    return [
        {"minutes": point["minutes"], "tokens": point["tokens"], "text": text, "acceptance": share}
        for point in curve
        for text, share in point["acceptance"].items()
    ]


def table(rows: Iterable[Row], *columns: str) -> str:
    """Return a table in Markdown. A column is `label=key:format`; the label alone where it is also
    the key.

    A column that no row has is left out.
    """
    rows = list(rows)
    specs = [spec for column in columns if any((spec := _column(column))[1] in row for row in rows)]
    lines = [[label for label, _, _ in specs], ["---"] * len(specs)]
    lines += [[_text(row.get(key), form) for _, key, form in specs] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def pivot(rows: Iterable[Row], index: Sequence[str], column: str, value: str) -> str:
    """Return a table with a line for each combination of `index` and a column for each value of
    `column`.

    `value` is a format of the row's keys: `{speedup:.2f}x, {policy}`.
    """
    lines: dict[tuple, Row] = {}
    seen: dict[Any, str] = {}
    for row in rows:
        line = lines.setdefault(tuple(row[key] for key in index), {key: row[key] for key in index})
        line[seen.setdefault(row[column], _text(row[column], ","))] = value.format(**row)
    columns = sorted(seen) if all(isinstance(one, int | float) for one in seen) else seen
    return table(lines.values(), *index, *(seen[one] for one in columns))


def _column(spec: str) -> tuple[str, str, str]:
    label, _, rest = spec.rpartition("=")
    key, _, form = rest.partition(":")
    return label or key, key, form


def _text(value: Any, form: str) -> str:
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "NO"}[value]
    if isinstance(value, str):
        return value
    if value != value or not form:
        return str(value)
    return format(value, form)


def span(values: Iterable[float | None], form: str = ".2f", unit: str = "x") -> str:
    """Return the least and the greatest value, as text."""
    known = [value for value in values if value is not None]
    low, high = (f"{value:{form}}{unit}" for value in (min(known), max(known)))
    return low if low == high else f"{low} to {high}"


def ahead(ratios: Iterable[float | None], form: str = ".2f") -> str:
    """Return how many ratios are at least 1, their range and their median."""
    known = [ratio for ratio in ratios if ratio is not None]
    return (
        f"{sum(r >= 1 for r in known)} of {len(known)} cells ({span(known, form)}, median"
        f" {median(known):{form}}x)"
    )


def measured_by(*tables: Iterable[Row]) -> str:
    """Return where rows were measured: the commits of each machine."""
    commits: dict[str, dict[str, None]] = {}
    for row in (row for rows in tables for row in rows):
        commit, _, machine = row["measured_by"].removeprefix("commit ").partition(", ")
        commits.setdefault(machine, {})[commit] = None
    return "; ".join(
        f"commit{'s' * (len(of) > 1)} {' '.join(of)}, {machine}" for machine, of in commits.items()
    )


def measured(rows: Sequence[Row], sweep: str, program: str) -> str:
    """Return a sentence on what has measured rows: a sweep, or a program that a sweep has
    replaced.
    """
    command = f"`python launch.py -m +sweeps={sweep}`"
    if "run" in rows[0]:
        return f"Measured by {command}, {measured_by(rows)}."
    return f"Measured by `benchmarks/{program}` of {measured_by(rows)}, which {command} replaces."


def chart(
    file: Path, draw: bool, rows: Iterable[Row], x: str, y: str, alt: str, **options: Any
) -> str:
    """Draw a chart next to the page and return the line of Markdown that shows it."""
    if draw:
        from charts import draw_chart

        draw_chart(file, list(rows), x, y, **options)  # filters of Jinja return generators
    return f"![{alt}]({file.name})"


def render(name: str, draw: bool = True) -> str:
    """Return a page's text, and draw its charts."""
    folder = page_of(name).parent
    environment = Environment(
        loader=FileSystemLoader(PAGES), undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"mean": fmean, "combine": dict, "label": labelled}
    environment.filters |= {filter.__name__: filter for filter in (median, groups, spread)}
    helpers: tuple[Callable, ...] = (table, pivot, span, ahead, measured_by, measured, training)

    def read(stem: str) -> list[Row]:
        return read_csv(folder / f"{stem}.csv")

    def drawn(picture: str, *args: Any, **options: Any) -> str:
        return chart(folder / f"{picture}.png", draw, *args, **options)

    text = environment.get_template(f"{name}.md").render(
        {one.__name__: one for one in helpers}, read=read, chart=drawn
    )
    return "\n\n".join(filled(block) for block in re.split(r"\n\s*\n", text.strip())) + "\n"


def filled(block: str) -> str:
    """Return a paragraph or a list with lines of at most 120 characters; anything else as it is."""
    if block[0] in "|#!":
        return block
    items = re.split(r"\n(?=- )", block) if block.startswith("- ") else [block]
    items = [" ".join(item.split()) for item in items]
    fill = partial(textwrap.fill, width=120, break_long_words=False, break_on_hyphens=False)
    return "\n".join(fill(item, subsequent_indent="  " * item.startswith("- ")) for item in items)


def groups(rows: Iterable[Row], *keys: str) -> list[tuple[Any, list[Row]]]:
    """Return the rows that share these keys, in their order."""

    def key(row: Row) -> tuple:
        return tuple(row[name] for name in keys)

    return [
        (found[0] if len(keys) == 1 else found, list(members))
        for found, members in groupby(rows, key)
    ]


def labelled(rows: Iterable[Row], key: str, form: str) -> list[Row]:
    """Return the rows with one more key, formatted from the others."""
    return [row | {key: form.format(**row)} for row in rows]


def spread(rows: Iterable[Row], key: str, *index: str) -> list[Row]:
    """Return a row for each combination of `index`, with the values of its rows as `{their
    key}_{name}`.
    """
    lines: dict[tuple, Row] = {}
    for row in rows:
        line = lines.setdefault(
            tuple(row[name] for name in index), {name: row[name] for name in index}
        )
        line |= {f"{row[key]}_{name}": value for name, value in row.items()}
    return list(lines.values())


def names() -> list[str]:
    """Return the names of all pages: `predictions/NAME` for predictions."""
    return sorted(str(path.relative_to(PAGES).with_suffix("")) for path in PAGES.rglob("*.md"))


def page_of(name: str) -> Path:
    """Return where a page lies."""
    return DOCS / (f"{name}.md" if "/" in name else f"results/{name}.md")


def write(name: str) -> None:
    """Write a page and its charts."""
    page_of(name).write_text(render(name))


def main() -> None:
    """Write pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names())}")
    parser.add_argument(
        "--runs", type=Path, metavar="FOLDER", help="a run store: make the CSV files from it first"
    )
    arguments = parser.parse_args()
    for name in arguments.names or names():
        for table_name, rows in tables(name, arguments.runs) if arguments.runs else ():
            write_csv(page_of(name).parent / f"{table_name}.csv", rows)
        write(name)
        print(f"wrote {page_of(name).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
