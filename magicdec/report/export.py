"""Write the table for other programs: CSV and Parquet, with every column of every row."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from magicdec.errors import UserError
from magicdec.report.rows import keys_of
from magicdec.tracking.columns import Row


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write CSV: a cell is empty if a run has no such key; true and false are written as in
    JSON.
    """
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, keys_of(rows), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {
                key: str(value).lower() if isinstance(value, bool) else value
                for key, value in row.items()
            }
        )
    write(path, text.getvalue())


def write_parquet(path: Path, rows: Sequence[Row]) -> None:
    """Write Parquet with typed columns. A column of numbers and words becomes words."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(
            "--parquet needs pyarrow: pip install 'magicdec[report]', or use --csv"
        ) from None
    columns = {}
    for key in keys_of(rows):
        values = [row.get(key) for row in rows]
        try:
            columns[key] = pyarrow.array(values)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError):
            columns[key] = pyarrow.array(
                [None if value is None else str(value) for value in values]
            )
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), buffer)
    write(path, buffer.getvalue())


def write(path: Path, content: str | bytes) -> None:
    """Write a file. Raise UserError if that is impossible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            content.encode(errors="backslashreplace") if isinstance(content, str) else content
        )
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error
