"""The table for other programs: CSV and Parquet, every column of every row."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from magicdec.errors import UserError
from magicdec.tracking.report.rows import Row, keys_of


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Empty where a run has no such key; true and false as in JSON."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, keys_of(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    write(path, text.getvalue())


def write_parquet(path: Path, rows: Sequence[Row]) -> None:
    """Typed columns; one that holds numbers and words becomes words."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError("--parquet needs pyarrow: pip install 'magicdec[report]', or use --csv") from None
    columns = {}
    for key in keys_of(rows):
        values = [row.get(key) for row in rows]
        try:
            columns[key] = pyarrow.array(values)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
            columns[key] = pyarrow.array([None if value is None else str(value) for value in values])
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), buffer)
    write(path, buffer.getvalue())


def write(path: Path, content: str | bytes) -> None:
    """Write a file; raises UserError where that is impossible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


def _cell(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value
