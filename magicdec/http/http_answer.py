"""The answer to a request over HTTP, as events or as a whole, and errors in OpenAI's shape."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from magicdec.http.completion import Chat, SharedFields
from magicdec.http.meters import Amounts, Meters
from magicdec.http.stoppable_text import StoppableText
from magicdec.measure.metrics import Rounds
from magicdec.serving.engine import Stream


class HttpAnswer:
    """Answer to one request, streamed as events or sent as a whole."""

    def __init__(
        self,
        asked: SharedFields,
        stream: Stream,
        head: dict[str, Any],
        text: StoppableText,
        meters: Meters,
    ):
        self._asked, self._stream = asked, stream
        self._head, self._text = head, text
        self._meters = meters
        self._rounds = Rounds()

    async def events(self) -> AsyncIterator[str]:
        """Yield an event per chunk of text, then the finish reason and any usage. Stop if the
        client leaves.
        """
        options, first = self._asked.stream_options, True
        head = self._head | (
            {"object": f"{self._head['object']}.chunk"} if isinstance(self._asked, Chat) else {}
        )
        try:
            async for text, tokens in self._pieces():
                usage = {"usage": self._amounts.usage} if options.continuous_usage_stats else {}
                choice = self._asked.delta(text, None, first) | self._ids(tokens)
                yield _event(head | {"choices": [choice]} | usage)
                first = False
            choice = self._asked.delta(self._text.rest(), self._end, first) | self._ids([])
            yield _event(head | {"choices": [choice]})
            if options.include_usage:
                yield _event(head | {"choices": [], "usage": self._amounts.usage})
            yield "data: [DONE]\n\n"
        except HTTPException as error:  # the status has been sent
            yield _event(error_body(error.status_code, error.detail))
        finally:
            self._close()

    async def whole(self, request: Request) -> JSONResponse:
        """Return the whole answer. Wait for the client's next message meanwhile, and cancel if it
        disconnects.
        """

        async def left() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self._stream.cancel()

        watch = asyncio.create_task(left())
        try:
            text = "".join([piece async for piece, _ in self._pieces()]) + self._text.rest()
            choice = self._asked.choice(text, self._end) | self._ids(self._text.tokens)
            return JSONResponse(self._head | {"choices": [choice], "usage": self._amounts.usage})
        finally:
            watch.cancel()
            self._close()

    def _ids(self, tokens: list[int]) -> dict[str, Any]:
        return {"token_ids": tokens} if self._asked.return_token_ids else {}

    async def _pieces(self) -> AsyncIterator[tuple[str, list[int]]]:
        """Yield the text of each round, up to a stop string, and its tokens. Raise HTTPException if
        the request fails or the engine closes before its end.
        """
        try:
            rounds = iter(self._stream.request.chunk_rounds)  # which grows with the chunks
            async for tokens in self._stream:
                before = len(self._text.tokens)
                text = self._text.add(tokens)
                self._rounds.update(next(rounds))
                yield text, self._text.tokens[before:]
                if self._text.stopped:
                    return
        except RuntimeError as error:
            raise HTTPException(500, str(error)) from error
        if self._stream.request.end == "cancelled":
            raise HTTPException(503, "the engine is closed")

    @property
    def _amounts(self) -> Amounts:
        return Amounts(len(self._stream.request.prompt), len(self._text.tokens), self._rounds)

    @property
    def _end(self) -> str | None:
        return "stop" if self._text.stopped else self._stream.request.end

    def _close(self) -> None:
        self._meters.count(self._stream.stats, self._amounts, self._end)
        self._stream.cancel()


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return an error in OpenAI's shape."""
    kind = {429: "rate_limit_error"}.get(status, "invalid_request_error")
    if status >= 500:
        kind = "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
