"""The interface of a peer: another engine that decodes the same prompts, so that it can be measured
as ours is.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import ClassVar, Literal

from magicdec.config.choices import CacheConfig, DraftConfig, EngineConfig, ModelChoice
from magicdec.config.groups import HardwareConfig, SamplingConfig
from magicdec.config.omega import alpha_from_acceptance_length
from magicdec.config.schema import Config
from magicdec.measure.metrics import Metrics, RowTimes


@dataclass(frozen=True)
class PeerSpec:
    """The settings of a peer: groups of the configuration, and what the run has resolved."""

    target: str  # a folder, as for all models here
    hardware: HardwareConfig  # without any `auto`
    num_rows: int  # of a batch
    max_len: int  # tokens of a row: the prompt, its continuation, and two rounds after them
    sampling: SamplingConfig
    eos_token_ids: tuple[int, ...] = ()  # empty: no token ends a sequence
    engine: EngineConfig = field(default_factory=EngineConfig)
    draft: DraftConfig = field(default_factory=lambda: DraftConfig("none"))
    draft_folder: str | None = None
    cache: CacheConfig = field(default_factory=CacheConfig)  # of the draft
    gamma: int = 0
    # With which the server of units.FREE accepts; None: it measures.
    free_acceptance: float | None = None
    kv_bytes_per_token: int = 0  # of all models, a row
    plugins: Sequence[str] = ()  # modules with choices of the run
    # Of our own server: how it runs the target, and the tokens that it prefills at a time.
    target_choice: ModelChoice | None = None
    prefill_chunk: int | Literal["auto"] = "auto"


@dataclass(frozen=True)
class AcceptanceCounts:
    """Proposed and accepted tokens, over the rounds that proposed any (over all if the engine does
    not say which).
    """

    rounds: int = 0
    proposed: int = 0  # 0: the engine does not count them
    accepted: tuple[int, ...] = ()  # by position: rounds that accepted so many and more
    unplaced: int = 0  # accepted tokens of an engine that does not count them by position

    def __sub__(self, other: "AcceptanceCounts") -> "AcceptanceCounts":
        accepted = tuple(-number for number in other.accepted)
        return self + AcceptanceCounts(-other.rounds, -other.proposed, accepted, -other.unplaced)

    def __add__(self, other: "AcceptanceCounts") -> "AcceptanceCounts":
        pairs = zip_longest(self.accepted, other.accepted, fillvalue=0)
        accepted = tuple(a + b for a, b in pairs)
        proposed = self.proposed + other.proposed
        unplaced = self.unplaced + other.unplaced
        return AcceptanceCounts(self.rounds + other.rounds, proposed, accepted, unplaced)

    def completed(self, after_first: int) -> "AcceptanceCounts":
        """Return the counts of a server that may count rounds alone, as SGLang does: the accepted
        tokens are then known from the tokens behind the first of every answer.
        """
        if not self.rounds or self.proposed or self.num_accepted:
            return self
        return AcceptanceCounts(self.rounds, unplaced=max(0, after_first - self.rounds))

    @property
    def acceptance_length(self) -> float | None:
        """Return the tokens of a round, bonus token included; None where no round is known."""
        return self.num_accepted / self.rounds + 1 if self.rounds else None

    @property
    def num_accepted(self) -> int:
        """Return the accepted tokens."""
        return sum(self.accepted) + self.unplaced

    def metrics(self, gamma: int) -> Metrics:
        """Return the metrics, named as in `metrics.acceptance_metrics`.

        A position counts over all rounds. There is no alpha if some rounds proposed fewer than
        gamma tokens, as prompt lookup does near the end of a match.
        """
        figures: Metrics = {"acceptance_rounds": self.rounds}
        if (length := self.acceptance_length) is None:
            return figures
        figures["acceptance_length"] = length
        if self.proposed:
            figures["acceptance_rate"] = self.num_accepted / self.proposed
        if self.proposed and self.proposed == gamma * self.rounds:
            figures["alpha"] = alpha_from_acceptance_length(length, gamma)
        return figures | {
            f"acceptance_rate/position_{i}": n / self.rounds for i, n in enumerate(self.accepted)
        }


def sum_of_counts(counts: Iterable[AcceptanceCounts | None]) -> AcceptanceCounts | None:
    """Return the counts of all answers; None if one does not tell them."""
    total = AcceptanceCounts()
    for of_answer in counts:
        if of_answer is None:
            return None
        total += of_answer
    return total


@dataclass(frozen=True)
class PeerGeneration:
    """The tokens and times of one pass over a batch."""

    tokens: list[list[int]]  # new tokens per row
    times: list[RowTimes]
    counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)


class OtherEngine(ABC):  # noqa: B024 - its two kinds, below, have abstract methods
    """An engine that is not ours."""

    def __init__(self, spec: PeerSpec):
        self.spec = spec

    @classmethod  # noqa: B027 - most have nothing to check
    def check(cls, config: Config) -> None:
        """Raise UserError for what keeps the engine from running this; `auto` values are
        resolved.
        """

    @classmethod
    def installed(cls, engine: EngineConfig) -> str:
        """Return the packages that a run would use and their versions, as a part of its id."""
        return ""


@dataclass(frozen=True)
class Address:
    """The place of a server with OpenAI's API, and how it is asked."""

    name: str  # for messages, as in engine.url=http://127.0.0.1:8000/v1
    url: str  # as in http://127.0.0.1:8000/v1
    model: str | None = None  # None: the only one that it serves
    api_key: str = field(default="none", repr=False)
    time_limit_s: float = 600.0  # of a request, from its arrival to its last token
    retries: int = 2
    proxied: bool = False  # the proxies of the environment's variables are used
    names_ids: bool = False  # its text is the ids of tokens, as in [17][4]


class Servable(OtherEngine):
    """Another engine under load (scenario=serve): its server, for each way of decoding."""

    in_turns: ClassVar[bool] = False  # the servers of both ways run at the same time
    # A step takes as long as if every slot had a request.
    empty_slots_cost: ClassVar[bool] = False
    names_ids: ClassVar[bool] = False  # see Address

    @property
    def draws_acceptance(self) -> bool:
        """Return whether its server can accept at a given rate."""
        return False

    @property
    @abstractmethod
    def ways(self) -> tuple[str, ...]:
        """Return the ways of decoding; ("",) for a server of which it is not known whether it
        speculates.
        """

    @property
    def has_any_gamma(self) -> bool:
        """Return whether each gamma has a server of its own; otherwise it is the server's."""
        return True

    @property
    def profiled_ways(self) -> tuple[str, ...]:
        """Return the ways of decoding whose steps can be timed: those above, and units.FREE."""
        return self.ways

    @abstractmethod
    def serving(self, way: str) -> AbstractAsyncContextManager[Address]:
        """Return a context manager with the server that decodes in this way."""


class Peer(OtherEngine):
    """Another engine, loaded. A context manager, which closes it."""

    @abstractmethod
    def generate(
        self, prompts: list[list[int]], generate_len: int, speculative: bool, first: int = 0
    ) -> PeerGeneration:
        """Prefill a batch of prompts (token ids) and decode `generate_len` tokens of each,
        speculating or not.

        `first` is the number of prompts before these in the run: rows must not share random
        numbers.
        """

    @property
    @abstractmethod
    def version(self) -> str:
        """Return the engine's name and version, for the results."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """Return the most memory taken so far, in bytes, counted as by memory_use.Peak."""

    def close(self) -> None:
        """Free everything."""

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
