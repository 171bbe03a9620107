"""The terminal. Text that is shown comes from files, too, and must not steer it."""

from collections.abc import Iterable

from rich import console as rich_console
from rich.segment import Segment
from typing_extensions import override

from magicdec.errors import printable


class Console(rich_console.Console):
    """rich's console, with control characters and invisible characters escaped in all that is printed."""

    @override
    def render(
        self, renderable: rich_console.RenderableType, options: rich_console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text, keep="\n"), style, control)
