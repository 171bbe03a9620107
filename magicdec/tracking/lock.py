"""Who runs a run: a lock on a file in its folder, which the kernel gives back when its holder dies, however it dies.

The file says host and pid, for people. It goes when the lock does; that of a killed process is taken over.
"""

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from magicdec.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
PATIENCE_S = 0.5  # a reader holds the lock for a moment, too
POLL_S = 0.05
NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}  # some network file systems


class Busy(UserError):
    """Another process is running this run."""


@contextmanager
def locked(folder: Path, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Hold the lock of a run's folder, which is made; raises OSError, and Busy where another process keeps it."""
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + patience_s
    while (descriptor := _try(folder / NAME)) is None:
        if time.monotonic() > end:
            raise Busy(f"run {folder.name} is being run by {_holder(folder)}; wait for it to end")
        time.sleep(POLL_S)
    try:
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        with suppress(OSError):
            (folder / NAME).unlink()  # while it is held: whoever waits for this file sees that it is gone
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Whether a living process holds the lock; where that cannot be told, it is believed to."""
    if fcntl is None:
        return True
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _try(path: Path) -> int | None:
    """A descriptor that holds the lock; None where another process does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _flock(descriptor)
        # Its holder may have removed the file between our two calls: then we hold what nobody else will ever open.
        if os.fstat(descriptor).st_ino == path.stat().st_ino:
            os.ftruncate(descriptor, 0)
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def _flock(descriptor: int) -> None:
    """Take it, where the file system knows locks; elsewhere, runs are not guarded against each other."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def _holder(folder: Path) -> str:
    try:
        return (folder / NAME).read_text().strip() or "another process"
    except OSError:
        return "another process"
