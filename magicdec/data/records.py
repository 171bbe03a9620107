"""The rows of a file with JSON lines, a JSON array or CSV, and their fields."""

import codecs
import csv
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from magicdec.errors import UserError, in_one_line
from magicdec.inputs.rules import did_you_mean

Place = tuple[int, str, Any]  # of a row: its number, its place for messages, its content
GZIP, UTF16 = b"\x1f\x8b", (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # how such files begin
# In an array.
BEFORE_THE_FIRST, BEFORE_A_ROW = re.compile(r"\s*\[\s*"), re.compile(r"\s*,\s*")
AT_THE_END = re.compile(r"\s*\]\s*")
# Characters of a row that is looked at again after each of its lines. A longer one is looked at
# whenever it has doubled, because each look begins at its start.
SHORT_ROW = 1 << 12


class Unfit(UserError):
    """A row that is well-formed, but no prompt of this run."""


class CsvCell(str):
    """A cell of a CSV file, which does not tell numbers from texts. `number_in` reads it as a
    number.
    """


class Lines:
    """The lines of a file, and the number of the line that was read last."""

    def __init__(self, file: TextIO):
        self.file, self.number = file, 0

    def __iter__(self) -> Iterator[str]:
        for line in self.file:
            self.number += 1
            yield line


def records(path: str, corpus: str) -> Iterator[Place]:
    """Yield the rows of a file: the number of each, its place for messages, and its content.

    The file holds JSON lines, one JSON array of objects, or CSV with a header (.csv), in UTF-8, or
    in UTF-16 with its mark; one in UTF-8 may be compressed (gzip). Blank lines are no rows. Raise
    UserError for what cannot be read; `corpus` is the file's name in errors.
    """
    file = Path(os.path.expanduser(path))
    if not os.path.isfile(file):  # pathlib raises for a path that is too long
        state = "is a folder, not a file" if os.path.isdir(file) else "no such file"
        raise UserError(f"{corpus}: {state}")
    try:
        with _opened(file) as text:
            lines = Lines(text)
            try:
                is_csv = file.name.lower().removesuffix(".gz").endswith(".csv")
                yield from _cells(lines, corpus) if is_csv else _json(lines, corpus)
            except UnicodeDecodeError as error:
                what = f"is not UTF-8 text ({error.reason}); iconv converts it"
                raise UserError(f"{corpus}, after line {lines.number}, {what}") from None
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                what = f"cannot be read ({in_one_line(error)})"
                raise UserError(f"{corpus}, after line {lines.number}, {what}") from None
    except OSError as error:
        raise UserError(f"{corpus}: cannot read {file} ({error.strerror})") from None


def field(content: Any, path: str, key: str, where: str) -> Any:
    """Return what is at a dotted path of a row, as in `turns.0`; None if it is null or a list is
    too short for it.

    Raise Unfit for a name that the row does not have; `key` is the configuration's for the path.
    """
    for step in path.split("."):
        if isinstance(content, list) and step.isdecimal():
            content = content[int(step)] if int(step) < len(content) else None
        elif isinstance(content, dict) and step in content:
            content = content[step]
        elif content is not None:
            names = list(content) if isinstance(content, dict) else []
            hint = did_you_mean(step, names) or (
                f"; the fields are {', '.join(names[:20])}" if names else ""
            )
            raise Unfit(f"{where}: {key}={path}: there is no field {step}{hint}")
    return content


def number_in(value: Any) -> Any:
    """Return the number that a cell of CSV holds. Return a text, and any value of JSON, as it
    is.
    """
    if isinstance(value, CsvCell):
        for kind in (int, float):
            with suppress(ValueError):
                return kind(value)
    return value


def check_text(content: Any, where: str) -> None:
    """Raise Unfit for a row with half of a surrogate pair, which JSON can hold and which is no
    text.
    """
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Unfit(f"{where} cannot be read ({in_one_line(error)})") from None


def _opened(file: Path) -> TextIO:
    with file.open("rb") as content:
        start = content.read(2)
    if start == GZIP:
        return gzip.open(file, "rt", encoding="utf-8-sig", newline="")
    return file.open(encoding="utf-16" if start in UTF16 else "utf-8-sig", newline="")


def _cells(lines: Lines, corpus: str) -> Iterator[Place]:
    number = 1
    with _long_cells():
        try:
            for row in csv.DictReader(lines, strict=True):
                number = lines.number
                where = f"{corpus}, line {lines.number}"
                if None in row or None in row.values():  # restkey, restval
                    raise UserError(f"{where} does not have as many fields as the header")
                yield number, where, {name: CsvCell(text) for name, text in row.items()}
        except csv.Error as error:
            raise UserError(
                f"{corpus}, after line {number}, cannot be read ({in_one_line(error)})"
            ) from None


@contextmanager
def _long_cells() -> Iterator[None]:
    """Let csv read cells of any length: a prompt is often longer than its limit, which holds for
    the whole process.
    """
    limit = csv.field_size_limit(2**31 - 1)  # of a C long, which has 32 bits on Windows
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _json(lines: Lines, corpus: str) -> Iterator[Place]:
    rest = iter(lines)
    first = next((line for line in rest if line.strip()), "")
    begins_an_array = re.match(r"\s*\[\s*(\{|$)", first)
    yield from (_array if begins_an_array else _json_lines)(chain([first], rest), lines, corpus)


def _json_lines(texts: Iterable[str], lines: Lines, corpus: str) -> Iterator[Place]:
    for text in texts:
        if text.strip():
            where = f"{corpus}, line {lines.number}"
            yield lines.number, where, _parsed(text, where)


def _array(texts: Iterable[str], lines: Lines, corpus: str) -> Iterator[Place]:
    """Yield the rows of an array as they are read: a file of gigabytes is not in memory at once."""
    buffer = ""
    at, number = 0, 1
    unread: list[str] = []
    awaited = 0  # characters to read before the row is looked at again
    for text in chain(texts, [""]):  # which ends the file, and is no line
        unread.append(text)
        awaited -= len(text)
        if text and awaited > 0:
            continue
        buffer = buffer[at:] + "".join(unread)
        unread = []
        at = 0
        while before := (BEFORE_A_ROW if number > 1 else BEFORE_THE_FIRST).match(buffer, at):
            where = f"{corpus}, row {number}"
            try:
                content, at = json.JSONDecoder().raw_decode(buffer, before.end())
            except json.JSONDecodeError as error:
                if buffer[error.pos :].strip():  # otherwise the row continues in the next line
                    raise UserError(
                        f"{where} is not JSON: {error.msg} before line {lines.number + 1}"
                    ) from None
                break
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where} cannot be read ({in_one_line(error)})") from None
            yield number, where, content
            number += 1
        length = len(buffer) - at  # of a row that has begun
        awaited = length if length > SHORT_ROW else 0
    if not AT_THE_END.fullmatch(buffer, at):
        raise UserError(f"{corpus} is not a JSON array: it does not end behind row {number - 1}")


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} cannot be read ({in_one_line(error)})") from None
