"""The one exception that stands for a user's mistake."""


class UserError(ValueError):
    """A mistake in the configuration or the input: one line that names the key, the value and what would be valid.

    `launch.py` prints it without a traceback and exits with code 2.
    """
