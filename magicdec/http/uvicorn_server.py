"""uvicorn's server with limits on connections and slow requests, and a shutdown that waits for
running answers.
"""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import uvicorn
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from magicdec.errors import UserError, to_stderr
from magicdec.serving.engine import AsyncEngine

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

HEAD_S = 10.0  # limit on the arrival of a request's head
CLOSE_S = 5  # for clients to read the end of their answers
MOST_DESCRIPTORS = 1 << 16
AT_ONCE = 4  # connections accepted in a turn of the event loop
# Connections that the system keeps until they are accepted: they have no descriptor yet.
QUEUE = 2048


class Connection(H11Protocol):
    """Connection that is closed if it waits too long for a request, or waits longest when there are
    too many.

    Slow and silent clients can neither keep their descriptors nor lock others out.
    """

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Open the connection. If there are too many, close the one that has waited longest,
        perhaps this one.
        """
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEAD_S, self._give_up)
        if self.limit_concurrency and len(self.connections) >= self.limit_concurrency:
            waiting = [
                connection
                for connection in cast(set[Connection], self.connections)
                if connection._waits
            ]
            min(waiting, key=lambda connection: connection._deadline.when())._give_up()

    @override
    def on_response_complete(self) -> None:
        """Start the time limit of the next request."""
        self._deadline.cancel()
        self._deadline = self.loop.call_later(HEAD_S, self._give_up)
        super().on_response_complete()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)

    @property
    def _waits(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _give_up(self) -> None:
        if self._waits:
            self.connections.discard(self)
            self.transport.abort()


def bound(host: str, port: int) -> socket.socket:
    """Return a socket at an address, which does not listen yet. Raise UserError for one that cannot
    be had.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UserError(f"--host={host} --port={port}: {error.strerror or error}") from None
    return listener


class Server(uvicorn.Server):
    """An engine's server. Its shutdown, by Ctrl-C or SIGTERM, waits up to `grace_s` for running
    answers.
    """

    def __init__(
        self,
        app: Any,
        engine: AsyncEngine,
        host: str,
        port: int,
        grace_s: int,
        greeting: Callable[[str], list[str]],
    ):
        """Take `greeting`, which returns the lines to print for the address that the server listens
        at.
        """
        settings = uvicorn.Config(
            app,
            host,
            port,
            http=Connection,
            ws="none",
            limit_concurrency=most_connections(),
            backlog=AT_ONCE,
            timeout_graceful_shutdown=grace_s + CLOSE_S,
        )
        super().__init__(settings)
        self._engine = engine
        self._grace_s, self._greeting = grace_s, greeting

    @override
    def run(self, sockets: Any = None) -> None:
        """Serve until Ctrl-C or SIGTERM, which uvicorn raises again at the end: neither is an
        error.
        """
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with suppress(KeyboardInterrupt):
                super().run(sockets)
        finally:
            signal.signal(signal.SIGTERM, before)

    @override
    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        for listener in self.servers[0].sockets:
            with socket.socket(fileno=os.dup(listener.fileno())) as same:
                same.listen(QUEUE)
        host = self.config.host
        port = self.servers[0].sockets[0].getsockname()[1]
        for line in self._greeting(f"http://{f'[{host}]' if ':' in host else host}:{port}"):
            to_stderr(line)

    @override
    async def shutdown(self, sockets: Any = None) -> None:
        """Wait for running answers. After the grace period, close the engine, which ends them."""
        closing = asyncio.create_task(self._close_engine())
        await super().shutdown(sockets)
        closing.cancel()

    async def _close_engine(self) -> None:
        end = time.monotonic() + self._grace_s
        while time.monotonic() < end and not self.force_exit:  # by a second Ctrl-C
            await asyncio.sleep(0.1)
        self._engine.close()


def most_connections() -> int:
    """Return the limit on open connections: half of the free descriptors. Raise UserError if there
    are too few.

    A connection beyond the limit is first accepted, and closed two turns of the event loop later.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if resource else -1
    used = len(os.listdir("/dev/fd")) if os.path.isdir("/dev/fd") else 0
    free = (most if 0 <= most < MOST_DESCRIPTORS else MOST_DESCRIPTORS) - used
    if free < 8 * AT_ONCE:
        raise UserError(
            f"ulimit -n={most}: a server needs at least {used + 8 * AT_ONCE} open files"
        )
    return free // 2
