"""What a peer is: another engine that decodes the same prompts, so that it can be measured as ours is."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from itertools import zip_longest

from magicdec.costmodel.speedup import alpha_from_acceptance_length
from magicdec.measure.metrics import Metrics, RowTimes
from magicdec.verification.sampling import Sampling


@dataclass(frozen=True)
class PeerSpec:
    """What any peer is built from."""

    target: str  # a folder, as all models here
    dtype: str  # float32 and so on
    device: str  # cpu or cuda
    num_rows: int  # of a batch
    max_len: int  # of a row with its new tokens and what a round may write behind them
    sampling: Sampling
    eos_token_ids: tuple[int, ...] = ()  # empty: no token ends a sequence
    draft_name: str = "none"
    draft: str | None = None  # of draft=model
    gamma: int = 0
    max_ngram: int = 0
    num_layers: int = 0  # of draft=layer_skip
    compile: bool = False
    graphs: bool = False


@dataclass(frozen=True)
class Counts:
    """What became of proposals, over rounds that had any."""

    rounds: int = 0
    proposed: int = 0
    accepted: tuple[int, ...] = ()  # by position: rounds that accepted so many and more

    def __add__(self, other: "Counts") -> "Counts":
        pairs = zip_longest(self.accepted, other.accepted, fillvalue=0)
        return Counts(self.rounds + other.rounds, self.proposed + other.proposed, tuple(a + b for a, b in pairs))

    def metrics(self, gamma: int) -> Metrics:
        """As `metrics.acceptance_metrics` names them. Where fewer than gamma were proposed, as prompt lookup does near
        the end of what it has found, an alpha would mean nothing, and a position counts over all rounds.
        """
        found: Metrics = {"acceptance_rounds": self.rounds}
        if not self.rounds:
            return found
        length = sum(self.accepted) / self.rounds + 1
        found |= {"acceptance_rate": sum(self.accepted) / self.proposed, "acceptance_length": length}
        if self.proposed == gamma * self.rounds:
            found["alpha"] = alpha_from_acceptance_length(length, gamma)
        return found | {f"acceptance_rate/position_{i}": n / self.rounds for i, n in enumerate(self.accepted)}


@dataclass(frozen=True)
class PeerGeneration:
    """What one pass over a batch produced, and when."""

    tokens: list[list[int]]  # new tokens per row
    times: list[RowTimes]
    counts: Counts = field(default_factory=Counts)


class Peer(ABC):
    """Another engine, loaded; to be closed in the end, as a context manager is."""

    @abstractmethod
    def generate(
        self, prompts: list[list[int]], generate_len: int, speculative: bool, first: int = 0
    ) -> PeerGeneration:
        """Prefill a batch of prompts (token ids) and decode `generate_len` tokens of each, speculating or not.

        `first` counts the prompts of the run before these, which must not share their random numbers.
        """

    @property
    @abstractmethod
    def version(self) -> str:
        """Its name and version, for the results."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """The most memory that it has taken, as memory.Peak counts."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Let go of everything."""

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
