"""The rows of a file with JSON lines or CSV, and their fields."""

import csv
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from magicdec.errors import UserError, in_one_line
from magicdec.rules import did_you_mean


def records(path: str, corpus: str) -> Iterator[tuple[int, str, Any]]:
    """Yield the rows of a file (CSV with a header: .csv): the line of each, its place for messages, and its content.

    Blank lines are no rows. Raise UserError for what cannot be read; `corpus` is the file's name in errors.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"{corpus}: no such file")
    number = 1
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            if file.suffix.lower() != ".csv":
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield number, f"{corpus}, line {number}", _parsed(line, f"{corpus}, line {number}")
                return
            reader = csv.DictReader(lines, strict=True)
            for row in reader:
                number = reader.line_num
                if None in row or None in row.values():  # restkey, restval
                    raise UserError(f"{corpus}, line {number} does not have as many fields as the header")
                yield number, f"{corpus}, line {number}", {name: _number(text) for name, text in row.items()}
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{corpus}, after line {number}, cannot be read ({in_one_line(error)})") from None
    except OSError as error:
        raise UserError(f"{corpus}: cannot read {file} ({error.strerror})") from None


def field(content: Any, path: str, key: str, where: str) -> Any:
    """Return what is at a dotted path of a row, as in `turns.0`; None if it is null or a list is too short for it.

    Raise UserError for a name that the row does not have; `key` is the configuration's for the path.
    """
    for step in path.split("."):
        if isinstance(content, list) and step.isdecimal():
            content = content[int(step)] if int(step) < len(content) else None
        elif isinstance(content, dict) and step in content:
            content = content[step]
        elif content is not None:
            names = list(content) if isinstance(content, dict) else []
            hint = did_you_mean(step, names) or (f"; the fields are {', '.join(names[:20])}" if names else "")
            raise UserError(f"{where}: {key}={path}: there is no field {step}{hint}")
    return content


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _parsed(line: str, where: str) -> Any:
    try:
        content = json.loads(line)
        json.dumps(content, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} cannot be read ({in_one_line(error)})") from None
    return content
