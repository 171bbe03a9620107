"""Printed commands parse back to their words, by Python and by the shell that they are pasted
into.
"""

import re
import shlex
import subprocess

import pytest

from magicdec.shell import ContentOf, command_line
from tests.programs import ROOT

ODD = [
    "my runs",
    "it's",
    'say "hi"',
    "a;b",
    "$HOME",
    "`id`",
    "\\",
    "",
    "*",
    "a\nb",
    "#1",
    "ü",
    "--out=a --b",
]


@pytest.mark.parametrize("indent", ["", "    "])
def test_a_command_parses_back_to_its_words(indent):
    words = ["printf", "%s\\0", *ODD]
    command = command_line(words, indent)
    assert [word for word in shlex.split(command) if word != "\n"] == words
    said = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True
    ).stdout
    assert said.split("\0")[:-1] == ODD


def test_a_word_may_be_the_content_of_a_file(tmp_path):
    file = tmp_path / "it's mine.json"
    file.write_text('{"a": "$HOME  b"}')
    command = command_line(["printf", "%s", ContentOf(str(file))])
    assert (
        subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
        == file.read_text()
    )


def test_no_other_module_quotes_for_a_shell():
    users = [
        path
        for path in (ROOT / "magicdec").rglob("*.py")
        if re.search(r"\bshlex\b", path.read_text())
    ]
    assert [path.name for path in users] == ["shell.py"]
