"""The server around the app: limits of connections and of time, an end that waits, and requests
that are none.
"""

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.commands import serve
from magicdec.errors import UserError
from magicdec.http import uvicorn_server
from tests.programs import ROOT
from tests.serving.conftest import SETTINGS, listening

MOST = 8  # connections


class Engine:
    """An engine and the app in one: the answer of /slow ends when it is closed, or `opened` is
    set.
    """

    def __init__(self):
        self.opened, self.closed = threading.Event(), threading.Event()

    def close(self):
        self.closed.set()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            for state in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{state}.complete"})
            return
        await send({"type": "http.response.start", "status": 200})
        while scope["path"] == "/slow" and not (self.opened.is_set() or self.closed.is_set()):
            await send({"type": "http.response.body", "body": b".", "more_body": True})
            await uvicorn_server.asyncio.sleep(0.02)
        await send(
            {"type": "http.response.body", "body": b"closed" if self.closed.is_set() else b"done"}
        )


@pytest.fixture
def small(monkeypatch):
    """A server for few connections and half a second for the head of a request."""
    monkeypatch.setattr(uvicorn_server, "most_connections", lambda: MOST)
    monkeypatch.setattr(uvicorn_server, "HEAD_S", 0.5)
    engine = Engine()
    with listening(engine, engine) as (server, port):
        yield server, port, engine
        engine.opened.set()


