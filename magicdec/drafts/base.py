"""The interface of a draft: whatever proposes tokens. To add one, subclass Draft in a file here and register it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from magicdec.decoding.state import State
from magicdec.registry import Registry


class Proposal(NamedTuple):
    """gamma tokens a row (B, G), and the distributions (B, G, V) they were drawn from; None where not sampled."""

    tokens_BG: Tensor
    q_BGV: Tensor | None


class Draft(ABC):
    """Proposes gamma tokens a round. Everything but `prefill` is free of host synchronisation."""

    gamma: int

    @abstractmethod
    def prefill(self, state: State, progress: Callable[[int], None]) -> None:
        """Get ready to continue the prompts; `progress` is told of every prompt token a row has advanced."""

    def simulate_prefill(self, state: State) -> None:
        """Stand where `prefill` would leave it, with entries that mean nothing: for timing alone."""
        self.prefill(state, lambda _: None)

    @abstractmethod
    def propose(self, state: State) -> Proposal:
        """Guess the next gamma tokens of every row."""

    @abstractmethod
    def commit(self, count_B: Tensor) -> None:
        """Learn that each row took `count_B` <= gamma + 1 tokens: accepted proposals, then the bonus token."""

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """Bytes of KV cache beyond the target's."""


DRAFTS: Registry[type[Draft]] = Registry("magicdec.drafts", "draft.name")
