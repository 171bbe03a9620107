"""The routes of the HTTP server: OpenAI's completions and models, `/health`, and `/metrics` for
Prometheus.
"""

import asyncio
import json
import reprlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from magicdec.errors import UserError
from magicdec.http.completion import Chat, Completion, SharedFields, StoppableText
from magicdec.measure.metrics import Rounds
from magicdec.serving.engine import AsyncEngine, Stream
from magicdec.serving.request import Stats

# Largest body: a token takes about 5 bytes as text, 12 escaped or as an id.
BODY_BYTES, BYTES_PER_TOKEN = 16 << 10, 32
BODY_S = 30.0  # limit on the arrival of a request
RETRY_AFTER = {"Retry-After": "1"}  # seconds


class Meters:
    """Counts and times of all requests."""

    def __init__(self, engine: AsyncEngine):
        self._registry = CollectorRegistry()
        named: Any = {"registry": self._registry, "namespace": "magicdec"}
        Gauge("requests_running", "Requests that have a slot", **named).set_function(
            lambda: engine.num_running
        )
        Gauge("requests_waiting", "Requests without a slot", **named).set_function(
            lambda: engine.num_waiting
        )
        self.requests = Counter("requests", "Requests by how they ended", ["end"], **named)
        self.tokens = {
            name: Counter(f"{name}_tokens", f"Tokens: {name}", **named)
            for name in ("prompt", "generation", "proposed", "accepted")
        }
        self.rounds = Counter("rounds", "Rounds of speculation, as acceptance counts them", **named)
        position = "Rounds that accepted the proposal at this position"
        self.accepted = Counter("accepted_tokens_per_position", position, ["position"], **named)
        self.seconds = {
            "time_to_first_token_s": Histogram("time_to_first_token_seconds", "TTFT", **named),
            "time_per_output_token_s": Histogram("time_per_output_token_seconds", "TPOT", **named),
            "request_latency_s": Histogram(
                "request_latency_seconds", "From arrival to the last token", **named
            ),
        }

    def count(self, stats: Stats, amounts: "Amounts", end: str | None) -> None:
        """Count a request and how it ended; None if its client left."""
        self.requests.labels(end or "cancelled").inc()
        counted = (amounts.prompt, amounts.tokens, amounts.proposed, amounts.accepted)
        for counter, amount in zip(self.tokens.values(), counted, strict=True):
            counter.inc(amount)
        for (_, accepted), number in amounts.rounds.items():
            self.rounds.inc(number)
            for position in range(accepted):
                self.accepted.labels(position).inc(number)
        for name, histogram in self.seconds.items():
            if (seconds := getattr(stats, name)) is not None:
                histogram.observe(seconds)

    def text(self) -> bytes:
        """Return all counters in Prometheus' format."""
        return generate_latest(self._registry)


@dataclass(frozen=True)
class Amounts:
    """The tokens and rounds of an answer, up to its end: the engine may be further."""

    prompt: int
    tokens: int
    rounds: Rounds

    @property
    def proposed(self) -> int:
        """Return the proposed tokens."""
        return sum(proposed * number for (proposed, _), number in self.rounds.items())

    @property
    def accepted(self) -> int:
        """Return the accepted tokens."""
        return sum(accepted * number for (_, accepted), number in self.rounds.items())

    @property
    def usage(self) -> dict[str, Any]:
        """Return the `usage` of an answer, with proposals under the names of OpenAI's predicted
        outputs.
        """
        details = {
            "accepted_prediction_tokens": self.accepted,
            "rejected_prediction_tokens": self.proposed - self.accepted,
            "rounds": self.rounds.total(),
        }
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.tokens,
            "total_tokens": self.prompt + self.tokens,
            "completion_tokens_details": details,
        }


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


def create_app(engine: AsyncEngine, tokenizer: Any, model: str, max_waiting: int = 256) -> FastAPI:
    """Return the app with its routes; the engine runs as long as the app."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with engine:
            yield

    meters, admission = Meters(engine), Admission(engine, max_waiting)
    numbers = count()
    app = FastAPI(title="magicdec", lifespan=lifespan, redirect_slashes=False)
    app.add_exception_handler(
        HTTPException, lambda _, error: _error(error.status_code, error.detail, error.headers)
    )
    app.add_exception_handler(UserError, lambda _, error: _error(400, str(error)))
    # The client has left.
    app.add_exception_handler(ClientDisconnect, lambda *_: Response(status_code=400))
    app.add_exception_handler(
        Exception, lambda *_: _error(500, "the server has failed to answer this request")
    )

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
        stream = engine.generate(prompt, asked.params(engine.max_len - len(prompt)))
        head = {
            "id": f"{kind.id_prefix}-{next(numbers)}",
            "object": kind.kind,
            "created": int(time.time()),
        }
        head["model"] = model
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
                    raise HTTPException(
                        413,
                        f"the request is over {most:,} bytes; it may be {max_len:,} tokens long",
                    )
    except TimeoutError:
        raise HTTPException(408, f"the request did not arrive within {BODY_S:g} s") from None
    return bytes(body)


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
            yield _event(_described(error.status_code, error.detail))
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


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(_described(status, message), status, headers)


def _described(status: int, message: str) -> dict[str, Any]:
    """Return an error in OpenAI's shape."""
    kind = {429: "rate_limit_error"}.get(status, "invalid_request_error")
    if status >= 500:
        kind = "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
