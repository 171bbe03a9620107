"""Write files that are whole whenever they are there: no reader, kill or full disk leaves half of
one.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from magicdec.errors import StorageError


@contextmanager
def explained(runs_dir: str | Path) -> Iterator[None]:
    """Turn an OSError into a StorageError."""
    try:
        yield
    except OSError as error:
        what = (
            f"cannot write{f' {error.filename}' if error.filename else ''}:"
            f" {error.strerror or error}"
        )
        raise StorageError(
            f"runs_dir={runs_dir}: {what}; choose a folder with runs_dir=FOLDER"
        ) from error


def write_atomically(contents: Mapping[Path, Iterable[str]]) -> None:
    """Write all files under temporary names before the first is moved into place: a failure comes
    before any change.
    """
    staged: dict[Path, Path] = {}
    try:
        for path, pieces in contents.items():
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            staged[temporary] = path
            with temporary.open("w", encoding="utf-8", newline="\n") as file:
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
        for temporary, path in staged.items():
            os.replace(temporary, path)
    finally:
        for temporary in staged:
            temporary.unlink(missing_ok=True)


def json_text(content: Mapping) -> str:
    """Return a JSON file that people read."""
    return json.dumps(plain(content), indent=2, ensure_ascii=False) + "\n"


def json_line(row: Mapping) -> str:
    """Return a line of a .jsonl file."""
    return json.dumps(plain(row), separators=(",", ":"), ensure_ascii=False) + "\n"


def plain(value: Any, whole_numbers: bool = False) -> Any:
    """Return a value that JSON and YAML can hold: NaN and infinity become null; with
    `whole_numbers`, 1.0 becomes 1.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item, whole_numbers) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, whole_numbers) for item in value]
    if hasattr(value, "item"):  # a number of NumPy's or PyTorch's
        return plain(value.item(), whole_numbers)
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if whole_numbers and value.is_integer() else float(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)
