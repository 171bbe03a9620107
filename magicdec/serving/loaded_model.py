"""A loaded model for Python programs: `generate` and `stream`, which block, from any thread.

Rounds run on the engine's thread: an interrupt while the caller waits for one disturbs neither the
model nor other requests.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple, TypedDict, Unpack

from typing_extensions import override

from magicdec.data.tokenizer import Detokenizer, encode_prompt
from magicdec.errors import UserError
from magicdec.inputs.rules import SHORT, did_you_mean
from magicdec.measure.metrics import Metrics, Rounds, acceptance
from magicdec.serving.engine import AsyncEngine
from magicdec.serving.load_generator import load_metrics
from magicdec.serving.request import Params, Request, Stats
from magicdec.serving.scheduler import Scheduler
from magicdec.serving.slots import Slots
from magicdec.verification.sampling import Sampling

Prompt = str | Sequence[int]  # a text, or token ids
Chunks = SimpleQueue[list[int]]


class Options(TypedDict, total=False):
    """Options of a request. The defaults are the settings that the model was loaded with."""

    temperature: float  # 0: always the likeliest token
    top_k: int
    top_p: float
    seed: int
    gamma: int  # proposals per round that count, at most those of the draft
    ignore_eos: bool  # continue after an end of sequence; False by default


OPTIONS = ("max_tokens", *Options.__annotations__)


class Piece(NamedTuple):
    """New text of a stream, and the tokens of the round that it came from."""

    text: str
    ids: list[int]


@dataclass(frozen=True)
class Continuation:
    """The text and the tokens that follow one prompt."""

    text: str
    ids: list[int] = field(repr=False)
    end: str  # stop: at an end of sequence; length: after max_tokens
    stats: Stats = field(repr=False)


class Continuations(list[Continuation]):
    """The continuations of several prompts, in their order, with the metrics of all of them
    together.

    `metrics` has the names of scenario=serve: tokens_per_second, time_to_first_token_ms,
    time_per_output_token_ms (means and percentiles), acceptance_rate, acceptance_length.
    """

    def __init__(self, requests: Sequence[Request], seconds: float, tokenizer: Any):
        super().__init__(
            Continuation(
                Detokenizer(tokenizer).add(r.tokens, last=True), r.tokens, str(r.end), r.stats
            )
            for r in requests
        )
        rounds = sum((request.rounds for request in requests), Rounds())
        speed = load_metrics([request.stats for request in requests], seconds)
        self.metrics: Metrics = {**speed, **acceptance(rounds)}


class Model:
    """A target and its draft, ready to continue prompts.

    As many prompts as there are slots (batch.size) are decoded together; others wait. The memory is
    freed by `close`, at the end of a `with` block, or when nothing refers to the model any more.
    """

    def __init__(
        self,
        slots: Slots,
        tokenizer: Any,
        progress: Callable[[], AbstractContextManager[Any]],
        title: str,
    ):
        """`progress` opens the display of progress bars; `title` says what was loaded."""
        self.tokenizer = tokenizer
        self._progress, self._title = progress, title
        self._params = Params(sampling=Sampling.of(slots.engine.sampling, 0))
        self._new_slots = partial(Slots, slots.engine, slots.num_slots, slots.max_len)
        self._lock, self._closed = threading.Lock(), False
        self._start(slots)

    @override
    def __repr__(self) -> str:
        return f"<Model: {self._title}>"

    def generate(
        self, prompts: Prompt | Sequence[Prompt], max_tokens: int = 64, **options: Unpack[Options]
    ) -> Continuations:
        """Continue one prompt or many, of any lengths, each a text or token ids.

        Prompt i draws the random numbers of row i of a run: a sample depends on its place in the
        list, but not on the other prompts, except with `draft=suffix` (unless `draft.history=0`),
        `draft.gamma=auto`, or `cache=verify_guided` with `cache.refresh` above 1. Raise UserError
        for options out of range and for prompts that are empty or too long.
        """
        params = self._with(max_tokens, options)
        chunks = Chunks()
        # All before the first request, whose time begins when it is made.
        rows = [self._ids(prompt) for prompt in _separate(prompts)]
        requests = [
            Request(
                ids,
                replace(params, sampling=replace(params.sampling, sequence=number)),
                chunks.put,
            )
            for number, ids in enumerate(rows)
        ]
        start, left = perf_counter(), len(requests)
        with (
            self._submitted(requests),
            self._progress() as bars,
            bars.task("generate", max_tokens * left) as task,
        ):
            while left:
                chunk = _next(chunks)
                task.advance(len(chunk))
                left -= not chunk
        for request in requests:
            _raise_failure(request)
        return Continuations(requests, perf_counter() - start, self.tokenizer)

    def stream(
        self, prompt: Prompt, max_tokens: int = 64, **options: Unpack[Options]
    ) -> Iterator[Piece]:
        """Continue one prompt, and yield the text and the tokens of each round.

        Generation begins when the first piece is asked for. Leaving the loop early frees the slot.
        Raise the same errors as `generate`.
        """
        chunks = Chunks()
        request = Request(self._ids(prompt), self._with(max_tokens, options), chunks.put)
        self._engine.scheduler.slots.check(request.prompt, request.params)
        return self._pieces(request, chunks)

    def _pieces(self, request: Request, chunks: Chunks) -> Iterator[Piece]:
        text = Detokenizer(self.tokenizer)
        with self._submitted([request]):
            while chunk := _next(chunks):
                yield Piece(text.add(chunk), chunk)
        _raise_failure(request)
        if rest := text.add([], last=True):  # half of a character
            yield Piece(rest, [])

    def close(self) -> None:
        """Free the memory. Requests that are still running fail."""
        with self._lock:
            self._closed = True
            self._stop()

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _submitted(self, requests: Sequence[Request]) -> Iterator[None]:
        """Queue requests, and cancel those that are not done at the end. Replace an engine that has
        failed.
        """
        with self._lock:
            if self._engine.error is not None and not self._closed:
                self._stop()
                self._start(self._new_slots())
        try:
            for number, request in enumerate(requests):
                try:
                    self._engine.submit(request)
                except UserError as error:
                    raise UserError(
                        f"prompts[{number}]: {error}" if len(requests) > 1 else str(error)
                    ) from None
            yield
        finally:
            for request in requests:
                request.cancelled = True

    def _start(self, slots: Slots) -> None:
        self._engine = AsyncEngine(Scheduler(slots))
        self._engine.start()
        self._stop = weakref.finalize(self, _stop, self._engine)

    def _with(self, max_tokens: int, options: Options) -> Params:
        """Return the parameters of a request. Raise UserError for options that are unknown or of a
        wrong type.
        """
        given: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": False, **options}
        for name, value in given.items():
            if name not in OPTIONS:
                raise UserError(
                    f"{name}: unknown option; one of:"
                    f" {', '.join(OPTIONS)}{did_you_mean(name, OPTIONS)}"
                )
            if hasattr(value, "item"):  # a scalar of numpy or torch
                given[name] = value.item()
        before = self._params.sampling
        sampling = {name: given.pop(name) for name in given.keys() & vars(before).keys()}
        return replace(self._params, sampling=replace(before, **sampling), **given)

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            try:
                prompt.encode()
            except UnicodeEncodeError:
                raise UserError(
                    f"prompt={SHORT.repr(prompt)}: holds half of a surrogate pair"
                ) from None
            return encode_prompt(self.tokenizer, prompt)
        ids = _listed(prompt)
        is_listed = isinstance(ids, Sequence) and not isinstance(ids, bytes | bytearray)
        if not is_listed or not all(isinstance(token, Integral) for token in ids):
            raise UserError(f"prompt={SHORT.repr(prompt)}: must be a text or a list of token ids")
        return [int(token) for token in ids]


def _separate(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return a list of prompts, of one or many."""
    rows = _listed(prompts)
    is_many = (
        isinstance(rows, Sequence)
        and not isinstance(rows, str)
        and rows
        and not isinstance(rows[0], Integral)
    )
    return rows if is_many else [rows]


def _listed(values: Any) -> Any:
    """Return arrays, tensors and series as lists, and all else as it is."""
    return values.tolist() if hasattr(values, "tolist") else values


def _next(chunks: Chunks) -> list[int]:
    """Wait for the next chunk; on Windows, Ctrl-C is only noticed between two waits."""
    while True:
        try:
            return chunks.get(timeout=0.5)
        except Empty:
            pass


def _raise_failure(request: Request) -> None:
    if request.error is not None:
        raise request.error
    if request.end == "cancelled":
        raise RuntimeError("the model was closed")


def _stop(engine: AsyncEngine) -> None:
    engine.stop()
    engine.scheduler.slots.close()
