"""Read a result file of any load generator that is known here."""

from pathlib import Path
from typing import Any

from magicdec.errors import UserError
from magicdec.inputs.others import from_json, read_regular
from magicdec.peers.results import aiperf, guidellm, vllm_bench
from magicdec.peers.results.base import LoadResult

FORMATS = (vllm_bench.FORMAT, aiperf.FORMAT, guidellm.FORMAT)


def read_results(path: Path) -> tuple[str, list[LoadResult]]:
    """Return the tool that wrote a file, and its levels of load. Raise UserError for a file of none
    of them.
    """
    tool = ""
    results: list[LoadResult] = []
    for content in _objects(path):
        kind = next((candidate for candidate in FORMATS if candidate.keys <= content.keys()), None)
        if kind is None:
            raise _unknown(path)
        tool = kind.tool
        results += kind.levels(content, str(path))
    return tool, results


def _objects(path: Path) -> list[dict[str, Any]]:
    """Return the JSON object of a file, or those of its lines; at least one."""
    try:
        text = read_regular(path).decode("utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise _unknown(path) from None
    for parts in ([text], text.splitlines()):
        try:
            contents = [from_json(part) for part in parts if part.strip()]
        except ValueError:
            continue
        if contents and all(isinstance(content, dict) for content in contents):
            return contents
    raise _unknown(path)


def _unknown(path: Path) -> UserError:
    names = ", ".join(kind.files for kind in FORMATS)
    return UserError(f"{path}: not a result file that is read here: {names}")
