"""A server of the bundled model on a port of this machine, and a client of it."""

import asyncio
import threading
import time
from contextlib import contextmanager

import httpx
import pytest

from magicdec.config.load import compose
from magicdec.data.tokenizer import load_tokenizer
from magicdec.http import app as http
from magicdec.http.server import Server
from magicdec.planning import build
from magicdec.planning.resolve import resolve
from magicdec.serving.engine import AsyncEngine
from magicdec.serving.scheduler import Scheduler
from magicdec.serving.slots import Slots
from magicdec.tracking.progress import progress

SETTINGS = [
    "scenario=serve",
    "hardware=cpu",
    "attention=sdpa",
    "draft.gamma=3",
    "cache.budget=32",
    "batch.prefill_chunk=32",
]


@contextmanager
def listening(app, engine, grace_s: int = 20):
    """A server on a thread, and its port."""
    server = Server(app, engine, "127.0.0.1", 0, grace_s, lambda url: [url])
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server, server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def parts():
    """The engine's own parts, and the bundled model's tokenizer."""
    plan = resolve(compose(SETTINGS))
    with progress() as bars:
        return build.engine(plan, bars), load_tokenizer(plan.target.folder)


@pytest.fixture(scope="module")
def client(parts):
    engine = AsyncEngine(Scheduler(Slots(parts[0], 2, 2048)))
    app = http.create_app(engine, parts[1], "tiny")
    with (
        listening(app, engine, grace_s=0) as (_, port),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        yield client
