"""Servers that a run starts, waits for and ends, whatever happens to either of them."""

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import urllib.request
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, ClassVar

from typing_extensions import override

from magicdec.drafts.ngram import PromptLookup
from magicdec.errors import UserError, exit_in_words
from magicdec.peers.base import Address, PeerSpec, Servable
from magicdec.peers.pipe import TAIL, WorkerFailed, failed
from magicdec.peers.process import StartedEngine
from magicdec.processes import end_program, start_program
from magicdec.units import FREE, WAYS

log = logging.getLogger(__name__)

SUPERVISOR = Path(__file__).with_name("supervisor.py")
SHORT_NGRAM = 2  # of the draft that costs nothing: the text has one in almost every round
POLL_S, END_S = 0.2, 10.0
# Not by the proxies of the environment.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class StartedServer(Servable):
    """An engine whose server is started for one way of decoding after the other."""

    name: ClassVar[str]

    @property
    @override
    def ways(self) -> tuple[str, ...]:
        return WAYS if self.spec.draft.name != "none" else WAYS[:1]

    @property
    @override
    def profiled_ways(self) -> tuple[str, ...]:
        return (*self.ways, FREE)

    @abstractmethod
    def server(self, speculative: bool, port: int) -> list[str]:
        """Return the command that starts the server on a port of this machine."""

    @abstractmethod
    def environment(self) -> dict[str, str]:
        """Return environment variables for the server."""

    @asynccontextmanager
    @override
    async def serving(self, way: str) -> AsyncIterator[Address]:
        assert isinstance(self.spec.engine, StartedEngine)
        port, time_limit_s = free_port(), self.spec.engine.time_limit_s
        name = f"engine.name={self.name}"
        starts = type(self)(self._with_free_draft()) if way == FREE else self
        command = await asyncio.to_thread(starts.server, way != WAYS[0], port)
        async with running(name, command, self.environment(), port, time_limit_s):
            url = f"http://127.0.0.1:{port}/v1"
            yield Address(name, url, time_limit_s=time_limit_s, names_ids=self.names_ids)

    def _with_free_draft(self) -> PeerSpec:
        """Return the settings with a draft that costs next to nothing: it copies from the text."""
        draft = PromptLookup(
            gamma=self.spec.gamma,
            max_ngram=SHORT_NGRAM,
            synthetic_acceptance=self.spec.free_acceptance,
        )
        return replace(self.spec, draft=draft, draft_folder=None)


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """Return options as command line arguments, as in --max-model-len 128; a flag that is false is
    left out.
    """
    arguments = []
    for name, value in options.items():
        if value is False:
            continue
        arguments.append(f"--{name.replace('_', '-')}")
        if value is not True:
            arguments.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return arguments


@asynccontextmanager
async def running(
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    port: int,
    time_limit_s: float,
) -> AsyncIterator[None]:
    """Run a server, from when it answers /health until the block ends. Errors call it by `name`."""
    with tempfile.TemporaryFile() as output:
        process = start_program(
            [sys.executable, "-I", str(SUPERVISOR), *command],
            environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            try:
                async with asyncio.timeout(time_limit_s):
                    while process.poll() is None and not await asyncio.to_thread(_is_healthy, port):
                        await asyncio.sleep(POLL_S)
            except TimeoutError:
                limit = f"engine.time_limit_s={time_limit_s:g}"
                fault = f"did not answer /health within {limit} seconds"
                raise _failure(name, fault, output) from None
            if process.poll() is None:
                yield
        except UserError as error:
            if process.poll() is None:  # what it has said may name the cause
                log.info(
                    "the server's output ends with:\n%s", _end_of(output).decode(errors="replace")
                )
                raise
            raise _failure(name, f"ended ({exit_in_words(process.returncode)})", output) from error
        finally:
            ended = process.poll()
            end_program(process, END_S)  # the supervisor, which ends the server
        if ended is not None:
            raise _failure(name, f"ended ({exit_in_words(ended)})", output)


def _is_healthy(port: int) -> bool:
    with suppress(OSError), DIRECT.open(f"http://127.0.0.1:{port}/health", timeout=5) as response:
        return response.status == 200
    return False


def _failure(name: str, what: str, output: IO[bytes]) -> WorkerFailed:
    return failed(f"{name}: the server {what}", _end_of(output))


def _end_of(output: IO[bytes]) -> bytes:
    output.seek(max(0, output.seek(0, os.SEEK_END) - TAIL))
    return output.read()
