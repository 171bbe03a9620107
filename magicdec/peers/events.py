"""The server-sent events of an answer: their data, the mark of their end, and the words of an error
in any form.

OpenAI's client sends the request, but reads no further than its own form of an error, and does not
tell whether the stream has ended with `[DONE]`.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

from magicdec.errors import in_brief
from magicdec.inputs.others import from_json
from magicdec.peers.answer import EndpointFailed

DONE = "[DONE]"
BEGINNING = 2000  # bytes of a body that is not a stream, which are quoted
WORDS = ("message", "msg", "detail", "error")  # keys under which servers put what went wrong


async def data_of(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Yield the data of each event, `[DONE]` at last if it was sent.

    Raise EndpointFailed with the server's own words for an error, and for a body that is not a
    stream of events.
    """
    beginning, number = b"", 0
    fields: dict[str, str] = {}
    async for line in _lines(chunks):
        if len(beginning) < BEGINNING:
            beginning += line + b"\n"
        if line:
            name, _, value = line.decode(errors="replace").partition(":")
            value = value.removeprefix(" ")
            fields[name] = f"{fields[name]}\n{value}" if name in fields else value
            continue
        if (data := _data(fields)) is not None:
            number += 1
            yield data
        fields = {}
    if not number:
        said = _words_in(beginning[:BEGINNING].decode(errors="replace")) or "it is empty"
        raise EndpointFailed(f"its answer is not a stream of events: {said}")


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the lines of a body, and an empty one behind the last."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")
    yield rest.removesuffix(b"\r")
    yield b""


def _data(fields: dict[str, str]) -> str | None:
    """Return the data of an event; None if it has none. Raise EndpointFailed for an error."""
    data = fields.get("data")
    if fields.get("event") == "error" or "error" in fields:
        raise EndpointFailed(_words_in(data if data is not None else fields["error"]))
    if data is None or data.startswith(DONE):
        return data
    plain = _plain(data)
    if isinstance(plain, dict) and is_error(plain):
        raise EndpointFailed(words_of(plain))
    return data


def is_error(plain: dict[str, Any]) -> bool:
    """Return whether an event says that something went wrong, rather than what the answer is."""
    if plain.get("error") or plain.get("object") == "error":
        return True
    return not plain.keys() & {"choices", "usage", "timings"} and any(
        plain.get(key) for key in WORDS
    )


def words_of(plain: Any) -> str:
    """Return the words of an error: a text, or an object or a list that holds it under one of the
    usual keys.
    """
    if isinstance(plain, str):
        return in_brief(plain)
    if isinstance(plain, list) and plain:
        return words_of(plain[0])
    if isinstance(plain, dict):
        for key in WORDS:
            if plain.get(key):
                return words_of(plain[key])
    return in_brief(json.dumps(plain))


def _words_in(text: str) -> str:
    """Return the words of an error that is JSON or a text."""
    plain = _plain(text)
    return in_brief(text) if plain is None else words_of(plain)


def _plain(text: str) -> Any:
    """Return JSON as plain data; None for a text that is not JSON."""
    try:
        return from_json(text)
    except ValueError:
        return None
