"""The commands that report, on the store of a test."""

import pytest

from magicdec.commands.compare import main as compare_command
from magicdec.commands.report import main


@pytest.fixture
def report(tmp_path, capsys):
    """Return what the command prints of a store, that of the test unless it is given; or its
    mistake, one line.
    """

    def run(*arguments, runs=tmp_path, is_mistaken=False, command=main):
        code = command([*([str(runs)] if runs else []), *map(str, arguments)])
        out, err = capsys.readouterr()
        if not is_mistaken:
            assert code == 0, err
            return out
        assert (code, err.count("\n"), err[:7]) == (2, 1, "error: ")
        return err

    return run


@pytest.fixture
def compare(report, tmp_path):
    """Return what the comparison of two runs prints."""
    return lambda *names, **more: report(
        *names, "--runs-dir", tmp_path, runs=None, command=compare_command, **more
    )
