"""Workers of pytest-xdist, forked from the server of programs.py.

pytest-xdist starts this file instead of Python and talks to it through pipes. They are handed on
to the worker, and this process waits for its end.
"""

import os
import shlex
import signal
import sys
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from pathlib import Path

FORK_SERVER = forkserver._forkserver  # what this process knows of it


def interpreter() -> str:
    """Return the command that starts this file. The server is running."""
    return shlex.join([sys.executable, __file__, FORK_SERVER._forkserver_address])


def keep_server() -> None:
    """Fork from the server that is running, which this process has not started."""
    FORK_SERVER.ensure_running = forkserver.ensure_running = lambda: None


def work(pipes: list[Connection], env: dict[str, str]) -> None:
    """Become the worker: execute the line that comes first, as the interpreter would."""
    for number, pipe in enumerate(pipes):
        os.dup2(pipe.fileno(), number)
    os.environ.clear()
    os.environ.update(env)
    keep_server()
    sys.stdin = os.fdopen(0, closefd=False)
    exec(eval(sys.stdin.readline()), {"__name__": "__main__"})


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker
    sys.path[0] = str(Path(__file__).parents[1])
    FORK_SERVER._forkserver_address = sys.argv[1]
    _, FORK_SERVER._forkserver_alive_fd = os.pipe()  # the server's own is held by who started it
    keep_server()
    pipes = [Connection(number) for number in range(3)]
    worker = get_context("forkserver").Process(target=work, args=(pipes, dict(os.environ)))
    worker.start()
    worker.join()
    sys.exit(worker.exitcode)
