"""The answer of a server with OpenAI's API: the events of its stream, and what they say about one
request.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Annotated, Any, TypeVar

from pydantic import ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic.dataclasses import dataclass
from typing_extensions import override

from magicdec.errors import UserError
from magicdec.inputs.rules import JSON, Natural
from magicdec.peers.base import AcceptanceCounts
from magicdec.serving.request import Params, Request

# Finish reasons of answers that are not whole.
BROKEN_OFF = ("abort", "cancelled", "content_filter", "error")


def _or_none(value: Any, inner: ValidatorFunctionWrapHandler) -> Any:
    try:
        return inner(value)
    except ValidationError:
        return None


T = TypeVar("T")
# What can be done without: None for anything else.
Lenient = Annotated[T | None, WrapValidator(_or_none)]


class EndpointFailed(UserError):
    """A server that cannot be reached, or that does not answer as it should."""

    kind = "crashed"


@dataclass(frozen=True, config=JSON)
class Details:
    """The part of a usage that counts proposals, under OpenAI's names for predicted outputs;
    `rounds` is ours.
    """

    accepted_prediction_tokens: Natural | None = None
    rejected_prediction_tokens: Natural | None = None
    rounds: Natural | None = None


@dataclass(frozen=True, config=JSON)
class Usage:
    """The tokens of a request so far."""

    completion_tokens: Natural | None = None
    prompt_tokens: Lenient[Natural] = None
    completion_tokens_details: Lenient[Details] = None


@dataclass(frozen=True, config=JSON)
class Choice:
    """The new text of an event, its tokens where the server tells them, and why the answer ends
    here if it does. A server that parses reasoning sends that under a name of its own.
    """

    text: str | None = None
    reasoning: Lenient[str] = None
    reasoning_content: Lenient[str] = None
    token_ids: list[Natural] | None = None
    finish_reason: Lenient[str] = None


@dataclass(frozen=True, config=JSON)
class Timings:
    """Where llama.cpp's server counts proposals."""

    draft_n: Natural | None = None
    draft_n_accepted: Natural = 0


@dataclass(frozen=True, config=JSON)
class Speculation:
    """Where vLLM counts proposals of a request (--per-request-spec-decode-metrics): rounds by their
    accepted tokens, from none on.
    """

    num_spec_steps: Natural
    num_draft_tokens: Natural
    acceptance_histogram: list[Natural]

    @property
    def counts(self) -> AcceptanceCounts:
        """Return the counts, with the accepted tokens by position."""
        places = range(1, len(self.acceptance_histogram))
        accepted = tuple(sum(self.acceptance_histogram[place:]) for place in places)
        return AcceptanceCounts(self.num_spec_steps, self.num_draft_tokens, accepted)


@dataclass(frozen=True, config=JSON)
class PerRequest:
    """vLLM's metrics of a request, in its last event."""

    speculative_decoding: Lenient[Speculation] = None


