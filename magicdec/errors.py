"""Exceptions that the command line explains to the user, and lines on stderr."""

import signal
import sys
from collections.abc import Callable

from typing_extensions import override

USER_ERROR = 2  # the exit code
# Parts of the messages of PyTorch, CUDA and its libraries, and of the system's loader.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED", "failed to map segment")


class UserError(ValueError):
    """A mistake in the configuration or the input: one line that names the key, the value and what
    would be valid.

    The command line prints it without a traceback and exits with code 2. `kind` is what a failed
    run records.
    """

    kind = "invalid"

    @override
    def __str__(self) -> str:
        # A value may come from a file that anyone has written.
        return printable(super().__str__(), keep="\n")


class Unsupported(UserError):
    """A model that our own transformer does not cover; another implementation may."""


class StorageError(UserError):
    """A run store that cannot be written to, such as on a full disk."""

    kind = "storage"


class NonFinite(UserError):
    """Logits that are NaN or infinite: the run has failed, because what it decoded means
    nothing.
    """

    kind = "non_finite"


class Stopped(KeyboardInterrupt):
    """SIGTERM: someone, or a sweep's early stopping, has ended the run. What was measured is
    kept.
    """


class JobFailed(Exception):
    """A job that has failed and whose error is on stderr already; its argument is the exit code."""


def printable(text: str, keep: str = "") -> str:
    """Return text with control characters, line ends and invisible characters escaped, except for
    those in `keep`.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c in keep or c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )


def to_stderr(line: str) -> None:
    """Print a line to stderr in one write, so that another process's line cannot come between it
    and its end.
    """
    sys.stderr.write(f"{printable(line)}\n")
    sys.stderr.flush()


def in_one_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its text."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def in_brief(text: str, most: int = 300) -> str:
    """Return the beginning of a text from elsewhere as one line."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= most else f"{line[:most]}..."


def exit_in_words(code: int | None) -> str:
    """Return the exit code of another process in words."""
    if code == -9:
        return "killed by SIGKILL, perhaps because the system was out of memory"
    return (
        f"signal {signal.Signals(-code).name}"
        if code is not None and code < 0
        else f"exit code {code}"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory, or address space, has run out; only some errors have a type for it."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY)


def exit_code(command: Callable[[], int | None]) -> int:
    """Run a command line and return its exit code: 2, after one line on stderr, for a UserError and
    for a file that the system refuses to open.
    """
    try:
        return command() or 0
    except UserError as error:
        to_stderr(f"error: {error}")
        return USER_ERROR
    except OSError as error:
        if error.filename is None:
            raise
        to_stderr(f"error: {error.filename}: {error.strerror}")
        return USER_ERROR
