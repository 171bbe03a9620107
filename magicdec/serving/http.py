"""`python -m magicdec.serving.http`: the engine behind OpenAI's `/v1/completions`, for load generators and others.

It takes the overrides that launch.py takes: batch.size is the number of slots, batch.context_len + batch.generate_len
the most tokens of a request. `/metrics` is for Prometheus. Needs pip install 'magicdec[serve]'.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from magicdec import build
from magicdec.config import compose
from magicdec.data.tokenizer import load_tokenizer
from magicdec.errors import UserError
from magicdec.resolve import resolve
from magicdec.serving.engine import AsyncEngine, Stream
from magicdec.serving.request import Params
from magicdec.serving.scheduler import Scheduler
from magicdec.serving.slots import Slots
from magicdec.tracking.progress import progress
from magicdec.verification.sampling import Sampling

try:
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
    from pydantic import BaseModel, ConfigDict
except ImportError as missing:
    raise SystemExit(f"error: serving over HTTP needs {missing.name}: pip install 'magicdec[serve]'") from None

USER_ERROR = 2
DISCONNECT_POLL_S = 0.05
OPENAI_MAX_TOKENS, OPENAI_TEMPERATURE = 16, 1.0  # where a request does not say
# What OpenAI's interface has and this one does not: only the value that changes nothing is taken.
NEUTRAL: dict[str, tuple] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (),
    "stop": ("", []),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
}


class StreamOptions(BaseModel):
    """Of a streamed completion."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Completion(BaseModel):
    """A request as OpenAI defines it, with vLLM's `top_k` and `ignore_eos`, and `gamma`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    gamma: int | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    n: Any = None
    best_of: Any = None
    echo: Any = None
    logprobs: Any = None
    stop: Any = None
    suffix: Any = None
    logit_bias: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None

    def params(self) -> Params:
        """Raises UserError for what cannot be done."""
        for name, neutral in NEUTRAL.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                raise UserError(f"{name}={value}: not supported; leave it out")
        sampling = Sampling(
            temperature=OPENAI_TEMPERATURE if self.temperature is None else self.temperature,
            top_k=None if self.top_k in (-1, 0) else self.top_k,  # either keeps every token in vLLM
            top_p=self.top_p,
            seed=random.getrandbits(63) if self.seed is None else self.seed,
        )
        max_tokens = OPENAI_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return Params(max_tokens, sampling, self.gamma, self.ignore_eos)

    def token_ids(self, tokenizer: Any) -> list[int]:
        """The one prompt; raises UserError for several."""
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise UserError(f"prompt: {len(prompt)} of them; send one in each request")
            prompt = prompt[0]
        return tokenizer.encode(prompt, verbose=False) if isinstance(prompt, str) else prompt


class Detokenizer:
    """Text as it grows. What may be half of a character is held back until the other half is there."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._tokens = tokenizer, list[int]()
        self._start = self._told = 0  # a token's text may depend on the one before: decode from there

    def add(self, tokens: list[int], last: bool = False) -> str:
        """The text that these tokens add."""
        self._tokens += tokens
        before, now = (self._text(self._tokens[self._start : end]) for end in (self._told, len(self._tokens)))
        if now.endswith("\ufffd") and not last:
            return ""
        self._start, self._told = self._told, len(self._tokens)
        return now[len(before) :]

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


class Meters:
    """What Prometheus reads."""

    def __init__(self, engine: AsyncEngine):
        self.registry = CollectorRegistry()
        named: Any = {"registry": self.registry, "namespace": "magicdec"}
        Gauge("requests_running", "Requests that have a slot", **named).set_function(lambda: engine.num_running)
        Gauge("requests_waiting", "Requests without a slot", **named).set_function(lambda: engine.num_waiting)
        self.requests = Counter("requests", "Requests by how they ended", ["end"], **named)
        self.tokens = {
            name: Counter(f"{name}_tokens", f"Tokens: {name}", **named)
            for name in ("prompt", "generation", "proposed", "accepted")
        }
        self.seconds = {
            "time_to_first_token_s": Histogram("time_to_first_token_seconds", "TTFT", **named),
            "time_per_output_token_s": Histogram("time_per_output_token_seconds", "TPOT", **named),
            "request_latency_s": Histogram("request_latency_seconds", "From arrival to the last token", **named),
        }

    def count(self, stream: Stream) -> None:
        """A request that is over."""
        request, stats = stream.request, stream.stats
        self.requests.labels(request.end or "cancelled").inc()
        amounts = (stats.prompt_tokens, stats.tokens, stats.proposed, stats.accepted)
        for counter, amount in zip(self.tokens.values(), amounts, strict=True):
            counter.inc(amount)
        for name, histogram in self.seconds.items():
            if (seconds := getattr(stats, name)) is not None:
                histogram.observe(seconds)


