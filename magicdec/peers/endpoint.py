"""A server with OpenAI's API, driven by the official client: it streams completions and times their
chunks.
"""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import aiohttp
import openai

from magicdec.data.tokenizer import encode_bare, prefix_of
from magicdec.errors import UserError, in_brief, to_stderr
from magicdec.inputs.rules import parse_json
from magicdec.peers.answer import EndpointFailed, EndpointRequest, Event
from magicdec.peers.base import AcceptanceCounts, Address
from magicdec.peers.events import DONE, data_of, words_of
from magicdec.serving.request import Params

CONNECT_S = 10.0
DRAIN_S = 0.5  # from [DONE] to the end of a response
PROBE_TOKENS = 8  # of the prompt that shows what a server takes
# Of a request with a field that it does not take.
REFUSED = (openai.BadRequestError, openai.UnprocessableEntityError)
# Counters of /metrics: rounds, proposed tokens, and accepted ones for each position. SGLang counts
# rounds alone.
COUNTERS = {
    "vllm:spec_decode_num_drafts_total": "rounds",
    "vllm:spec_decode_num_draft_tokens_total": "proposed",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": "accepted",
    "magicdec_rounds_total": "rounds",
    "magicdec_proposed_tokens_total": "proposed",
    "magicdec_accepted_tokens_per_position_total": "accepted",
    "sglang:spec_verify_calls_total": "rounds",
}
SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? ([-+.\deE]+)", re.MULTILINE)


@dataclass(frozen=True)
class Dialect:
    """The requests that a server takes: prompts as token ids or as text, and fields that OpenAI's
    API does not have.
    """

    ids: bool
    ignores_eos: bool
    returns_ids: bool
    bypasses_cache: bool  # of prefixes, by the fields of vLLM and SGLang, and of llama.cpp

    def body(self, request: EndpointRequest, prompt: Sequence[int] | str) -> dict[str, Any]:
        """Return the arguments of the client's `completions.create`; `prompt` has the form that the
        server takes.
        """
        params, sampling = request.params, request.params.sampling
        extra: dict[str, Any] = (
            {"ignore_eos": True} if self.ignores_eos and params.sampling.ignore_eos else {}
        )
        if self.returns_ids:
            extra["return_token_ids"] = True
        if self.bypasses_cache:
            extra |= {"cache_salt": uuid4().hex, "cache_prompt": False}
        # The client would look at each token of the prompt, and meanwhile receive nothing.
        extra["prompt"] = prompt
        body: dict[str, Any] = {
            "prompt": None,
            "max_tokens": params.max_tokens,
            "temperature": sampling.temperature,
            "stream": True,
        }
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        if not sampling.greedy:
            body["seed"] = sampling.seed + sampling.sequence
            body |= {} if sampling.top_p is None else {"top_p": sampling.top_p}
            extra |= {} if sampling.top_k is None else {"top_k": sampling.top_k}
        return body | {"extra_body": extra}


def text_of(prompt: list[int], tokenizer: Any) -> str:
    """Return a prompt as text, without the prefix, which the server's own tokenizer adds."""
    prefix = prefix_of(tokenizer)
    has_prefix = tuple(prompt[: len(prefix)]) == prefix
    text: str = tokenizer.decode(prompt[len(prefix) :] if has_prefix else prompt)
    return text


EXTRAS = ((True, True, True), (True, True, False), (True, False, False), (False, False, False))
DIALECTS = [Dialect(ids, *extras) for ids in (True, False) for extras in EXTRAS]


# The request that a task sends: the client says when it does, and how often.
SENT: ContextVar[EndpointRequest | None] = ContextVar("SENT", default=None)


async def _note_sent(_: Any) -> None:
    if (request := SENT.get()) is not None:
        request.note_sent()


def _certificates(address: Address) -> ssl.SSLContext | bool:
    """Return whom to trust: nobody where no connection is encrypted, because loading the
    certificates of all authorities takes 20 ms.
    """
    is_plain = address.url.startswith("http://") and not address.proxied
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if is_plain else True


