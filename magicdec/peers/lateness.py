"""The lateness of a client of servers, by which the times that it measures are wrong."""

import asyncio
from collections.abc import Sequence
from statistics import fmean
from time import perf_counter

from magicdec.errors import to_stderr
from magicdec.serving.request import Request

BEAT_S = 0.01  # between two looks at the clock
# A client is late by more than this share of the time from one chunk to the next, and than the
# resolution of timers.
LATE, LEAST_LATE_MS = 0.25, 1.0


class Lateness:
    """An asynchronous context manager that measures by how much the event loop is late on average:
    for a time that was asked for, and so for a chunk that has arrived.
    """

    def __init__(self) -> None:
        self._delays_s: list[float] = []

    async def __aenter__(self) -> "Lateness":
        self._task = asyncio.create_task(self._keep_time())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _keep_time(self) -> None:
        while True:
            begin = perf_counter()
            await asyncio.sleep(BEAT_S)
            self._delays_s.append(perf_counter() - begin - BEAT_S)

    @property
    def ms(self) -> float:
        """Return the mean lateness in milliseconds."""
        return 1e3 * fmean(self._delays_s) if self._delays_s else 0.0

    def is_too_late(self, requests: Sequence[Request]) -> bool:
        """Return whether chunks wait for the client for much of the time from one to the next."""
        waits_s = [wait_s for request in requests for wait_s in request.stats.inter_chunk_s]
        return bool(waits_s) and self.ms > max(LEAST_LATE_MS, LATE * 1e3 * fmean(waits_s))

    def check(self, requests: Sequence[Request], where: str, at_once: float | None) -> None:
        """Warn where the client is too late. `at_once` are the requests that are out at a time;
        None: as many as arrive.
        """
        if self.is_too_late(requests):
            to_stderr(f"warning: {where}: {late_by(self.ms, is_single=at_once == 1)}")


def late_by(mean_ms: float, is_single: bool) -> str:
    """Return what a late client should do. With a single request out, no load makes it late."""
    remedy = "it, or its machine, is too busy; send less load"
    if is_single:
        remedy = "the machine is too busy for these times: stop other work"
    return f"this client was late by {mean_ms:.1f} ms on average, and so are its times; {remedy}"
