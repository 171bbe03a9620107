"""The lock of a run: a lock on a file in its folder, which the kernel releases when its holder
dies.

The file names host and pid, for people. It is removed with the lock; the file of a killed process
is taken over.

The package filelock does not replace this: it leaves its file in each folder, has no way to ask for
a lock without writing (a reader of a read-only store must know who runs), fails on file systems
that answer ENOTSUP or ENOLCK, and where they answer ENOSYS it takes a lock that outlives a killed
process.
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
PATIENCE_S = 0.5  # a reader holds the lock for a moment too
POLL_S = 0.05
NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}  # some network file systems


class Busy(UserError):
    """Another process is running this run."""


@contextmanager
def locked(folder: Path, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Hold the lock of a run's folder, which is created. Raise OSError, or Busy if another process
    keeps the lock.
    """
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
            # Before the lock is released: a waiting process sees that the file is gone.
            (folder / NAME).unlink()
            folder.rmdir()  # if the run has left nothing there
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Return True if a living process holds the lock, or if that cannot be found out."""
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
    """Return a descriptor that holds the lock, or None if another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:  # the last holder has removed the folder between our two calls
        return None
    try:
        _flock(descriptor)
        # The last holder may have removed the file between our two calls: then we hold a file that
        # nobody else opens.
        if os.fstat(descriptor).st_ino == path.stat().st_ino:
            os.ftruncate(descriptor, 0)
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def _flock(descriptor: int) -> None:
    """Take the lock. On a file system without locks do nothing: runs are not guarded against each
    other there.
    """
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def _holder(folder: Path) -> str:
    try:
        return (folder / NAME).read_text(errors="replace").strip() or "another process"
    except OSError:
        return "another process"
