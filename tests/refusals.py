"""Mistakes of a user, as commands report them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from magicdec.errors import UserError


@contextmanager
def refusal(*said: str) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expect a UserError: a single line, with all that must be `said`."""
    with pytest.raises(UserError) as raised:
        yield raised
    message = str(raised.value)
    assert "\n" not in message
    for words in said:
        assert words in message
