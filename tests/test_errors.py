"""The line that every command prints about a failure."""

import errno
import sys

import pytest

from magicdec.errors import UserError, exit_code, to_stderr


def test_a_line_is_one_write(monkeypatch):
    writes = []
    monkeypatch.setattr(sys.stderr, "write", writes.append)
    to_stderr("error: job 2: killed by SIGKILL")
    assert writes == ["error: job 2: killed by SIGKILL\n"]


def test_no_text_of_a_file_steers_the_terminal(capsys):
    error = UserError("model.safetensors: a tensor is stored as \x1b[31mF8\r\u202e")
    escaped = r"model.safetensors: a tensor is stored as \x1b[31mF8\r\u202e"

    def fail():
        raise error

    assert str(error) == escaped
    assert exit_code(fail) == 2
    assert capsys.readouterr().err == f"error: {escaped}\n"
    to_stderr("warning: \x9b2J")
    assert capsys.readouterr().err == "warning: \\x9b2J\n"


def test_a_file_that_the_system_refuses_is_one_line(capsys):
    def fail():
        raise OSError(errno.ENAMETOOLONG, "File name too long", "runs/xxx")

    def fail_without_a_name():
        raise OSError("without a file")

    assert exit_code(fail) == 2
    assert capsys.readouterr().err == "error: runs/xxx: File name too long\n"
    with pytest.raises(OSError, match="without a file"):
        exit_code(fail_without_a_name)
