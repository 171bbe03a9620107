"""The answer of a server with OpenAI's API: the events of its stream, and what they say about one request."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass
from typing_extensions import override

from magicdec.errors import UserError
from magicdec.peers.base import Counts
from magicdec.rules import JSON
from magicdec.serving.request import Params, Request

Number = Annotated[int, Field(ge=0, lt=1 << 53)]


class EndpointFailed(UserError):
    """A server that cannot be reached, or that does not answer as it should."""

    kind = "crashed"


@dataclass(frozen=True, config=JSON)
class Details:
    """The part of a usage that counts proposals, under OpenAI's names for predicted outputs; `rounds` is ours."""

    accepted_prediction_tokens: Number | None = None
    rejected_prediction_tokens: Number | None = None
    rounds: Number | None = None


@dataclass(frozen=True, config=JSON)
class Usage:
    """The tokens of a request so far."""

    completion_tokens: Number
    prompt_tokens: Number = 0
    completion_tokens_details: Details | None = None


@dataclass(frozen=True, config=JSON)
class Choice:
    """The new text of an event, and its tokens where the server tells them."""

    text: str | None = None
    token_ids: list[Number] | None = None


@dataclass(frozen=True, config=JSON)
class Timings:
    """Where llama.cpp's server counts proposals."""

    draft_n: Number | None = None
    draft_n_accepted: Number = 0


@dataclass(frozen=True, config=JSON)
class Event:
    """An event of a stream."""

    choices: list[Choice]
    usage: Usage | None = None
    timings: Timings | None = None


class EndpointRequest(Request):
    """A request to a server, and its answer so far."""

    def __init__(self, prompt: Sequence[int], params: Params):
        super().__init__(prompt, params)
        self.text = ""
        self.counts: Counts | None = None  # None: the response does not say
        self._usage: Usage | None = None
        self._timings: Timings | None = None

    @property
    @override
    def num_tokens(self) -> int:
        return self._usage.completion_tokens if self._usage else len(self.tokens)

    @property
    def prompt_tokens(self) -> int:
        """Return the tokens of the prompt, as the server counts them."""
        return self._usage.prompt_tokens if self._usage else 0

    def take(self, event: Event) -> None:
        """Add an event. It is a chunk if it has new tokens, or new text where the server does not tell tokens."""
        before, self._usage = self.num_tokens, event.usage or self._usage
        self._timings = event.timings or self._timings
        if not event.choices:
            return
        choice = event.choices[0]
        self.text += choice.text or ""
        if choice.token_ids is not None:
            is_new = bool(choice.token_ids)
            self.tokens += choice.token_ids
        else:
            is_new = self.num_tokens > before if event.usage else bool(choice.text)
        if is_new:
            self.chunk_times.append(perf_counter())

    def conclude(self, encode: Callable[[str], list[int]]) -> None:
        """End an answer that is complete. Raise EndpointFailed for one whose tokens cannot be counted.

        `encode` finds its tokens where the server has told only their text.
        """
        if self._usage is None:
            raise EndpointFailed("its answer has no usage, which counts its tokens")
        if not self.num_tokens:
            raise EndpointFailed("its answer has no tokens")
        if not self.chunk_times:
            self.chunk_times.append(perf_counter())
        self.tokens = self.tokens or encode(self.text)
        self.counts = self._counted(self._usage.completion_tokens_details or Details())
        self.finish("stop" if self.num_tokens < self.params.max_tokens else "length")

    def _counted(self, details: Details) -> Counts | None:
        if details.accepted_prediction_tokens is not None and details.rounds is not None:
            accepted = details.accepted_prediction_tokens
            return Counts(details.rounds, accepted + (details.rejected_prediction_tokens or 0), unplaced=accepted)
        if self._timings is None or self._timings.draft_n is None:
            return None
        accepted = self._timings.draft_n_accepted  # a round yields one token more, whether or not it proposed any
        return Counts(self.num_tokens - 1 - accepted, self._timings.draft_n, unplaced=accepted)