def create_app(engine: AsyncEngine, tokenizer: Any, model: str) -> FastAPI:
    """The routes; the engine runs as long as the app does."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with engine:
            yield

    app, meters, numbers = FastAPI(title="magicdec", lifespan=lifespan), Meters(engine), count()

    @app.exception_handler(RequestValidationError)
    async def refuse(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return _error(400, f"{where}: {first['msg']}" if where else first["msg"])

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if engine.is_open else 503)

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(generate_latest(meters.registry))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        described = {"id": model, "object": "model", "owned_by": "magicdec", "max_model_len": engine.max_len}
        return {"object": "list", "data": [described]}

    @app.post("/v1/completions")
    async def completions(asked: Completion, request: Request) -> Response:
        if asked.model != model:
            return _error(404, f"model={asked.model} is not served here; {model} is", "model_not_found")
        try:
            stream = engine.generate(asked.token_ids(tokenizer), asked.params())
        except UserError as error:
            return _error(400, str(error))
        except RuntimeError as error:
            return _error(503, str(error), "unavailable")
        head = {"id": f"cmpl-{next(numbers)}", "object": "text_completion", "created": int(time.time()), "model": model}
        if asked.stream:
            events = _events(stream, head, Detokenizer(tokenizer), asked.stream_options or StreamOptions(), meters)
            return StreamingResponse(events, media_type="text/event-stream")
        return await _whole(stream, head, Detokenizer(tokenizer), request, meters)

    return app


async def _events(
    stream: Stream, head: dict[str, Any], text: Detokenizer, options: StreamOptions, meters: Meters
) -> AsyncIterator[str]:
    """The text of each chunk, the reason of the end, perhaps the usage. A client that leaves ends this early."""
    try:
        async for tokens in stream.chunks():
            usage = {"usage": _usage(stream)} if options.continuous_usage_stats else {}
            yield _event(head | {"choices": [_choice(text.add(tokens))]} | usage)
        yield _event(head | {"choices": [_choice(text.add([], last=True), stream.request.end)]})
        if options.include_usage:
            yield _event(head | {"choices": [], "usage": _usage(stream)})
        yield "data: [DONE]\n\n"
    except RuntimeError as error:  # the status is sent already
        yield _event({"error": {"message": str(error), "type": "unavailable"}})
    finally:
        stream.cancel()
        meters.count(stream)


async def _whole(
    stream: Stream, head: dict[str, Any], text: Detokenizer, request: Request, meters: Meters
) -> JSONResponse:
    """All at once. Nobody tells a handler that its client has left: it has to look."""

    async def collected() -> list[int]:
        return [token async for token in stream]

    task = asyncio.create_task(collected())
    try:
        while not (await asyncio.wait({task}, timeout=DISCONNECT_POLL_S))[0]:
            if await request.is_disconnected():
                stream.cancel()
        said = text.add(task.result(), last=True)
        return JSONResponse(head | {"choices": [_choice(said, stream.request.end)], "usage": _usage(stream)})
    except RuntimeError as error:
        return _error(503, str(error), "unavailable")
    finally:
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


def _error(status: int, message: str, kind: str = "invalid_request_error") -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 2 for a user's mistake, told in one line."""
    parser = argparse.ArgumentParser("python -m magicdec.serving.http", description=__doc__.partition("\n")[0])
    parser.add_argument("overrides", nargs="*", help="as for launch.py: target=tiny draft=self batch.size=8")
    parser.add_argument("--host", default="127.0.0.1", help="loopback by default: there is no authentication")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", help="the name that clients ask for (target.name)")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = compose(["scenario=serve", *options.overrides])
        plan = resolve(config)
        if plan.target.folder is None:
            raise UserError("target.weights=random: there is no tokenizer to serve text with")
        if plan.num_ranks > 1:
            raise UserError(f"hardware.tensor_parallel={plan.num_ranks}: over HTTP one device serves; set it to 1")
        batch = plan.config.batch
        build.check_memory(plan, int(batch.size), batch.context_len)
        tokenizer = load_tokenizer(plan.target.folder)
        with progress() as bars:
            slots = Slots(build.engine(plan, bars), int(batch.size), batch.context_len + batch.generate_len)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    app = create_app(AsyncEngine(Scheduler(slots)), tokenizer, options.model or plan.config.target.name)
    uvicorn.run(app, host=options.host, port=options.port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
