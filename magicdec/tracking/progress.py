"""Progress on stderr: bars on a terminal, a line per finished stage elsewhere, nothing for short
stages.

A task counts in a plain number, which the drawing thread reads a few times a second: a decode loop
pays for one addition.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from types import TracebackType
from typing import Any, Protocol

from rich import progress as rich_progress
from rich.console import Console as RichConsole
from rich.console import RenderableType
from typing_extensions import override

from magicdec.tracking.console import Console

Line = Mapping[str, Any]
Follow = Callable[[Line], None]
DELAY_S = 1.0  # stages shorter than this are not shown
DRAWINGS_PER_SECOND = 4


class Stage:
    """A stage of the work, as a context manager. `total` is None where its length is unknown."""

    def __init__(
        self, name: str, total: float | None, at_end: Callable[["Stage"], None] | None = None
    ):
        self.name, self.running = name, True
        self.done, self.total = 0.0, total
        self._start, self._seconds = perf_counter(), 0.0
        self._at_end = at_end

    @property
    def seconds(self) -> float:
        """Return the time that the stage has taken so far, or in all."""
        return perf_counter() - self._start if self.running else self._seconds

    def advance(self, amount: float = 1) -> None:
        """Count `amount` more of `total` as done."""
        self.done += amount

    def __enter__(self) -> "Stage":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._seconds, self.running = self.seconds, False
        if error is None and self._at_end is not None:
            self._at_end(self)


class Progress(Protocol):
    """Display of stages, and the callback of the program that follows the run."""

    def task(self, name: str, total: float | None = None) -> Stage:
        """Begin a stage of `total` units."""
        ...

    def report(self, line: Line) -> None:
        """Pass figures on: how a pass is doing, or what a repeat has measured."""
        ...


class _Lines:
    """Progress where nothing can be redrawn: a line at the end of each stage."""

    def __init__(self, console: Console, follow: Follow | None):
        self._console, self._follow = console, follow

    def task(self, name: str, total: float | None = None) -> Stage:
        return Stage(name, total, self._tell)

    def report(self, line: Line) -> None:
        if self._follow is not None:
            self._follow(line)
        _print_repeat(self._console, line)

    def _tell(self, task: Stage) -> None:
        if task.seconds >= DELAY_S:
            self._console.print(f"{task.name}: {task.seconds:.1f} s", highlight=False, markup=False)


class _Bars(rich_progress.Progress):
    """A bar per running stage, gone when it ends."""

    def __init__(self, console: Console, follow: Follow | None):
        self._running: dict[rich_progress.TaskID, Stage] = {}
        self._follow, self._point = follow, ""
        super().__init__(
            rich_progress.TextColumn("{task.description}", markup=False),
            rich_progress.BarColumn(),
            rich_progress.TaskProgressColumn(),
            rich_progress.TextColumn("{task.fields[times]}"),
            console=console,
            refresh_per_second=DRAWINGS_PER_SECOND,
            transient=True,
            redirect_stdout=False,  # or stdout would end up on stderr
        )

    def task(self, name: str, total: float | None = None) -> Stage:
        task = Stage(name, total)
        self._running[self.add_task(name, total=total, visible=False, times="")] = task
        self._point = ""
        return task

    def report(self, line: Line) -> None:
        if self._follow is not None:
            self._follow(line)
        self._point = _in_words(line)
        _print_repeat(self.console, line)

    @override
    def get_renderables(self) -> Iterable[RenderableType]:
        """Read what the tasks have counted, at each drawing."""
        for number, task in list(self._running.items()):
            if task.running:
                visible = task.seconds >= DELAY_S
                self.update(
                    number, completed=task.done, visible=visible, times=_times(task) + self._point
                )
            else:
                self.remove_task(number)
                del self._running[number]
        return super().get_renderables()


def _times(task: Stage) -> str:
    """Return the time taken and, if it is known, the time left."""
    taken = f"{task.seconds:.0f} s"
    if not task.total or not task.done:
        return taken
    left = task.seconds * max(0.0, task.total / task.done - 1)
    return f"{taken}, about {left:.0f} s left"


def _in_words(point: Line) -> str:
    """Return a point of a pass as the end of its bar."""
    speed = next(
        (value for key, value in point.items() if key.endswith("/tokens_per_second")), None
    )
    parts = [f", {speed:,.0f} tokens/s"] if speed is not None else []
    parts += [f", {point['live/accepted']:.2f} accepted"] if "live/accepted" in point else []
    return "".join(parts)


def _print_repeat(console: RichConsole, line: Line) -> None:
    """Print the line of a repeat that took long enough to be waited for."""
    if line.get("repeat/seconds", 0.0) < DELAY_S:
        return
    speedup = f", {line['repeat/speedup']:.2f}x per row" if "repeat/speedup" in line else ""
    console.print(
        f"repeat {line['repeat']}: {line['repeat/seconds']:.1f} s{speedup}",
        highlight=False,
        markup=False,
    )


@contextmanager
def progress(console: Console | None = None, follow: Follow | None = None) -> Iterator[Progress]:
    """Show the stages that begin within; `follow` gets what is reported."""
    console = console or Console(stderr=True)
    if console.is_interactive:
        with _Bars(console, follow) as display:
            yield display
    else:
        yield _Lines(console, follow)
