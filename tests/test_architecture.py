"""The architecture page names the functions that a run goes through, in their order: a quick run is
watched.
"""

import re
import sys
from pathlib import Path

import pytest

from magicdec import cli
from tests.programs import ROOT
from tests.runs import SMALL

PAGE = (ROOT / "docs" / "architecture.md").read_text()
# Of files that there are: NAME stands for a new one.
PATHS = re.compile(r"`((?:magicdec|hydra_plugins|tests|docs|conf)/(?!\w+/NAME)[\w/.]*\w\.\w+)`")


def way_of_a_run():
    """The steps of the page's table: function names and a file."""
    section = PAGE.partition("## The way of a run")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!step|---)[^|]* \| ([^|]*) \| `([^`]*)` \|$", section, re.MULTILINE)
    return [(re.findall(r"`(\w+)`", names), file) for names, file in rows]


def calls_of(monkeypatch, arguments):
    """Run a command here. Return the package's functions in the order of their first calls, as
    (file, name).
    """
    calls = []
    seen = {}  # by identity, and kept: a code object hashes all that it holds

    def watch(frame, event, _):
        code = frame.f_code
        if event == "call" and id(code) not in seen:
            seen[id(code)] = code
            file = Path(code.co_filename)
            if file.is_relative_to(ROOT / "magicdec"):
                calls.append((str(file.relative_to(ROOT)), code.co_name))

    monkeypatch.setattr(sys, "argv", ["launch.py", *arguments])
    sys.setprofile(watch)
    try:
        assert cli.main() == 0
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.slow  # every call of every library is watched
def test_a_run_goes_the_way_that_the_page_shows(tmp_path, monkeypatch):
    calls = calls_of(monkeypatch, [*SMALL, f"runs_dir={tmp_path}"])
    steps = way_of_a_run()
    assert len(steps) >= 15
    reached = []
    for names, file in steps:
        places = [calls.index((file, name)) for name in names if (file, name) in calls]
        assert places, f"{file} has no {names} that a run calls"
        reached.append(min(places))
    assert reached == sorted(reached)


@pytest.mark.parametrize("path", sorted(set(PATHS.findall(PAGE))))
def test_what_the_page_names_exists(path):
    assert (ROOT / path).is_file()