@dataclass(frozen=True, config=JSON)
class Event:
    """An event of a stream. One that only counts has no choices."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    timings: Lenient[Timings] = None
    metrics: Lenient[PerRequest] = None


class EndpointRequest(Request):
    """A request to a server, and its answer so far."""

    def __init__(self, prompt: Sequence[int], params: Params):
        super().__init__(prompt, params)
        self.text = ""
        self.counts: AcceptanceCounts | None = None  # None: the response does not say
        self.finish_reason: str | None = None
        self._is_sent = False
        self._num_told = 0  # tokens whose ids the server has sent
        self._usage: Usage | None = None
        self._timings: Timings | None = None
        self._speculation: Speculation | None = None
        self.num_retries = 0

    def note_sent(self) -> None:
        """Note that the request is sent. Its times are those of the last attempt: before that, it
        is the client that waits.
        """
        if self._is_sent:
            self.num_retries += 1
            self.arrived = perf_counter()
        self._is_sent = True

    @property
    @override
    def num_tokens(self) -> int:
        """Return the new tokens so far. A counter may lag behind those that have arrived."""
        counted = self._usage.completion_tokens if self._usage else None
        return max(counted or 0, self._num_told)

    @property
    def prompt_tokens(self) -> int | None:
        """Return the tokens of the prompt, as the server counts them; None if it does not."""
        return self._usage.prompt_tokens if self._usage else None

    def take(self, event: Event) -> None:
        """Add an event. It is a chunk if it has new tokens, or new text where the server does not
        tell tokens.
        """
        before = self.num_tokens
        self._usage = event.usage or self._usage
        self._timings = event.timings or self._timings
        if event.metrics and event.metrics.speculative_decoding:
            self._speculation = event.metrics.speculative_decoding
        if not event.choices:
            return
        choice = event.choices[0]
        text = (choice.text or "") + (choice.reasoning or choice.reasoning_content or "")
        self.text += text
        self.finish_reason = choice.finish_reason or self.finish_reason
        if choice.token_ids is not None:
            is_new = bool(choice.token_ids)
            self.tokens += choice.token_ids
            self._num_told += len(choice.token_ids)
        else:
            is_new = bool(text) or self.num_tokens > before
        if is_new:
            self.chunk_times.append(perf_counter())

    def conclude(
        self, encode: Callable[[str], list[int]], is_done: bool, ignores_eos: bool
    ) -> None:
        """End an answer that is complete. Raise EndpointFailed for one that is not, or that cannot
        be counted.

        `encode` finds its tokens where the server has told only their text. `is_done`: the stream
        had its end. `ignores_eos`: the server was told to write as many tokens as were asked for.
        """
        if self.finish_reason in BROKEN_OFF:
            raise EndpointFailed(f"its answer ends with finish_reason={self.finish_reason}")
        usage = self._usage or Usage()
        if usage.completion_tokens is None and not self.tokens:
            cut_short = "" if self.finish_reason or is_done else ", and breaks off"
            raise EndpointFailed(f"its answer has no usage, which counts its tokens{cut_short}")
        if not self.num_tokens:
            despite = ", by its usage, though it has text" if self.text else ""
            raise EndpointFailed(f"its answer has no tokens{despite}")
        most = self.params.max_tokens
        if self.num_tokens < most:
            self._check_early_end(
                f"its answer has {self.num_tokens} of {most} tokens", is_done, ignores_eos
            )
        if not self.chunk_times:
            self.chunk_times.append(perf_counter())
        self.tokens = self.tokens or encode(self.text)
        self.counts = self._counted(usage.completion_tokens_details or Details())
        self.finish("stop" if self.num_tokens < most else "length")

    def _check_early_end(self, described: str, is_done: bool, ignores_eos: bool) -> None:
        """Raise EndpointFailed for an answer that has no reason to be shorter than was asked
        for.
        """
        if not (self.finish_reason or is_done):
            raise EndpointFailed(f"{described}: it breaks off, without a finish_reason or [DONE]")
        if ignores_eos:
            reason = f"although ignore_eos was sent (finish_reason={self.finish_reason})"
            raise EndpointFailed(
                f"{described}, {reason}; set sampling.ignore_eos=false if the server ends answers"
            )

    def _counted(self, details: Details) -> AcceptanceCounts | None:
        if self._speculation is not None:
            return self._speculation.counts
        if details.accepted_prediction_tokens is not None and details.rounds is not None:
            accepted = details.accepted_prediction_tokens
            return AcceptanceCounts(
                details.rounds,
                accepted + (details.rejected_prediction_tokens or 0),
                unplaced=accepted,
            )
        if self._timings is None or self._timings.draft_n is None:
            return None
        # A round yields one token more, whether or not it proposed any.
        accepted = self._timings.draft_n_accepted
        return AcceptanceCounts(
            self.num_tokens - 1 - accepted, self._timings.draft_n, unplaced=accepted
        )