class EndpointAnswer:
    """The answer to one request. Iterating waits for it; a request that fails says so, and raises
    nothing.
    """

    def __init__(self, endpoint: "Endpoint", request: EndpointRequest):
        self._endpoint, self.request = endpoint, request

    async def __aiter__(self) -> AsyncIterator[list[int]]:
        await self._endpoint.receive(self.request)
        yield self.request.tokens


class Endpoint:
    """A server, connected: an asynchronous context manager, which finds out what the server
    takes.
    """

    def __init__(self, address: Address, tokenizer: Any):
        self.address, self._tokenizer = address, tokenizer
        self._dialect = DIALECTS[0]
        self._texts: dict[tuple[int, ...], str] = {}  # of prompts
        timeout = openai.Timeout(address.time_limit_s, connect=min(CONNECT_S, address.time_limit_s))
        # aiohttp reads streams in C: a client that is slower would soon be what it measures. A
        # redirect may lead to another host, and a proxy too.
        self._http = openai.DefaultAioHttpClient(
            limits=type(openai.DEFAULT_CONNECTION_LIMITS)(max_connections=0),  # any number
            follow_redirects=False,
            trust_env=address.proxied,
            verify=_certificates(address),
            timeout=timeout,
            event_hooks={"request": [_note_sent]},
        )
        self._client = openai.AsyncOpenAI(
            base_url=address.url,
            api_key=address.api_key,
            max_retries=address.retries,
            http_client=self._http,
        )
        self.model = address.model or ""

    @property
    def takes(self) -> str:
        """Return the form in which the server takes prompts."""
        return "token ids" if self._dialect.ids else "text"

    async def __aenter__(self) -> "Endpoint":
        try:
            self.model = self.address.model or await self._only_model()
        except BaseException:
            await self._client.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def _only_model(self) -> str:
        try:
            names = [str(model.id) async for model in self._client.models.list()]
        except Exception as error:  # another server's answer may raise anything
            raise self.failure(error) from error
        if len(names) != 1:
            raise UserError(
                f"engine.model=null: {self.address.url} serves {', '.join(names) or 'none'};"
                " choose one"
            )
        return names[0]

    async def learn(self, prompt: Sequence[int], params: Params) -> bool:
        """Find out what the server takes, with the beginning of a prompt; return whether it has
        speculated on that.

        Raise EndpointFailed if it takes nothing.
        """
        before = await self.counters()
        for dialect in DIALECTS:
            if not dialect.ids and self._tokenizer is None:
                break  # random tokens, which have no text
            self._dialect = dialect
            request = EndpointRequest(prompt[:PROBE_TOKENS], params)
            await self.receive(request)
            if not isinstance(request.error, REFUSED):
                break
        if request.error is not None:
            raise self.failure(request.error)
        if params.sampling.ignore_eos and not self._dialect.ignores_eos:
            to_stderr(
                f"warning: {self.address.url} does not take ignore_eos: its answers may end early"
            )
        if request.prompt_tokens not in (None, len(request.prompt)):
            counted = (
                f"{self.address.url} counts {request.prompt_tokens} tokens in a prompt of"
                f" {len(request.prompt)}"
            )
            to_stderr(f"warning: {counted}: its tokenizer may be another than the target's")
        counts = request.counts or await self.counters() - before
        return counts.rounds > 0

    def generate(self, prompt: Sequence[int], params: Params) -> EndpointAnswer:
        """Return the answer to a prompt, which is sent once the answer is waited for."""
        return EndpointAnswer(self, EndpointRequest(prompt, params))

    def prepare(self, prompts: Iterable[Sequence[int]]) -> None:
        """Bring prompts into the form that the server takes. To decode long ones takes a while, in
        which no chunk would be received.
        """
        for prompt in prompts:
            self._in_its_form(prompt)

    def _in_its_form(self, prompt: Sequence[int]) -> Sequence[int] | str:
        """Return a prompt as token ids, or as text, which is decoded once."""
        if self._dialect.ids:
            return prompt
        key = tuple(prompt)
        if key not in self._texts:
            self._texts[key] = text_of(list(prompt), self._tokenizer)
        return self._texts[key]

    async def receive(self, request: EndpointRequest) -> None:
        """Send a request and wait for its end."""
        SENT.set(request)
        try:
            async with asyncio.timeout(self.address.time_limit_s):
                body = self._dialect.body(request, self._in_its_form(request.prompt))
                create = self._client.completions.with_streaming_response.create
                is_done = False
                async with create(model=self.model, **body) as response:
                    events = data_of(response.iter_bytes())
                    async for data in events:
                        if is_done := data.startswith(DONE):
                            await _drain(events)
                            break
                        request.take(parse_json(Event, data, where="an event of its answer"))
                request.conclude(self._encode, is_done, "ignore_eos" in body["extra_body"])
        except Exception as error:  # another server's answer may raise anything
            request.finish("failed", error)

    def _encode(self, text: str) -> list[int]:
        if self.address.names_ids:
            return [int(token) for token in re.findall(r"\[(\d+)\]", text)]
        return encode_bare(self._tokenizer, text) if self._tokenizer else []

    async def counters(self) -> AcceptanceCounts:
        """Return the server's own counters of speculation so far; none where it has no /metrics."""
        SENT.set(None)
        with suppress(Exception):  # whatever the server does, it gives none
            response = await self._http.get(self.address.url.removesuffix("/v1") + "/metrics")
            return read_counters(response.text)
        return AcceptanceCounts()

    def failure(self, error: BaseException) -> EndpointFailed:
        """Return the error of a server that has failed, in one line."""
        return EndpointFailed(f"{self.address.name}: {described(error, self.address.time_limit_s)}")


