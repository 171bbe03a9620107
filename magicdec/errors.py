"""Exceptions that the command line has its own answers to."""


class UserError(ValueError):
    """A mistake in the configuration or the input: one line that names the key, the value and what would be valid.

    `launch.py` prints it without a traceback and exits with code 2.
    """


class StorageError(UserError):
    """A run store that cannot be written to, such as on a full disk."""


class JobFailed(Exception):
    """A job that has failed and whose error is on stderr already; its argument is the exit code."""
