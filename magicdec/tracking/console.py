"""The terminal. Text that is shown comes from files, too, and must not steer it."""

from collections.abc import Iterable

from rich import console as rich_console
from rich.segment import Segment
from typing_extensions import override

from magicdec.errors import printable


class Console(rich_console.Console):
    """rich's console, with control characters and invisible characters escaped in all that is
    printed.

    What does not go to a terminal has no blanks at the ends of its lines.
    """

    @override
    def render(
        self,
        renderable: rich_console.RenderableType,
        options: rich_console.ConsoleOptions | None = None,
    ) -> Iterable[Segment]:
        blanks: list[Segment] = []  # those at the end of what has been seen of a line
        for text, style, control in super().render(renderable, options):
            if control or self.is_terminal:
                yield Segment(text if control else printable(text, keep="\n"), style, control)
                continue
            shown = printable(text, keep="\n").rstrip(" ")
            if shown == "\n":
                blanks.clear()
            if shown:
                yield from blanks
                yield Segment(shown, style)
                blanks.clear()
            if number := len(text) - len(text.rstrip(" ")):
                blanks.append(Segment(" " * number, style))
        yield from blanks
