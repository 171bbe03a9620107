"""A request: its prompt and parameters, its tokens so far and their times."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from time import perf_counter

from pydantic import ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from magicdec.config.groups import SamplingConfig
from magicdec.inputs.rules import STRICT, Count, GammaOr0, refusal
from magicdec.measure.metrics import Rounds, acceptance, is_whole, num_accepted, num_proposed
from magicdec.verification.sampling import Sampling


@pydantic_dataclass(frozen=True, config=STRICT)
class RequestSettings(SamplingConfig):
    """The rules of a continuation's parameters."""

    max_tokens: Count = 64
    gamma: GammaOr0 | None = None


@dataclass(frozen=True)
class Params:
    """The parameters of a continuation. Raise UserError for a value of a wrong type or out of
    range.
    """

    max_tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)
    # Proposals per round that count, at most the engine's gamma; None: all of them.
    gamma: int | None = None
    limit_name: str = "max_tokens"  # how messages call `max_tokens`

    def __post_init__(self) -> None:
        sampling = {
            entry.name: getattr(self.sampling, entry.name) for entry in fields(SamplingConfig)
        }
        try:
            RequestSettings(**sampling, max_tokens=self.max_tokens, gamma=self.gamma)
        except ValidationError as error:
            raise refusal(error) from None


class Request:
    """A prompt, its parameters and its outcome so far.

    Only the scheduler's thread writes to it, except for `cancelled`. That thread calls `listener`
    with every chunk of new tokens, and with an empty one at the end.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: Params,
        listener: Callable[[list[int]], None] | None = None,
    ):
        self.prompt, self.params = list(prompt), params
        self.listener = listener
        self.arrived = perf_counter()
        self.tokens: list[int] = []
        # Of each chunk of tokens: a round's, or the prefill's first token.
        self.chunk_times: list[float] = []
        self.rounds = Rounds()
        self.chunk_rounds: list[Rounds] = []  # the part of `rounds` that belongs to each chunk
        self._round = Rounds()
        self.cancelled = False
        self.end: str | None = None  # stop (end of sequence), length, cancelled, failed
        self.error: BaseException | None = None

    def count_round(self, proposed: int, accepted: int, committed: int) -> None:
        """Count a round for acceptance, before its tokens are received."""
        at_limit = len(self.tokens) + committed == self.params.max_tokens
        if is_whole(proposed, accepted, committed, at_limit):
            self.rounds[proposed, accepted] += 1
            self._round[proposed, accepted] += 1

    def receive(self, tokens: list[int]) -> None:
        """Add a chunk of new tokens, at the current time."""
        self.tokens += tokens
        self.chunk_times.append(perf_counter())
        self.chunk_rounds.append(self._round)
        self._round = Rounds()
        if self.listener is not None:
            self.listener(tokens)

    def finish(self, end: str, error: BaseException | None = None) -> None:
        """End the request."""
        self.end, self.error = end, error
        if self.listener is not None:
            self.listener([])

    @property
    def num_tokens(self) -> int:
        """The number of new tokens so far."""
        return len(self.tokens)

    @property
    def stats(self) -> "Stats":
        """Times, tokens and acceptance so far."""
        times, count = self.chunk_times, self.num_tokens
        rates = acceptance(self.rounds)
        return Stats(
            prompt_tokens=len(self.prompt),
            tokens=count,
            time_to_first_token_s=times[0] - self.arrived if times else None,
            time_per_output_token_s=(times[-1] - times[0]) / (count - 1) if count > 1 else None,
            request_latency_s=times[-1] - self.arrived if times else None,
            inter_chunk_s=[after - before for before, after in pairwise(times)],
            proposed=num_proposed(self.rounds),
            accepted=num_accepted(self.rounds),
            acceptance_rate=rates.get("acceptance_rate"),  # type: ignore[arg-type]
            acceptance_length=rates.get("acceptance_length"),  # type: ignore[arg-type]
        )


@dataclass(frozen=True)
class Stats:
    """The figures of one request. Times are in seconds; None for what has not happened yet.

    A round yields a chunk of one token or more. `time_per_output_token_s` is the mean over the
    tokens after the first (vLLM's TPOT, AIPerf's inter token latency); `inter_chunk_s` the time
    from each chunk to the next (vLLM's ITL, AIPerf's inter chunk latency).
    """

    prompt_tokens: int
    tokens: int
    time_to_first_token_s: float | None
    time_per_output_token_s: float | None
    request_latency_s: float | None
    inter_chunk_s: list[float]
    proposed: int  # tokens, in the rounds that count for acceptance (metrics.is_whole)
    accepted: int
    acceptance_rate: float | None
    acceptance_length: float | None
