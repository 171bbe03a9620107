"""A worker's process behind a pipe: one line of JSON answers another, and every failure becomes a
one-line error.
"""

import json
import logging
import os
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from magicdec.errors import UserError, exit_in_words, in_brief
from magicdec.inputs.rules import parse
from magicdec.processes import end_program, start_program

log = logging.getLogger(__name__)

TAIL = 4000  # bytes of its stderr that are kept
ANSWER_BYTES = 1 << 28  # of the longest answer
EXIT_S = 5.0
T = TypeVar("T")


class ImportFailed(Exception):
    """An engine that the worker cannot import."""


class WorkerFailed(UserError):
    """A worker that ended, did not answer in time or broke the protocol. The message ends with its
    last words.
    """

    kind = "crashed"


class WorkerProcess:
    """A worker's process, which answers each line of JSON with another within the time limit."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], time_limit_s: float
    ):
        """Start it. Errors call it by `name`; the variables of `environment` are added to ours."""
        self._name, self._time_limit_s = name, time_limit_s
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self._process = start_program(command, environment, **pipes)
        # None ends the thread.
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()  # b"": its output has ended
        self._stderr_end = b""  # the end of its stderr
        # On threads: neither a worker that reads nothing nor one that writes nothing, or too much,
        # may block this one.
        threading.Thread(target=self._talk, daemon=True).start()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _talk(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError), self._process.stdout as answers, self._process.stdin as requests:
            while (request := self._requests.get()) is not None:
                with suppress(OSError):  # it has ended; what it wrote before may say why
                    requests.write(request)
                    requests.flush()
                self._answers.put(answers.readline(ANSWER_BYTES))

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stderr:
            while piece := os.read(stderr.fileno(), 1 << 16):
                self._stderr_end = (self._stderr_end + piece)[-TAIL:]

    def ask(self, request: Mapping[str, Any], kind: type[T]) -> T:
        """Return the answer as a typed object. Raise WorkerFailed if there is none, and
        ImportFailed if the engine cannot be imported.
        """
        try:
            self._requests.put((json.dumps(request) + "\n").encode())
            try:
                line = self._answers.get(timeout=self._time_limit_s)
            except queue.Empty:
                limit = f"engine.time_limit_s={self._time_limit_s:g}"
                raise self.failure(f"gave no answer within {limit} seconds") from None
            return self._answer(line, kind)
        except BaseException:  # an interrupt, too
            self.close()
            raise

    def _answer(self, line: bytes, kind: type[T]) -> T:
        if not line:
            try:
                how = exit_in_words(self._process.wait(EXIT_S))
            except subprocess.TimeoutExpired:
                how = "its output was closed"
            raise self.failure(f"ended ({how})")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise self.failure(
                f"answered {line[:80].decode(errors='replace')!r}, which is not a JSON object"
            )
        if "error" in answer:
            reason = in_brief(str(answer["error"]))
            raise (
                ImportFailed(reason)
                if answer.get("kind") == "import"
                else self.failure(f"failed: {reason}")
            )
        try:
            return parse(kind, answer, where="its answer")
        except UserError as error:
            raise self.failure(f"broke the protocol: {error}") from None

    def failure(self, what: str) -> WorkerFailed:
        """End the worker, and return the error with its last words."""
        self.close()
        self._listener.join(EXIT_S)  # what it wrote last may not have been read yet
        return failed(f"{self._name}: the worker {what}", self._stderr_end)

    def close(self) -> None:
        """Kill the worker and its children."""
        end_program(self._process)
        self._requests.put(None)


def failed(what: str, output: bytes) -> WorkerFailed:
    """Return the error of a program, with the last line of its output. The end of its output is
    logged.
    """
    words = last_words(output)
    if words:
        log.info("%s; the end of its output:\n%s", what, output.decode(errors="replace"))
    return WorkerFailed(f"{what}; its last words: {words}" if words else what)


def last_words(stderr: bytes) -> str:
    """Return the last line of a program's stderr."""
    lines = stderr.decode(errors="replace").strip().splitlines()
    return in_brief(lines[-1]) if lines else ""
