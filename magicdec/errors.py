"""Exceptions that the command line explains to the user, and lines on stderr."""

import sys
from collections.abc import Callable

USER_ERROR = 2  # the exit code


class UserError(ValueError):
    """A mistake in the configuration or the input: one line that names the key, the value and what would be valid.

    The command line prints it without a traceback and exits with code 2. `kind` is what a failed run records.
    """

    kind = "invalid"


class StorageError(UserError):
    """A run store that cannot be written to, such as on a full disk."""

    kind = "storage"


class NonFinite(UserError):
    """Logits that are NaN or infinite: the run has failed, because what it decoded means nothing."""

    kind = "non_finite"


class JobFailed(Exception):
    """A job that has failed and whose error is on stderr already; its argument is the exit code."""


def to_stderr(line: str) -> None:
    """Print a line to stderr in one write, so that another process's line cannot come between it and its end."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def in_one_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its text."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def exit_code(command: Callable[[], int | None]) -> int:
    """Run a command line and return its exit code: 2, after one line on stderr, for a UserError."""
    try:
        return command() or 0
    except UserError as error:
        to_stderr(f"error: {error}")
        return USER_ERROR
