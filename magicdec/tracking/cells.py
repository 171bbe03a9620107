"""Cells and tables of everything that is printed or written about runs."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table

from magicdec.units import is_number


def three_digits(value: Any) -> str:
    """Return a measured number with at least three significant digits, or "" for anything else."""
    if not is_number(value):
        return ""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:#.3g}".rstrip(".")


def cell(value: Any) -> str:
    """Return a setting or metric as text: a float with at least four significant digits, "" for
    None.
    """
    if value is None or isinstance(value, bool):
        return "" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def new_table(*columns: str, title: str | None = None, num_words: int = 1) -> Table:
    """Return an empty table for the terminal. Align its first `num_words` columns to the left, the
    others to the right.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=title is not None, title=title)
    table.title_justify, table.title_style = "left", "bold"
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < num_words else "right")
    return table


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table in Markdown, for a page of results."""
    lines = [list(header), ["---"] * len(header)]
    lines += [[cell(value).replace("\n", " ").replace("|", "\\|") for value in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
