"""The line that every command prints about a failure."""

import sys

from magicdec.errors import to_stderr


def test_a_line_is_one_write(monkeypatch):
    writes = []
    monkeypatch.setattr(sys.stderr, "write", writes.append)
    to_stderr("error: job 2: killed by SIGKILL")
    assert writes == ["error: job 2: killed by SIGKILL\n"]
