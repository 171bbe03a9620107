"""A server with faults, on a clock that counts the times of its steps instead of seconds.

The scheduler, requests and answers are our server's own. Its slots are replaced: a step takes as
long as the roofline says for the model, the machine and what it achieves, with noise, and proposals
are accepted at random. So a busy machine does not disturb it, and what is wrong is known.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from magicdec.costmodel.round import Setup, round_times
from magicdec.peers import answer
from magicdec.peers.answer import Choice, EndpointRequest, Event
from magicdec.peers.base import AcceptanceCounts
from magicdec.peers.steady import LONGER, Burst, burst_of
from magicdec.scenarios.outside_lines import MeasuredPoint
from magicdec.serving import request as requests
from magicdec.serving.request import Params, Request
from magicdec.serving.scheduler import Scheduler
from magicdec.verification.sampling import Sampling

CHUNK = 2048  # tokens of a prefill between two rounds
NOISE, CELL_NOISE = 0.03, 0.02  # of a step, and of all steps of a batch, context and way
LATE_S = 2e-4  # of a chunk on its way to the client, on average


class Clock:
    """The time, which steps advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now


@dataclass(frozen=True)
class Faults:
    """The faults of a server, each from 0."""

    entry_reads: float = 0.0  # share of the KV cache that is read once more for each proposal
    draft: float = 0.0  # by how much longer draft steps take
    round_waits: float = 0.0  # of a round, as a share of a small decode step
    lost: float = 0.0  # share of alpha


@dataclass(frozen=True)
class Simulated:
    """A server: the model and the machine, and how well it does."""

    setup: Setup
    alpha: float
    faults: Faults = field(default_factory=Faults)
    seed: int = 0

    @cached_property
    def small_step_s(self) -> float:
        """Return the time of a small decode step."""
        return self.setup.at(batch=1, context=1024).target_time.total

    def seconds(self, batch: int, context: float, gamma: int, way: str) -> float:
        """Return the time of a step, or of a round."""
        at = self.setup.at(batch=batch, context=round(context))
        if way == "autoregressive":
            return at.target_time.total
        times = round_times(at, gamma)
        whole = times.verify.total + times.overhead.total
        whole += gamma * self.faults.entry_reads * at.target_time.kv
        whole += self.faults.round_waits * self.small_step_s
        if way == "speculative":
            whole += gamma * (1 + self.faults.draft) * times.draft.total
        return whole


class Slots:
    """The part of magicdec.serving.slots.Slots that the scheduler uses."""

    is_shared = False
    device = torch.device("cpu")
    eos_token_ids = ()

    def __init__(
        self, server: Simulated, way: str, gamma: int, rows: int, clock: Clock, alpha: float
    ):
        self.num_slots, self.gamma, self.gammas, self.max_len = rows, gamma, (gamma,), 1 << 30
        self.batch = SimpleNamespace(draft=None if way == "autoregressive" else object())
        self.engine = SimpleNamespace(prefill_chunk=CHUNK)
        self._server, self._way, self._clock, self._alpha = server, way, clock, alpha
        self._random = random.Random(f"{server.seed} {way} {gamma} {rows}")
        self._lengths: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._cells: dict[int, float] = {}

    def check(self, prompt: Any, params: Params) -> None:
        """Take any request."""

    def prefill(
        self, prompt: list[int], params: Params, speculative: bool, progress: Callable[[int], None]
    ) -> tuple[int, bool]:
        """Let time pass for the chunks of a prompt."""
        for start in range(0, len(prompt), CHUNK):
            size = min(CHUNK, len(prompt) - start)
            self._clock.now += 1e-5 * size
            progress(size)
        self._next = len(prompt) + 1, params.max_tokens - 1
        return 1, False

    def seat(self, slot: int) -> None:
        """Give the prefilled request a slot."""
        self._lengths[slot], self._left[slot] = self._next

    def release(self, slot: int, failed: bool = False) -> None:
        """Free a slot."""
        self._lengths.pop(slot, None)
        self._left.pop(slot, None)

    def step(self, gamma: int | None) -> torch.Tensor:
        """Let time pass for a round, and return its outcome."""
        rows, proposed = len(self._lengths), gamma or 0
        context = sum(self._lengths.values()) / rows
        seconds = self._server.seconds(rows, context, proposed, self._way)
        cell = self._cells.setdefault(rows, self._random.gauss(1, CELL_NOISE))
        self._clock.now += seconds * cell * max(0.5, self._random.gauss(1, NOISE))
        outcome = torch.zeros(self.num_slots, 4 + proposed + 1, dtype=torch.int32)
        for slot in self._lengths:
            accepted = 0
            while accepted < proposed and self._random.random() < self._alpha:
                accepted += 1
            committed = min(accepted + 1, self._left[slot])
            self._lengths[slot] += committed
            self._left[slot] -= committed
            done = self._left[slot] == 0
            outcome[slot, :4] = torch.tensor([accepted, committed, done, 1])
        return outcome


def burst(server: Simulated, point: MeasuredPoint, tokens: int) -> Burst | None:
    """Send a burst as the client does, with longer answers if need be."""
    for max_tokens in (tokens, LONGER * tokens):
        if found := _sent(server, *point, max_tokens):
            return found
    return None


def _sent(
    server: Simulated, way: str, gamma: int, batch: int, context: int, tokens: int
) -> Burst | None:
    clock = Clock()
    with patch.object(answer, "perf_counter", clock), patch.object(requests, "perf_counter", clock):
        return _sent_by(clock, server, way, gamma, batch, context, tokens)


def _sent_by(
    clock: Clock, server: Simulated, way: str, gamma: int, batch: int, context: int, tokens: int
) -> Burst | None:
    alpha = server.alpha * (1 - server.faults.lost)
    slots: Any = Slots(server, way, gamma, batch, clock, alpha)
    scheduler = Scheduler(slots, way != "autoregressive")
    late = random.Random(f"{server.seed} late")
    params = Params(tokens, Sampling(ignore_eos=True))
    pairs = []
    for _ in range(batch):
        received = EndpointRequest([1], params)

        def deliver(chunk: list[int], received: EndpointRequest = received) -> None:
            if chunk:
                now, clock.now = clock.now, clock.now + late.expovariate(1 / LATE_S)
                received.take(Event([Choice(token_ids=[1] * len(chunk))]))
                clock.now = now

        pairs.append((Request([1] * context, params, deliver), received))
        scheduler.submit(pairs[-1][0])
    while not scheduler.idle:
        scheduler.step()
    total = AcceptanceCounts()
    for sent, received in pairs:
        accepted = sum(taken * number for (_, taken), number in sent.rounds.items())
        proposed = sum(size * number for (size, _), number in sent.rounds.items())
        received.counts = AcceptanceCounts(sent.rounds.total(), proposed, unplaced=accepted)
        total += received.counts
    return burst_of([received for _, received in pairs], total)
