"""Files and JSON that anyone may have written, and paths that anyone may have typed."""

import errno
import json
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any


def check_regular(path: Path) -> None:
    """Raise OSError for a pipe or a device: reading it may never end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_regular(path: Path) -> bytes:
    """Return the content of a file. Raise OSError for what is none."""
    check_regular(path)
    return path.read_bytes()


def from_json(text: str | bytes) -> Any:
    """Return JSON as plain data. Raise ValueError for a text that is none, or that is nested more
    deeply than Python can read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def given_path(text: str) -> Path:
    """Return an argument of a command as a path: an empty one would be the working directory."""
    if not text:
        raise ArgumentTypeError("is empty; name a file or a folder")
    return Path(text)
