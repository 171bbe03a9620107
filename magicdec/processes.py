"""Processes that this one starts, watches, and ends with their children: programs, each in a
session of its own, and functions of ours at the other end of a pipe.
"""

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

LOST = 255  # what multiprocessing takes for the exit code of a process whose fork server has died


def start_program(
    command: Sequence[str], environment: Mapping[str, str], **streams: Any
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own: Ctrl-C is for this process, which ends the program.

    The variables of `environment` are added to ours. `streams` are those of subprocess.Popen.
    """
    return subprocess.Popen(
        command, env=os.environ | environment, start_new_session=True, **streams
    )


def end_program(program: subprocess.Popen[bytes], patience_s: float = 0.0) -> None:
    """Kill a program and its children. With `patience_s`, close its input first, and give it so
    many seconds to end by itself.
    """
    if patience_s and program.stdin is not None:
        program.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            program.wait(patience_s)
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()


class PipedProcess:
    """A function that runs in a process of its own, with one end of a pipe.

    The pipe closes when the process ends, even if it is killed. The process exits when this one
    ends.
    """

    def __init__(
        self, start: str, function: Callable[..., None], *arguments: Any, is_daemon: bool = False
    ):
        """Call `function(pipe, *arguments)` in a process that is started by this method of
        multiprocessing. Raise EOFError or ConnectionError if its fork server dies meanwhile.
        """
        if start == "forkserver":
            _ensure_fork_server()
        context: Any = multiprocessing.get_context(start)
        self.pipe, other_end = multiprocessing.Pipe()
        self.process = context.Process(
            target=_call, args=(function, other_end, *arguments), daemon=is_daemon
        )
        self.process.start()
        other_end.close()  # now the process alone has it

    @property
    def pid(self) -> int:
        """Return the id of the process."""
        return self.process.pid

    def exit_code(self, patience_s: float = 0.0) -> int | None:
        """Return the exit code, or -N for signal N; None for a process that does not end within so
        many seconds.
        """
        self.process.join(patience_s)
        return self.process.exitcode


def end_all(processes: Iterable[PipedProcess], patience_s: float) -> None:
    """Kill processes, and wait for a limited time: a driver may keep even a killed one."""
    processes = list(processes)
    for ended in processes:
        ended.process.kill()
    wait_for_all(processes, patience_s)


def wait_for_all(processes: Iterable[PipedProcess], patience_s: float) -> None:
    """Wait until all of them have ended, but no longer than so many seconds in all."""
    deadline = time.monotonic() + patience_s
    for ended in processes:
        ended.process.join(max(0.0, deadline - time.monotonic()))


def _ensure_fork_server() -> None:
    """Start the server that new processes are forked from. It inherits that Ctrl-C is ignored: only
    this process handles it.
    """
    from multiprocessing import forkserver  # here, because other systems may lack it

    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, handler)


def _call(function: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    _follow_parent()
    function(pipe, *arguments)


def _follow_parent() -> None:
    """Exit when the parent process ends, even if it is killed."""

    def follow() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
