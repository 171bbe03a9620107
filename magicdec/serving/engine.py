"""The asynchronous engine: `async for tokens in engine.generate(prompt, params)`, any number of
requests at once.

The scheduler runs on a thread of its own, so that the event loop is free while the device computes.
Requests reach it through a queue; tokens come back as callbacks of the event loop of each request.
"""

import asyncio
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

from magicdec.serving.request import Params, Request, Stats
from magicdec.serving.scheduler import Scheduler

log = logging.getLogger(__name__)


class Stream:
    """The tokens of one request, those of a round together. Deleting the stream cancels the
    request, as `cancel` does.

    Iterating raises RuntimeError if the request has failed, from its error.
    """

    def __init__(self, prompt: Sequence[int], params: Params, loop: asyncio.AbstractEventLoop):
        self._chunks: asyncio.Queue[list[int]] = asyncio.Queue()
        # Without a reference to the stream, or the stream would never be deleted.
        self.request = Request(prompt, params, partial(_deliver, loop, self._chunks))

    def cancel(self) -> None:
        """End the request: no token follows, and its slot is free before the next round."""
        self.request.cancelled = True
        self._chunks.put_nowait([])

    @property
    def stats(self) -> Stats:
        """Times, tokens and acceptance so far."""
        return self.request.stats

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> list[int]:
        chunk = [] if self.request.cancelled else await self._chunks.get()
        if chunk:
            return chunk
        self._chunks.put_nowait([])  # for the next call
        if self.request.error is not None:
            raise RuntimeError("the request has failed") from self.request.error
        raise StopAsyncIteration

    def __del__(self) -> None:
        self.request.cancelled = True


def _deliver(
    loop: asyncio.AbstractEventLoop, chunks: asyncio.Queue[list[int]], tokens: list[int]
) -> None:
    """Pass tokens from the scheduler's thread to the event loop, unless that is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(chunks.put_nowait, tokens)


class AsyncEngine:
    """A scheduler on a thread of its own, as an asynchronous context manager."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.error: BaseException | None = None
        self._inbox: SimpleQueue[Request | None] = SimpleQueue()  # None wakes the thread up
        self._entry = threading.Lock()  # no request enters while the thread ends the last ones
        self._thread = threading.Thread(target=self._run, name="magicdec-scheduler", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Close, and wait for the end of the thread."""
        self.close()
        if threading.current_thread() is not self._thread:  # whose garbage collection may call this
            self._thread.join()

    async def __aenter__(self) -> "AsyncEngine":
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop, without blocking the event loop."""
        await asyncio.to_thread(self.stop)

    def close(self) -> None:
        """Refuse new requests, and cancel the others after the current chunk or round."""
        with self._entry:
            self.scheduler.closing = True
        self._inbox.put(None)

    def generate(self, prompt: Sequence[int], params: Params | None = None) -> Stream:
        """Queue a prompt (token ids). Raise UserError, at once, for one that cannot be served, such
        as one that is too long; raise RuntimeError if the engine is closed or has failed.
        """
        stream = Stream(prompt, params or Params(), asyncio.get_running_loop())
        self.submit(stream.request)
        return stream

    def submit(self, request: Request) -> None:
        """Queue a request, from any thread. Raise the same errors as `generate`."""
        self.scheduler.slots.check(request.prompt, request.params)
        with self._entry:
            if self.scheduler.closing:
                raise RuntimeError("the engine is closed") from self.error
            self._inbox.put(request)

    @property
    def is_open(self) -> bool:
        """True while the engine takes requests."""
        return self._thread.is_alive() and not self.scheduler.closing

    @property
    def max_len(self) -> int:
        """The largest number of tokens of a request, prompt and continuation."""
        return self.scheduler.slots.max_len

    @property
    def num_running(self) -> int:
        """The number of requests that have a slot."""
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """The number of requests without a slot."""
        return len(self.scheduler.waiting) + self._inbox.qsize()

    def _run(self) -> None:
        try:
            while not self.scheduler.closing:
                self._receive()
                self.scheduler.step()
            self._finish("cancelled")
        except BaseException as error:
            log.exception("the engine has failed")
            self.error = error
            self._finish("failed", error)

    def _receive(self) -> None:
        """Queue the requests that have arrived; wait for one if there is no other work."""
        try:
            while True:
                request = self._inbox.get(block=self.scheduler.idle and not self.scheduler.closing)
                if request is not None:  # which `submit` has checked
                    self.scheduler.waiting.append(request)
        except Empty:
            pass

    def _finish(self, end: str, error: BaseException | None = None) -> None:
        with self._entry:
            self.scheduler.closing = True
        self._receive()
        self.scheduler.end_all(end, error)
