"""The text of an answer as it grows, up to its first stop string."""

from collections.abc import Sequence
from typing import Any

from magicdec.data.tokenizer import Detokenizer


class StoppableText:
    """Text up to the first stop string, which may span tokens and rounds.

    An ending that may begin a stop string is held back until more tokens arrive.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()):
        self._detokenizer, self._stops, self._held = Detokenizer(tokenizer), stops, ""
        self.stopped = False  # a stop string was found: nothing follows

    def add(self, tokens: list[int], last: bool = False) -> str:
        """Return the text that these tokens add."""
        if self.stopped:
            return ""
        text = self._held + self._detokenizer.add(tokens, last)
        found = [at for at in map(text.find, self._stops) if at >= 0]
        self.stopped = bool(found)
        end = min(found) if found else len(text)
        if not (found or last):
            end -= max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[end:]
        return text[:end]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest prefix of a stop string that the text ends with."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