def sent(port: int, content: bytes) -> socket.socket:
    """Connect and send some bytes."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    connection.sendall(content)
    return connection


def rest(connection: socket.socket) -> bytes:
    """Read until the server closes the connection; it may do so before it has read everything."""
    found = b""
    with connection, contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            found += part
    return found


ASKED = b"GET /slow HTTP/1.1\r\nhost: a\r\n\r\n"


def test_slow_heads_keep_nobody_out(small):
    server, port, engine = small
    running = sent(port, ASKED)
    assert running.recv(12) == b"HTTP/1.1 200"
    start, slow = time.monotonic(), [sent(port, b"GET / HT") for _ in range(5 * MOST)]
    for _ in range(3):
        assert httpx.get(f"http://127.0.0.1:{port}/").text == "done"
        assert len(server.server_state.connections) < MOST
    assert time.monotonic() - start < 5
    assert [rest(one) for one in slow] == [b""] * len(slow)
    engine.opened.set()
    assert b"done" in rest(running)


@pytest.mark.parametrize("before", [b"", b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"])
def test_a_head_in_drops_is_cut_off(small, before):
    """The first request of a connection, or a later one."""
    _, port, _ = small
    connection, start = sent(port, before), time.monotonic()
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < start + 10:
            connection.sendall(
                b"GET / HTTP/1.1\r\na: b"[: 1 + int(time.monotonic() - start < 0.05)]
            )
            time.sleep(0.05)
    assert 0.4 < time.monotonic() - start < 5


def test_where_all_are_busy_the_newest_is_closed(small):
    _, port, engine = small
    running = [sent(port, ASKED) for _ in range(MOST - 1)]
    assert [one.recv(12) for one in running] == [b"HTTP/1.1 200"] * len(running)
    assert rest(sent(port, b"")) == b""
    engine.opened.set()
    assert all(b"done" in rest(one) for one in running)


@pytest.mark.parametrize(("grace_s", "end"), [(20, b"done"), (1, b"closed")])
def test_the_end_waits_for_answers_up_to_the_grace(monkeypatch, grace_s, end):
    engine = Engine()
    with listening(engine, engine, grace_s) as (server, port):
        running, idle = sent(port, ASKED), sent(port, b"")
        assert running.recv(12) == b"HTTP/1.1 200"
        server.should_exit = True
        assert rest(idle) == b""
        with pytest.raises(ConnectionRefusedError):
            sent(port, b"")
        if end == b"done":
            engine.opened.set()
        assert end in rest(running)


@pytest.mark.parametrize(
    ("soft", "used", "found"), [(1024, 24, 500), (100, 20, 40), (-1, 0, 32768)]
)
def test_connections_leave_descriptors(monkeypatch, soft, used, found):
    monkeypatch.setattr(uvicorn_server.resource, "getrlimit", lambda _: (soft, -1))
    monkeypatch.setattr(uvicorn_server.os, "listdir", lambda _: [""] * used)
    assert uvicorn_server.most_connections() == found
    monkeypatch.setattr(uvicorn_server.resource, "getrlimit", lambda _: (used + 31, -1))
    with pytest.raises(
        UserError, match=f"ulimit -n={used + 31}: a server needs at least {used + 32} open files"
    ):
        uvicorn_server.most_connections()


@pytest.mark.slow
def test_a_server_with_few_descriptors_under_load_and_its_end():
    """Read what it prints first, send slow heads up to its limit, and SIGTERM while it answers."""

    def limited():
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))

    command = [sys.executable, "-m", "magicdec", "serve", *SETTINGS, "batch.size=2", "--port=0"]
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=limited
    )
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "curl" in line:
            break
    told = "".join(lines)
    first = r"^tiny at http://127.0.0.1:\d+: 2 slots of [\d,]+ tokens; 256 more requests may wait$"
    assert re.search(first, told, re.M)
    port = int(re.search(r":(\d+)/v1/completions", lines[-1])[1])
    example = subprocess.run(lines[-1], shell=True, capture_output=True, text=True)
    assert '"text":' in example.stdout
    slow = [sent(port, b"GET / HT") for _ in range(150)]
    asked = {"model": "tiny", "prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", f"http://127.0.0.1:{port}/v1/completions", json=asked, timeout=60
    ) as response:
        events = response.iter_lines()
        next(events)
        assert len(os.listdir(f"/proc/{process.pid}/fd")) < 95
        process.send_signal(signal.SIGTERM)
        assert [line for line in events if line][-1] == "data: [DONE]"
    assert process.wait(30) == 0
    said = process.stderr.read()
    assert len(said) < 2000, said
    assert "Traceback" not in said
    for one in slow:
        one.close()


def test_no_redirect(client):
    for path in ("/v1/models/", "/health/"):
        answer = client.get(path, headers={"host": "elsewhere"})
        assert (answer.status_code, answer.headers.get("location")) == (404, None)


POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
BODY = b'{"model": "tiny", "prompt": "a", "max_tokens": 1}'
WHOLE = POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
RAW = [
    b"",
    b"\r\n" * 100,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # TLS
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /" + b"a" * 100_000,
    b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
    b"GET /%00%ff%0d%0a HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET http://[::1 HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: \xff\x00\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: a\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n",
    POST + b"content-length: -1\r\n\r\n" + BODY,
    POST + b"content-length: 99999999999999999999999\r\n\r\n" + BODY,
    POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\n" + BODY,
    POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    POST + b"transfer-encoding: chunked\r\n\r\n1;" + b"a" * 100_000,
    POST + b"transfer-encoding: gzip\r\n\r\n" + BODY,
    POST + b"expect: 100-continue\r\ncontent-length: 7\r\n\r\n",
    WHOLE * 5,
    WHOLE + b"GET /",
]


def check_raw(client: httpx.Client, content: bytes) -> None:
    """Whatever bytes arrive, the server answers or closes, and goes on."""
    connection = socket.create_connection(("127.0.0.1", client.base_url.port), timeout=20)
    with contextlib.suppress(ConnectionError, OSError):
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
    found = rest(connection)
    assert found == b"" or re.match(rb"HTTP/1.1 (100|200|4\d\d) ", found), found
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("number", range(len(RAW)))
def test_raw_requests(client, number):
    check_raw(client, RAW[number])


def test_no_bytes_harm_the_server(client):
    """A request in which some bytes are replaced, and which may end early."""

    @settings(max_examples=60)
    @given(
        st.lists(
            st.tuples(st.integers(0, len(WHOLE)), st.integers(0, 8), st.binary(max_size=8)),
            max_size=4,
        ),
        st.integers(0, len(WHOLE)),
    )
    def fuzz(changes, end):
        content = WHOLE[:end] if end % 2 else WHOLE
        for at, length, put in changes:
            content = content[:at] + put + content[at + length :]
        check_raw(client, content)

    fuzz()
    assert (
        client.post(
            "/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 1}
        ).status_code
        == 200
    )


def test_a_port_that_is_taken_is_a_mistake_before_weights_are_loaded(monkeypatch, capsys):
    monkeypatch.setattr("magicdec.commands.serve.served", lambda *_: pytest.fail("loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve.main(["target=tiny", f"--port={port}"]) == 2
    assert capsys.readouterr().err == (
        f"error: --host=127.0.0.1 --port={port}: Address already in use\n"
    )
