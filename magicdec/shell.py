"""Commands that are printed for people to paste into a shell."""

import shlex
from collections.abc import Sequence


class ContentOf(str):
    """The path of a file whose content is the word of a command."""


def command_line(words: Sequence[str], indent: str = "") -> str:
    """Return a command as a shell reads it: `shlex.split` gives its words back.

    With an `indent`, each option is on a line of its own.
    """
    parts = []
    for word in words:
        begins_a_line = indent and word.startswith("--")
        parts.append(f"\\\n{indent}{_quoted(word)}" if begins_a_line else _quoted(word))
    return " ".join(parts)


def _quoted(word: str) -> str:
    return f'"$(cat {shlex.quote(word)})"' if isinstance(word, ContentOf) else shlex.quote(word)
