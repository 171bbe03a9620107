"""The routes of the HTTP server: OpenAI's completions and models, `/health`, and `/metrics` for Prometheus."""

import asyncio
import json
import reprlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from magicdec.data.tokenizer import Detokenizer
from magicdec.errors import UserError
from magicdec.http.completion import Completion, StreamOptions
from magicdec.http.meters import Meters
from magicdec.serving.engine import AsyncEngine, Stream

BODY_BYTES, BYTES_PER_TOKEN = 16 << 10, 32  # largest body: text takes about 5 bytes a token, escaped or as ids about 12
BODY_S = 30.0  # within which a request has to arrive
RETRY_AFTER = {"Retry-After": "1"}  # seconds


class Admission:
    """A bound on requests: one for each slot and `max_waiting` more, including those that are still being read."""

    def __init__(self, engine: AsyncEngine, max_waiting: int):
        self._engine, self._room, self._arriving = engine, engine.scheduler.slots.num_slots + max_waiting, 0

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Hold a place for a request until the engine has it. Raise HTTPException if there is none."""
        if not self._engine.is_open:
            raise HTTPException(503, "the engine is closed")
        if self._arriving + self._engine.num_running + self._engine.num_waiting >= self._room:
            raise HTTPException(429, "too many requests are waiting; try again later", RETRY_AFTER)
        self._arriving += 1
        try:
            yield
        finally:
            self._arriving -= 1


def create_app(engine: AsyncEngine, tokenizer: Any, model: str, max_waiting: int = 256) -> FastAPI:
    """Return the app with its routes; the engine runs as long as the app."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with engine:
            yield

    meters, admission, numbers = Meters(engine), Admission(engine, max_waiting), count()
    app = FastAPI(title="magicdec", lifespan=lifespan, redirect_slashes=False)
    app.add_exception_handler(HTTPException, lambda _, error: _error(error.status_code, error.detail, error.headers))
    app.add_exception_handler(UserError, lambda _, error: _error(400, str(error)))
    app.add_exception_handler(ClientDisconnect, lambda *_: Response(status_code=400))  # sent to nobody
    app.add_exception_handler(Exception, lambda *_: _error(500, "the server has failed to answer this request"))

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if engine.is_open else 503)

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(meters.text())

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        described = {"id": model, "object": "model", "owned_by": "magicdec", "max_model_len": engine.max_len}
        return {"object": "list", "data": [described]}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        with admission.arriving():
            asked = Completion.parse(await _body(request, engine.max_len))
            if asked.model != model:
                raise HTTPException(404, f"model={reprlib.repr(asked.model)} is not served here; {model} is")
            params = asked.params()
            prompt = await asyncio.to_thread(asked.token_ids, tokenizer)
        stream = engine.generate(prompt, params)
        head = {"id": f"cmpl-{next(numbers)}", "object": "text_completion", "created": int(time.time()), "model": model}
        if asked.stream:
            events = _events(stream, head, Detokenizer(tokenizer), asked.stream_options, meters)
            return StreamingResponse(events, media_type="text/event-stream")
        return await _whole(stream, head, Detokenizer(tokenizer), request, meters)

    return app


async def _body(request: Request, max_len: int) -> bytes:
    """Read a request. Raise HTTPException for one that is not JSON, too large or too slow."""
    kind = request.headers.get("content-type", "none").partition(";")[0].strip()
    if kind.lower() != "application/json":
        raise HTTPException(415, f"content-type={kind[:40]}: must be application/json")
    body, most = bytearray(), BODY_BYTES + BYTES_PER_TOKEN * max_len
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise HTTPException(413, f"the request is over {most:,} bytes; it may be {max_len:,} tokens long")
    except TimeoutError:
        raise HTTPException(408, f"the request did not arrive within {BODY_S:g} s") from None
    return bytes(body)


async def _chunks(stream: Stream) -> AsyncIterator[list[int]]:
    """Yield the tokens of each round. Raise HTTPException if the request fails or the engine closes before its end."""
    try:
        async for tokens in stream:
            yield tokens
    except RuntimeError as error:
        raise HTTPException(500, str(error)) from error
    if stream.request.end == "cancelled":
        raise HTTPException(503, "the engine is closed")


async def _events(
    stream: Stream, head: dict[str, Any], text: Detokenizer, options: StreamOptions, meters: Meters
) -> AsyncIterator[str]:
    """Yield the text of each chunk, the reason of the end and, if asked for, the usage, until the client leaves."""
    try:
        async for tokens in _chunks(stream):
            usage = {"usage": _usage(stream)} if options.continuous_usage_stats else {}
            yield _event(head | {"choices": [_choice(text.add(tokens))]} | usage)
        yield _event(head | {"choices": [_choice(text.add([], last=True), stream.request.end)]})
        if options.include_usage:
            yield _event(head | {"choices": [], "usage": _usage(stream)})
        yield "data: [DONE]\n\n"
    except HTTPException as error:  # the status is sent already
        yield _event(_described(error.status_code, error.detail))
    finally:
        stream.cancel()
        meters.count(stream)


async def _whole(
    stream: Stream, head: dict[str, Any], text: Detokenizer, request: Request, meters: Meters
) -> JSONResponse:
    """Answer all at once. Cancel if the client leaves, which is noticed by waiting for its next message."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        stream.cancel()

    watch = asyncio.create_task(left())
    try:
        tokens = [token async for chunk in _chunks(stream) for token in chunk]
        choice = _choice(text.add(tokens, last=True), stream.request.end)
        return JSONResponse(head | {"choices": [choice], "usage": _usage(stream)})
    finally:
        watch.cancel()
        stream.cancel()
        meters.count(stream)


def _choice(text: str, end: str | None = None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": end}


def _usage(stream: Stream) -> dict[str, int]:
    stats = stream.stats
    total = stats.prompt_tokens + stats.tokens
    return {"prompt_tokens": stats.prompt_tokens, "completion_tokens": stats.tokens, "total_tokens": total}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(_described(status, message), status, headers)


def _described(status: int, message: str) -> dict[str, Any]:
    """Return an error in OpenAI's shape."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
