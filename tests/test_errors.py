"""The line that every command prints about a failure."""

import io
import sys
from typing import ClassVar

from magicdec.errors import to_stderr


def test_a_line_is_one_write(monkeypatch):
    class Stream(io.StringIO):
        writes: ClassVar[list[str]] = []

        def write(self, text: str) -> int:
            self.writes.append(text)
            return len(text)

    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    to_stderr("error: job 2: killed by SIGKILL")
    assert stream.writes == ["error: job 2: killed by SIGKILL\n"]
