"""Write the table for other programs: CSV and Parquet, with every column of every row."""

import io
from collections.abc import Sequence
from pathlib import Path

from magicdec.errors import UserError
from magicdec.tracking.report.query import table
from magicdec.tracking.report.rows import Row


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write CSV: a cell is empty if a run has no such key; true and false are written as in JSON."""
    frame = table(rows).astype("object").map(lambda value: str(value).lower() if isinstance(value, bool) else value)
    write(path, frame.to_csv(index=False, lineterminator="\n"))


def write_parquet(path: Path, rows: Sequence[Row]) -> None:
    """Write Parquet with typed columns. A column of numbers and words becomes words."""
    frame, buffer = table(rows), io.BytesIO()
    mixed = {key: "string" for key in frame if frame[key].dtype == "object"}
    try:
        frame.astype(mixed).to_parquet(buffer, engine="pyarrow", index=False)
    except ImportError:
        raise UserError("--parquet needs pyarrow: pip install 'magicdec[report]', or use --csv") from None
    write(path, buffer.getvalue())


def write(path: Path, content: str | bytes) -> None:
    """Write a file. Raise UserError if that is impossible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error
