"""The JSON in a checkpoint, which anyone may have written: read from regular files only, within bounds. Torch-free."""

import json
from collections.abc import Mapping
from os import SEEK_END
from pathlib import Path
from typing import Any, BinaryIO

from magicdec.errors import UserError
from magicdec.rules import TEXT, Rule, Values, check_json, list_of, whole

MAX_BYTES = 100_000_000  # of a JSON file; of a safetensors file's header it is the format's own limit
LENGTHS = list_of(whole(0, 1 << 62))
# One tensor in the header of a safetensors file.
TENSOR = Rule(
    lambda entry: (
        isinstance(entry, dict)
        and TEXT.holds(entry.get("dtype"))
        and LENGTHS.holds(entry.get("shape"))
        and LENGTHS.holds(entry.get("data_offsets"))
        and len(entry["data_offsets"]) == 2
    ),
    "must be an object with a dtype, a shape and data_offsets",
)


def open_file(path: Path) -> BinaryIO:
    """Open a file to read; raise UserError unless it is a regular one (reading a pipe or a device may never end).

    A link is followed: the hub's cache consists of them.
    """
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is no regular file")
        return path.open("rb")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); is {path.parent} a complete checkpoint?") from None


def read_json(path: Path, schema: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Return the JSON object in a file; raise UserError where it holds something else, or breaks the schema."""
    with open_file(path) as file:
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise UserError(f"{path} is larger than any such file, {MAX_BYTES:,} bytes")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error})") from None
    check_json(content, schema, str(path))
    return content


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Return each tensor's dtype, shape and data_offsets in a safetensors file, whose size must be what they imply.

    Format: 8 bytes with the header's length, the header as JSON, then the data without gaps.
    """
    with open_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= MAX_BYTES else b""
        size = file.seek(0, SEEK_END)
    try:
        if len(text) < length:
            raise ValueError
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"{path} is truncated, corrupt or a Git LFS pointer; download it again") from None
    if isinstance(header, dict):
        header.pop("__metadata__", None)
    check_json(header, Values(TENSOR), str(path))
    expected = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != expected:
        raise UserError(f"{path} is truncated or corrupt: {size} bytes, not {expected}; download it again")
    return header
