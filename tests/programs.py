"""Python programs, each in a process of its own that begins with PyTorch and its company imported.

Such an import takes longer than most programs of the tests. A server process imports once, and
every program is forked from it; it is as fresh as a new interpreter in all but that. A test of the
import itself starts an interpreter. Workers of pytest-xdist are forked from it, too (worker.py).
"""

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping
from multiprocessing import forkserver
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

from magicdec.scenarios import imports

ROOT = Path(__file__).parents[1]
SERVER = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
# What tests and their programs import beyond what a launch does.
TESTED = ["pandas", "scipy.stats", "torch._dynamo.utils", "hypothesis", "altair"]
TESTED += ["magicdec.peers.endpoint", "magicdec.http.app"]


class Program:
    """A program that has been started, with the methods of subprocess.Popen that tests need."""

    def __init__(self, *arguments: object, cwd: Path = ROOT, env: Mapping[str, str] | None = None):
        """`arguments` are those of `python`; the environment is this process's by default."""
        start_server()
        self._output = TemporaryDirectory()
        self.args = list(map(str, arguments))
        work = (self.args, str(cwd), dict(os.environ if env is None else env), self._output.name)
        self._process = SERVER.Process(target=_run, args=work)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def finish(self, timeout: float = 120) -> CompletedProcess:
        """Wait for the end of the program. Return what subprocess.run returns."""
        self._process.join(timeout)
        out, err = (
            Path(self._output.name, name).read_text(encoding="utf-8") for name in ("out", "err")
        )
        if self._process.exitcode is None:
            self.kill()
            raise TimeoutError(f"{self.args} took longer than {timeout} s: {out}{err}")
        self._output.cleanup()
        return CompletedProcess(self.args, self._process.exitcode, out, err)


def python(
    *arguments: object, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> CompletedProcess:
    """Run a program to its end."""
    return Program(*arguments, cwd=cwd, env=env).finish()


def start_server() -> None:
    """Make sure that the server is running, with everything imported that is slow to import."""
    launched = ["launch", *imports("compare"), *imports("serve")]
    multiprocessing.set_forkserver_preload([*launched, *TESTED, "tests.preloaded"])
    if sys.platform == "linux":
        forkserver.ensure_running()


def _run(arguments: list[str], cwd: str, env: dict[str, str], output: str) -> None:
    """Become the program."""
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(output, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    first, *rest = arguments
    sys.argv[:] = rest if first == "-m" else [first, *rest[1:]] if first == "-c" else arguments
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    sys.path.insert(0, str(Path(first).parent) if first[0] != "-" else cwd)
    if first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        exec(rest[0], {"__name__": "__main__"})
    else:
        runpy.run_path(first, run_name="__main__")