async def _drain(events: AsyncIterator[str]) -> None:
    """Read to the end of a response, so that its connection serves the next request, unless it
    stays open.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            async for _ in events:
                pass


def read_counters(text: str) -> AcceptanceCounts:
    """Return the counters of speculation in the text of /metrics, summed over the engines of a
    server.
    """
    sums: dict[str, float] = {"rounds": 0, "proposed": 0}
    accepted: dict[int, float] = {}
    for name, labels, value in SAMPLE.findall(text):
        kind = COUNTERS.get(name)
        if kind == "accepted":
            if position := re.search(r'position="(\d+)"', labels):
                place = int(position[1])
                accepted[place] = accepted.get(place, 0) + float(value)
        elif kind:
            sums[kind] += float(value)
    by_position = tuple(int(accepted[place]) for place in sorted(accepted))
    return AcceptanceCounts(int(sums["rounds"]), int(sums["proposed"]), by_position)


def described(error: BaseException, time_limit_s: float) -> str:
    """Return in one line why a request has failed."""
    causes = [*_causes(error)]
    if any(isinstance(cause, aiohttp.ConnectionTimeoutError) for cause in causes):
        return f"no connection within {min(CONNECT_S, time_limit_s):g} seconds"
    if any(isinstance(cause, TimeoutError) for cause in causes):
        return f"no answer within engine.time_limit_s={time_limit_s:g} seconds"
    words = f": {words_of(error.body)}" if isinstance(error, openai.APIError) and error.body else ""
    if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
        return (
            f"it refuses the key; name the variable that holds it with engine.key_variable{words}"
        )
    if isinstance(error, openai.APIStatusError):
        return f"status {error.status_code}{words}"
    if isinstance(error, openai.APIConnectionError):
        return f"no connection ({in_brief(str(causes[-1]))})"
    return in_brief(str(error)) or type(error).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and what it was raised from: the client says "timed out" of a connection that
    was closed, too.
    """
    while error is not None:
        yield error
        error = error.__cause__
