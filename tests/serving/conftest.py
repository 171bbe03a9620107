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
from magicdec.http.uvicorn_server import Server
from magicdec.planning import build
from magicdec.planning.resolve import resolve
from magicdec.serving.engine import AsyncEngine
from magicdec.serving.scheduler import Scheduler
from magicdec.serving.slots import Slots
from magicdec.tracking.progress import progress

SETTINGS = ["scenario=serve", "hardware=cpu"]
SETTINGS += ["draft.gamma=3", "cache.budget=32", "batch.prefill_chunk=32"]


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


@contextmanager
def serving(parts, num_slots: int, max_len: int, speculative: bool = True, tokenizer=None):
    """A server of the bundled model, and its address."""
    engine = AsyncEngine(Scheduler(Slots(parts[0], num_slots, max_len), speculative))
    with listening(http.create_app(engine, tokenizer or parts[1], "tiny"), engine, grace_s=0) as (
        _,
        port,
    ):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def anyio_backend():
    """Asynchronous tests, marked `anyio`, run on asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def parts():
    """The engine's own parts, and the bundled model's tokenizer."""
    plan = resolve(compose(SETTINGS))
    with progress() as bars:
        return build.engine(plan, bars), load_tokenizer(plan.target.folder)


@pytest.fixture(scope="module")
def client(parts):
    with serving(parts, 2, 2048) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client
