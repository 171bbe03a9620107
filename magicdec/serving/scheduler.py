"""The scheduler: which requests wait, which have a slot, and what is done next. One thread, no
network.

A free slot takes the request that has waited longest. Its prompt is prefilled in chunks; the
running requests get a round after one chunk for every free slot. So empty slots are filled quickly,
and the fuller the slots are, the less the running requests wait (chunked prefills: Sarathi-Serve,
arXiv 2403.02310).
"""

import logging
import time
from collections import deque
from functools import partial

import torch
from torch import Tensor

from magicdec.decoding.state import INACTIVE
from magicdec.errors import NonFinite
from magicdec.serving.gamma import Chooser
from magicdec.serving.request import Request
from magicdec.serving.slots import Abandoned, Slots

log = logging.getLogger(__name__)


class Scheduler:
    """Continuous batching over `slots`, speculative or autoregressive."""

    def __init__(self, slots: Slots, speculative: bool = True):
        """Without a draft, `speculative` has no effect."""
        self.slots = slots
        self.speculative = speculative and slots.batch.draft is not None
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}  # by slot
        self.closing = False  # any thread may set it: a prefill ends at its next chunk
        self._prefilled = 0  # tokens since the last round, while others were running
        self._chooser = (
            Chooser(slots.gammas) if self.speculative and len(slots.gammas) > 1 else None
        )
        self._unread: deque[tuple[dict[int, Request], int | None, _Reading]] = deque()
        # On a GPU the host reads a round's outcome while the next round runs: at most one round too
        # many.
        self._lag = 1 if slots.device.type == "cuda" else 0

    def submit(self, request: Request) -> None:
        """Queue a request. Raise UserError if it cannot be served."""
        self.slots.check(request.prompt, request.params)
        self.waiting.append(request)

    @property
    def idle(self) -> bool:
        """True if there is nothing to do."""
        return not (self.waiting or self.running)

    def step(self) -> None:
        """Prefill the next request if a slot is free; otherwise run a round."""
        self._drop_cancelled()
        if self.waiting and self._num_free:
            self._admit(self.waiting[0])
        elif self.running:
            self._round()

    def end_all(self, end: str, error: BaseException | None = None) -> None:
        """End every request with its tokens so far; after an error without the device, which may
        have failed.
        """
        for request in [*self.running.values(), *self.waiting]:
            request.finish(end, error)
        self.waiting.clear()
        if error is not None:
            self.running.clear()
        for slot in list(self.running):
            self._free(slot)

    def _admit(self, request: Request) -> None:
        """Prefill the first waiting request and seat it. If that fails, only this request fails,
        unless its slot cannot be cleared.
        """
        slot = next(slot for slot in range(self.slots.num_slots) if slot not in self.running)
        try:
            token, finished = self.slots.prefill(
                request.prompt,
                request.params,
                self.speculative,
                partial(self._after_chunk, request),
            )
            if not finished:
                self.slots.seat(slot)
        except Abandoned as abandoned:
            if (error := abandoned.__cause__) is not None:
                raise error from error.__cause__
        except Exception as error:
            if self.slots.is_shared:
                raise
            log.exception("a request has failed")
            self.waiting.popleft()
            request.finish("failed", error)
            self.slots.release(slot)
        else:
            if not finished:
                self.running[slot] = request
            self.waiting.popleft()
            request.receive([token])
            if finished:
                request.finish(self._end(request))

    def _after_chunk(self, request: Request, count: int) -> None:
        """Run a round if one is due. Raise Abandoned if that fails, or to end this prefill."""
        try:
            self._drop_cancelled()
            if self.running and not request.cancelled:
                self._prefilled += count
                if self._prefilled >= self.slots.engine.prefill_chunk * self._num_free:
                    self._round()
        except Exception as error:
            raise Abandoned from error
        if request.cancelled or self.closing:
            raise Abandoned

    @property
    def _num_free(self) -> int:
        return self.slots.num_slots - len(self.running)

    def _round(self) -> None:
        self._prefilled = 0
        gamma = self.slots.gamma if self.speculative else None
        if self._chooser:
            gamma = self._chooser.choose(len(self.running))
        reading = _Reading(self.slots.device)
        reading.end(self.slots.step(gamma))
        self._unread.append((dict(self.running), gamma, reading))
        if len(self._unread) > self._lag:
            self._read(*self._unread.popleft())

    def _read(self, tenants: dict[int, Request], gamma: int | None, reading: "_Reading") -> None:
        """Give each request its tokens of a round. `tenants` had the slots then; some may have
        ended.
        """
        rows = reading.rows()
        if self._chooser and gamma is not None:
            # Where the host reads a round late, some had finished before it, and rested.
            accepted_counts = [rows[slot][0] for slot in tenants if rows[slot][0] != INACTIVE]
            if accepted_counts:
                self._chooser.learn(gamma, reading.seconds, accepted_counts)
        for slot, request in tenants.items():
            if request.end is not None:
                continue
            accepted, committed, finished, finite, *recent = rows[slot]
            if not finite:
                self._free(slot, failed=True)
                request.finish(
                    "failed", NonFinite("the logits of this request are NaN or infinite")
                )
                continue
            if gamma is not None:
                limit = request.params.gamma
                request.count_round(
                    gamma if limit is None else min(gamma, limit), accepted, committed
                )
            request.receive(recent[len(recent) - committed :])
            if finished:
                self._free(slot)
                request.finish(self._end(request))

    def _drop_cancelled(self) -> None:
        for slot, request in list(self.running.items()):
            if request.cancelled:
                self._free(slot)
                request.finish("cancelled")
        gone = {request for request in self.waiting if request.cancelled}
        if gone:
            self.waiting = deque(request for request in self.waiting if request not in gone)
        for request in gone:
            request.finish("cancelled")

    def _free(self, slot: int, failed: bool = False) -> None:
        self.slots.release(slot, failed)
        del self.running[slot]

    def _end(self, request: Request) -> str:
        stopped = (
            not request.params.sampling.ignore_eos
            and request.tokens[-1] in self.slots.eos_token_ids
        )
        return "stop" if stopped else "length"


class _Reading:
    """A round's outcome whose copy to the host starts when the round ends and is read later, and
    the round's time.
    """

    def __init__(self, device: torch.device):
        """Begin the round."""
        self._events = (
            [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            if device.type == "cuda"
            else []
        )
        self._began = time.perf_counter()
        if self._events:
            self._events[0].record()

    def end(self, tensor: Tensor) -> None:
        """End the round, of which this is the outcome."""
        self._tensor = tensor
        self.seconds = time.perf_counter() - self._began
        if self._events:
            self._events[1].record()
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._events[2].record()

    def rows(self) -> list[list[int]]:
        """Wait for the outcome and return it. `seconds` are those of the round from now on."""
        if self._events:
            self._events[2].synchronize()
            self.seconds = self._events[0].elapsed_time(self._events[1]) / 1e3
        return self._tensor.tolist()
