"""Progress: bars on a terminal, a line per long stage elsewhere."""

import io

import pytest
from rich.console import Console

from magicdec.tracking import progress as module
from magicdec.tracking.progress import progress


@pytest.fixture
def shown(monkeypatch):
    """Run stages on a console of a kind; returns what it showed."""

    def show(work, terminal, delay):
        monkeypatch.setattr(module, "DELAY_S", delay)
        monkeypatch.setenv("TERM", "xterm")
        file = io.StringIO()
        with progress(Console(file=file, force_terminal=terminal, width=80)) as display:
            work(display)
        return file.getvalue()

    return show


def work(display):
    with display.task("prefill [1/2]", total=10) as task:
        for _ in range(5):
            task.advance(1)
        if hasattr(display, "refresh"):
            display.refresh()
        assert task.done == 5
    with display.task("profiling") as task:
        task.advance()


def test_a_line_per_stage_where_nothing_can_be_redrawn(shown):
    lines = shown(work, terminal=False, delay=0).splitlines()
    assert [line.rpartition(":")[0] for line in lines] == ["prefill [1/2]", "profiling"]


def test_a_bar_on_a_terminal_which_then_goes(shown):
    text = shown(work, terminal=True, delay=0)
    assert "prefill [1/2]" in text
    assert " 50%" in text
    assert "left" in text
    erased, cursor = text.rindex("\x1b[2K"), text.rindex("\x1b[?25h")
    assert text.rindex("left") < erased < cursor


@pytest.mark.parametrize("terminal", [True, False])
def test_short_stages_and_those_that_fail_are_not_shown(shown, terminal):
    text = shown(work, terminal, delay=60)
    assert "prefill" not in text
    assert "profiling" not in text

    def fail(display):
        with display.task("prefill", total=10):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        shown(fail, terminal, delay=0)


def test_stages_may_overlap_and_overrun(shown):
    def overlapping(display):
        with display.task("outer", total=2) as outer, display.task("inner", total=3) as inner:
            inner.advance(5)
            outer.advance(0.5)
            display.refresh()

    text = shown(overlapping, terminal=True, delay=0)
    assert "100%" in text
    assert " 25%" in text
    assert "about 0 s left" in text
