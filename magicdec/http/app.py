"""The routes of the HTTP server: OpenAI's completions and models, `/health`, and `/metrics` for
Prometheus.
"""

import asyncio
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

from magicdec.errors import UserError
from magicdec.http.completion import Chat, Completion, SharedFields
from magicdec.http.http_answer import HttpAnswer, error_body
from magicdec.http.meters import Meters
from magicdec.http.stoppable_text import StoppableText
from magicdec.serving.engine import AsyncEngine, Stream
from magicdec.serving.request import Params

# Largest body: a token takes about 5 bytes as text, 12 escaped or as an id.
BODY_BYTES, BYTES_PER_TOKEN = 16 << 10, 32
BODY_S = 30.0  # limit on the arrival of a request
RETRY_AFTER = {"Retry-After": "1"}  # seconds


class Admission:
    """Limit on requests: one per slot and `max_waiting` more. Requests that are still being read
    count.
    """

    def __init__(self, engine: AsyncEngine, max_waiting: int):
        self._engine = engine
        self._room = engine.scheduler.slots.num_slots + max_waiting
        self._arriving = 0

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Reserve a place for a request until the engine has it. Raise HTTPException if none is
        free.
        """
        if not self._engine.is_open:
            raise HTTPException(503, "the engine is closed")
        if self._arriving + self._engine.num_running + self._engine.num_waiting >= self._room:
            raise HTTPException(429, "too many requests are waiting; try again later", RETRY_AFTER)
        self._arriving += 1
        try:
            yield
        finally:
            self._arriving -= 1


def _queued(engine: AsyncEngine, prompt: list[int], params: Params) -> Stream:
    """Queue a request. Raise HTTPException where the engine has ended since the request came in."""
    try:
        return engine.generate(prompt, params)
    except RuntimeError as error:
        raise HTTPException(503, str(error)) from None


def _head(kind: type[SharedFields], number: int, model: str) -> dict[str, Any]:
    """Return what an answer, and each of its events, begins with."""
    return {
        "id": f"{kind.id_prefix}-{number}",
        "object": kind.kind,
        "created": int(time.time()),
        "model": model,
    }


def create_app(engine: AsyncEngine, tokenizer: Any, model: str, max_waiting: int = 256) -> FastAPI:
    """Return the app with its routes; the engine runs as long as the app."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with engine:
            yield

    meters = Meters(engine)
    admission = Admission(engine, max_waiting)
    numbers = count()
    app = FastAPI(title="magicdec", lifespan=lifespan, redirect_slashes=False)
    _handle_errors(app)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if engine.is_open else 503)

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(meters.text())

    described = {
        "id": model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "magicdec",
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described | {"max_model_len": engine.max_len}]}

    async def answer(kind: type[SharedFields], request: Request) -> Response:
        with admission.arriving():
            asked = kind.parse(await _body(request, engine.max_len))
            if asked.model != model:
                raise HTTPException(
                    404, f"model={reprlib.repr(asked.model)} is not served here; {model} is"
                )
            prompt = await asyncio.to_thread(asked.token_ids, tokenizer)
        stream = _queued(engine, prompt, asked.params(engine.max_len - len(prompt)))
        head = _head(kind, next(numbers), model)
        answering = HttpAnswer(asked, stream, head, StoppableText(tokenizer, asked.stop), meters)
        if asked.stream:
            return StreamingResponse(answering.events(), media_type="text/event-stream")
        return await answering.whole(request)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(Completion, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(Chat, request)

    return app


def _handle_errors(app: FastAPI) -> None:
    """Answer what goes wrong in OpenAI's shape."""
    app.add_exception_handler(
        HTTPException, lambda _, error: _error(error.status_code, error.detail, error.headers)
    )
    app.add_exception_handler(UserError, lambda _, error: _error(400, str(error)))
    # The client has left.
    app.add_exception_handler(ClientDisconnect, lambda *_: Response(status_code=400))
    app.add_exception_handler(
        Exception, lambda *_: _error(500, "the server has failed to answer this request")
    )


async def _body(request: Request, max_len: int) -> bytes:
    """Read a request. Raise HTTPException for one that is not JSON, too large or too slow."""
    kind = request.headers.get("content-type", "none").partition(";")[0].strip()
    if kind.lower() != "application/json":
        raise HTTPException(415, f"content-type={kind[:40]}: must be application/json")
    body = bytearray()
    most = BODY_BYTES + BYTES_PER_TOKEN * max_len
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise HTTPException(
                        413,
                        f"the request is over {most:,} bytes; it may be {max_len:,} tokens long",
                    )
    except TimeoutError:
        raise HTTPException(408, f"the request did not arrive within {BODY_S:g} s") from None
    return bytes(body)


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(error_body(status, message), status, headers)
