"""The JSON in a checkpoint, which anyone may have written: read from regular files only, within
bounds. Torch-free.
"""

from os import SEEK_END
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

from pydantic import Field
from typing_extensions import TypedDict

from magicdec.errors import UserError
from magicdec.inputs.rules import must, parse_json, parse_values

# Of a JSON file; of a safetensors file's header it is the format's own limit.
MAX_BYTES = 100_000_000
Bytes = Annotated[int, Field(ge=0, le=1 << 62)]


class Tensor(TypedDict):
    """One tensor in the header of a safetensors file."""

    dtype: str
    shape: list[Bytes]
    data_offsets: Annotated[list[Bytes], Field(min_length=2, max_length=2)]


T = TypeVar("T")
TENSOR: Any = Annotated[Tensor, must("must be an object with a dtype, a shape and data_offsets")]


def open_file(path: Path) -> BinaryIO:
    """Open a file to read; raise UserError unless it is a regular one (reading a pipe or a device
    may never end).

    A link is followed: the hub's cache consists of them.
    """
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is not a regular file")
        return path.open("rb")
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); is {path.parent} a complete checkpoint?"
        ) from None


def read_json(path: Path, kind: type[T]) -> T:
    """Return the JSON object in a file as a typed one. Raise UserError for the first value that
    breaks a rule.
    """
    with open_file(path) as file:
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise UserError(f"{path} is larger than any such file, {MAX_BYTES:,} bytes")
    return parse_json(kind, text, where=str(path))


def read_header(path: Path) -> dict[str, Tensor]:
    """Return each tensor's dtype, shape and data_offsets in a safetensors file, whose size must be
    what they imply.

    Format: 8 bytes with the header's length, the header as JSON, then the data without gaps.
    """
    with open_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= MAX_BYTES else b""
        size = file.seek(0, SEEK_END)
    try:
        if len(text) < length:
            raise ValueError
        plain = parse_json(dict[str, Any], text)
    except ValueError:
        raise UserError(
            f"{path} is truncated, corrupt or a Git LFS pointer; download it again"
        ) from None
    plain.pop("__metadata__", None)
    header = parse_values(TENSOR, plain, str(path))
    expected = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != expected:
        raise UserError(
            f"{path} is truncated or corrupt: {size} bytes, not {expected}; download it again"
        )
    return header
